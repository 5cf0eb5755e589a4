"""`triton.language` is left as it was, so one kernel object is simulated and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import sundog

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


def test_simulate_compile_simulate_in_a_fresh_process(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # nothing is compiled already
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("fresh_process.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it was\n"


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(False, "on purpose")


def test_a_kernel_that_fails_leaves_nothing_behind() -> None:
    def main(world: sundog.World) -> None:
        failing_kernel[(3,)](torch.zeros(1))

    owners = [tl, tl.core, tl.tensor, tl.dtype, triton.JITFunction]
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(sundog.errors.KernelError, match="on purpose"):
        sundog.run(main, 2, backend="sim")
    assert [dict(vars(owner)) for owner in owners] == before
