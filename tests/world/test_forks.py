"""A fork of a rank is no rank: it may not speak for its parent, nor stay when it leaves."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sundog
from sundog.errors import WorldClosed
from tests.support.scripts import torchrun

pytestmark = pytest.mark.sim_only

_ONES = torch.ones(4)


def _leave(how: str) -> None:
    if how == "raises":
        raise LookupError("the fork fails")
    sys.exit(int(how))


def _forked(world: sundog.World, out: torch.Tensor, how: str) -> str:
    """What a fork gets from an op that was called before, and its exit status."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            world.all_reduce(_ONES, out=out)
        except WorldClosed as error:
            os.write(write, f"{out.tolist()} {error}".encode())
        _leave(how)
    os.close(write)
    with os.fdopen(read) as answer:
        return f"{answer.read()} {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"


@pytest.mark.parametrize("backend", ["sim", "shm"])
@pytest.mark.parametrize(("how", "status"), [("0", 0), ("3", 3), ("raises", 1)])
def test_a_fork_is_refused_and_ends(backend: str, how: str, status: int, capfd: Any) -> None:
    def main(world: sundog.World) -> tuple[str, list[float]]:
        out = torch.empty(4)
        for _ in range(3):
            world.all_reduce(_ONES, out=out)
        answer = _forked(world, out, how) if world.rank == 1 else ""
        return answer, world.all_reduce(_ONES).tolist()

    found = sundog.run(main, 2, backend, timeout=20)
    assert [total for _, total in found] == [[2.0] * 4] * 2
    assert found[1][0].startswith("[2.0, 2.0, 2.0, 2.0] the world belongs to process")
    assert found[1][0].endswith(f" {status}")
    assert ("the fork fails" in capfd.readouterr().err) == (how == "raises")


def test_a_fork_under_torchrun_says_nothing_for_its_rank(tmp_path: Path) -> None:
    """Its exit functions run too, and a rank that ends without closing its world tells so."""
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys, time, torch, sundog\n"
        "world = sundog.init('shm')\n"
        "world.all_reduce(torch.ones(3))\n"
        "if world.rank == 1 and os.fork() == 0:\n"
        "    sys.exit(0)\n"
        "assert world.rank != 1 or os.wait()[1] == 0\n"
        "time.sleep(0.5 * world.rank)\n"
        "assert world.all_reduce(torch.ones(3)).tolist() == [2.0] * 3\n"
        "world.close()\n"
    )
    status, _, errors = torchrun(tmp_path, ["main.py"], 2, {"SUNDOG_TIMEOUT": "20"})
    assert status == 0, errors
