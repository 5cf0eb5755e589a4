"""Every example runs by itself, under torchrun, and gives the same on every backend."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sundog.tools._subject import function_of

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
ids = [path.stem for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=ids)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_example_in_process(path: Path, world_size: int, run, request, monkeypatch):
    monkeypatch.setenv("STEPS", "1")  # of the one that trains
    if request.config.getoption("--link") and path.stem == "train_llama_block":
        pytest.skip("behind a link rank 0 alone computes; this example compares every rank")
    assert len(run(function_of(str(path), world_size), world_size)) == world_size


@pytest.mark.sim_only
def test_examples_under_torchrun(tmp_path: Path):
    """All of them in the same four processes, one after the other: each starts and ends a world."""
    script = tmp_path / "all.py"
    script.write_text(
        "import runpy, sys\n"
        "for sys.argv in [[path] for path in sys.argv[1:]]:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    words = ["--nproc-per-node", "4", str(script), *map(str, EXAMPLES)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SUNDOG_BACKEND": "shm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("4 ranks") == len(EXAMPLES) > 3, done.stdout
