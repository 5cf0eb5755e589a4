"""Every example runs by itself, under torchrun, and gives the same on every backend."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import Script

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
    """All of them in the same four processes, one after the other: each starts and ends a world.

    torchrun's agent forks them from a process that has imported torch, which saves 20 s of CPU.
    """
    script = tmp_path / "torchrun.py"
    script.write_text(
        "import runpy\n"
        "from torch.distributed.launcher.api import elastic_launch\n"
        "from torch.distributed.run import config_from_args, parse_args\n"
        "def main():\n"
        f"    for path in {[str(path) for path in EXAMPLES]}:\n"
        "        runpy.run_path(path, run_name='__main__')\n"
        "words = '--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id examples '\n"
        "words += '--nproc-per-node 4 --start-method fork main'\n"
        "config = config_from_args(parse_args(words.split()))[0]\n"
        "elastic_launch(config, main)()\n"
    )
    status, out, errors = Script(script, {"SUNDOG_BACKEND": "shm"}).end(100)
    assert status == 0, errors[-3000:]
    assert out.count("4 ranks") == len(EXAMPLES) > 3, out
