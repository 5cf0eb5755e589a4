"""Every example runs by itself, under torchrun, and gives the same on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sundog.exercise import function_of

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
ids = [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=ids)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_example_in_process(path: Path, world_size: int, run):
    assert len(run(function_of(str(path), world_size), world_size)) == world_size


@pytest.mark.sim_only
@pytest.mark.parametrize("path", EXAMPLES, ids=ids)
def test_example_under_torchrun(path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SUNDOG_BACKEND": "shm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 ranks" in done.stdout
