"""`symm` with processes that sundog.run or torchrun starts, and what happens when one dies.

Without MPS, so the ranks take turns on the GPU. tests/conftest.py's `run` covers the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.gpu("virtual")  # once is enough, and not in a rank


def start(*words: str, **variables: str) -> subprocess.CompletedProcess:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SUNDOG_", "PYTEST_"))}
    own |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", **variables}
    own.setdefault("SUNDOG_TIMEOUT", "300")  # our timeout ends a rank that waits for it
    command = [sys.executable, *words]
    return subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=55)


def script(name: str, **variables: str) -> dict:
    done = start("tests/gpu/symm_processes.py", name, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "out": done.stdout}


def test_run_forks_the_ranks():
    assert script("gather")["result"] == [[1.0, 2.0, 3.0]] * 3


def test_a_rank_that_dies_is_named_to_every_other():
    answer = script("dies")
    assert answer["error"].startswith("PeerLost: rank 1 of 3 died (exit status 7)")
    for rank in (0, 2):
        assert f"rank {rank} learnt of it after" in answer["out"]


def test_an_exception_keeps_its_type():
    answer = script("raises")
    assert answer["error"].startswith("KeyError: ")


def test_ranks_must_be_allowed_to_share_a_gpu():
    error = script("gather", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="0")["error"]
    assert error.startswith("RankMismatch: ")
    for pair in ("ranks 0 and 1", "ranks 0 and 2", "ranks 1 and 2"):
        assert f"{pair}: both on NVIDIA" in error


def test_heaps_that_do_not_fit_are_refused():
    error = script("too much")["error"]
    assert "the heaps of rank 0, 1 take 2,199,023,255,552 bytes" in error


def test_an_example_under_torchrun():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = start(*words, "examples/ring.py", SUNDOG_HEAP_SIZE="64M")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks" in done.stdout
