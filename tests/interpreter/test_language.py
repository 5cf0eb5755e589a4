"""`triton.language` is left as it was, so one kernel object is simulated and compiled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support.scripts import python

import sundog
from sundog.interpreter.interpreter import language

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


def test_simulate_compile_simulate_in_a_fresh_process(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # nothing is compiled already
    done = python([Path(__file__).with_name("fresh_process.py")], environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it was\n"


@triton.jit
def failing_kernel(x_ptr):
    tl.static_assert(False, "on purpose")


def test_a_kernel_that_fails_leaves_nothing_behind() -> None:
    def main(world: sundog.World) -> None:
        failing_kernel[(3,)](torch.zeros(1))

    language()  # imports modules of Triton, in which they then stay
    owners = [tl, tl.core, tl.tensor, tl.dtype, triton.JITFunction]
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(sundog.errors.KernelError, match="on purpose"):
        sundog.run(main, 2, backend="sim")
    assert [dict(vars(owner)) for owner in owners] == before


def _without_the_first(configs: list, arguments: dict, **_: object) -> list:
    assert arguments["n"] == 50
    return configs[1:]


@triton.autotune(
    [triton.Config({"BLOCK": n}) for n in (8, 16, 32)],
    key=["n"],
    prune_configs_by={"early_config_prune": _without_the_first},
)
@triton.heuristics({"HALF": lambda given: given["BLOCK"] // 2})
@triton.jit
def tuned_kernel(out, n, BLOCK: tl.constexpr, HALF: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, HALF, mask=at < n)


def test_autotuned_kernel_runs_its_first_config() -> None:
    def main(world: sundog.World) -> list[int]:
        out = torch.zeros(50, dtype=torch.int32)
        tuned_kernel[lambda given: (triton.cdiv(50, given["BLOCK"]),)](out, 50)
        return out.tolist()

    before = type(tuned_kernel).run
    assert sundog.run(main, 2, backend="sim") == [[8] * 50] * 2
    assert type(tuned_kernel).run is before
    assert len(tuned_kernel.configs) == 3
    assert not tuned_kernel.cache  # a GPU has still to find out
