"""A wait that expires on a GPU is not silent either: the run raises, the script fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sundog
from sundog.errors import WaitTimeout

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.gpu("virtual")  # once is enough, and not in a rank

SCRIPT = """
import time, torch, sundog

def main(world):
    x, out = world.full((4,), 1.0), world.zeros((4,))
    for _ in range(4):
        world.all_reduce(x, out=out)
    world.barrier()
    if world.rank != 1:
        world.all_reduce(x, out=out)  # with a plan that is cached, the short way
    return world

"""
ENDS = {
    "virtual": "sundog.run(main, 2, 'virtual', heap_size=64 << 20, timeout=2)",
    # Rank 1 outlives the wait: a rank that ends early is reported as lost instead.
    "symm": "time.sleep(5 * main(sundog.init('symm', heap_size=64 << 20, timeout=2)).rank)",
}


def started(path: Path, *words: str) -> subprocess.CompletedProcess:
    own = {k: v for k, v in os.environ.items() if not k.startswith(("SUNDOG_", "PYTEST_"))}
    own["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    command = [sys.executable, *words, str(path)]
    return subprocess.run(command, env=own, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("backend", ENDS)
def test_a_script_fails_after_an_expired_wait(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + ENDS[backend] + "\n")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = started(path, *(torchrun if backend == "symm" else ()))
    assert done.returncode != 0, done.stdout + done.stderr
    for words in ("WaitTimeout", "rank 0: call 5, all_reduce", "rank 1: call 4, all_reduce"):
        assert words in done.stderr, done.stderr


def test_the_next_call_raises() -> None:
    def main(world: sundog.World) -> bool:
        x, out = world.full((4,), 1.0), world.zeros((4,))
        for _ in range(4):
            world.all_reduce(x, out=out)
        world.barrier()
        if world.rank != 1:
            world.all_reduce(x, out=out)
            with pytest.raises(WaitTimeout):
                world.synchronize()
            with pytest.raises(WaitTimeout, match="rank 1 owes the signal"):
                world.all_reduce(x, out=out)
        world.barrier()
        world.all_reduce(x, out=out)
        return out.tolist() == [world.size] * 4

    assert sundog.run(main, 2, "virtual", heap_size=64 << 20, timeout=2) == [True, True]
