"""Every example runs by itself, under torchrun, and gives the same on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import torchrun

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
    paths = [str(path) for path in EXAMPLES]
    status, out, errors = torchrun(tmp_path, paths, 4, {"SUNDOG_BACKEND": "shm"})
    assert status == 0, errors[-3000:]
    assert out.count("4 ranks") == len(EXAMPLES) > 3, out
