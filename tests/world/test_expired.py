"""A wait that expired is never silent: reads, calls, close, the end of a run, and the exit raise.

Rank 1 skips one all-reduce. The others wait for it in vain, and what they have then is no result.
"""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import Script, torchrun

import sundog
from sundog.backends import shm
from sundog.backends.sim import Sim
from sundog.errors import WaitTimeout

Way = Callable[[torch.Tensor], Any]


def run(fn: Callable[[sundog.World], Any], size: int, backend: str) -> list[Any]:
    if backend == "sim":
        return sundog.run(fn, size, "sim", sim=Sim(expire=True))
    with pytest.MonkeyPatch.context() as patch:  # a busy machine's hosts are late, not lost
        patch.setattr(shm, "KERNELS_WAIT", 0.05)
        return sundog.run(fn, size, "shm", timeout=20)


def skip_one(world: sundog.World, numel: int = 4) -> torch.Tensor:
    """The second call, with a plan that is cached, is not made by rank 1."""
    x, out = world.full((numel,), 1.0), world.zeros((numel,))
    world.all_reduce(x, out=out)
    world.barrier()
    if world.rank != 1:
        world.all_reduce(x, out=out)
    return out


READS: dict[str, Way] = {
    "item": lambda out: out[0].item(),
    "tolist": lambda out: out.tolist(),
    "cpu": lambda out: out.cpu().clone(),
    "numpy": lambda out: out.numpy().sum(),
    "use": lambda out: out + 1,
    "print": str,
    "save": lambda out: torch.save(out, io.BytesIO()),  # in C++: nobody sees it read
}


both = pytest.mark.parametrize("backend", ["sim", "shm"])


@both
@pytest.mark.parametrize("way", READS)
def test_a_host_read_raises(backend: str, way: str) -> None:
    def main(world: sundog.World) -> bool:
        out = skip_one(world)
        if world.rank != 1:
            with pytest.raises(WaitTimeout, match="rank 1 owes the signal"):
                READS[way](out)
        return True

    assert run(main, 3, backend) == [True] * 3


ENDS: dict[str, Callable[[sundog.World], Any]] = {
    "the end of the run": lambda world: None,
    "close": lambda world: world.close(),
    "synchronize": lambda world: world.synchronize(),
    "exit": lambda world: world.__exit__(None, None, None),
}


@both
@pytest.mark.parametrize("how", ENDS)
def test_no_run_ends_as_if_nothing_had_been(backend: str, how: str) -> None:
    """It returned [nan, None, nan]."""

    def main(world: sundog.World) -> None:
        skip_one(world)
        ENDS[how](world)

    with pytest.raises(WaitTimeout, match="rank 1 owes the signal"):
        run(main, 3, backend)


@both
def test_calls_raise_until_every_rank_recovers(backend: str) -> None:
    def main(world: sundog.World) -> list[float]:
        x, other = torch.ones(4), torch.zeros(4)
        out = skip_one(world)
        if world.rank != 1:
            with pytest.raises(WaitTimeout):
                world.synchronize()
            for _ in range(2):  # caught: without a barrier this would be garbage
                with pytest.raises(WaitTimeout, match="rank 1 owes the signal"):
                    world.all_reduce(x, out=other)
                with pytest.raises(WaitTimeout):
                    world.all_gather(x)  # also with a plan that is new
        world.barrier()
        for _ in range(3):
            world.all_reduce(x, out=out)
        return out.tolist()

    assert run(main, 3, backend) == [[3.0] * 4] * 3


def test_an_error_of_the_users_own_stays_the_error() -> None:
    def main(world: sundog.World) -> None:
        skip_one(world)
        with pytest.raises(KeyError), world:
            raise KeyError("mine")

    run(main, 3, "sim")


@both
def test_a_wait_in_a_group(backend: str) -> None:
    """What the world reports covers its groups, and names ranks as the world does."""

    def main(world: sundog.World) -> None:
        group = world.group([1, 2])
        if group is not None:
            skip_one(group)
        world.synchronize()

    with pytest.raises(
        WaitTimeout, match=r"rank 1, program 0: .*; rank 2 owes the signal"
    ) as raised:
        run(main, 3, backend)
    assert (raised.value.record.rank, raised.value.record.peer) == (1, 2)
    assert "\n  rank 1: call 2, " in str(raised.value)
    assert "\n  rank 2: call 1, " in str(raised.value)


DIFFERENT: dict[str, tuple[Callable[[sundog.World, Any], Any], str]] = {
    "op": (lambda w, x: w.all_gather(x[4]), r"call 4, all_reduce .*numel=4.*call 4, all_gather "),
    "shape": (lambda w, x: w.all_reduce(x[8]), "call 4, all_reduce .*numel=4.*call 4.*numel=8"),
    "order": (lambda w, x: (w.all_reduce(x[8]), w.all_reduce(x[4])), "numel=4.*numel=8"),
    "none": (lambda w, x: None, "call 4, .*rank 1: call 3, "),
}


@both
@pytest.mark.parametrize("what", DIFFERENT)
def test_the_error_shows_what_each_rank_called(backend: str, what: str) -> None:
    """All plans are cached: no rank compares anything before it waits."""
    call, pattern = DIFFERENT[what]

    def main(world: sundog.World) -> str:
        x = {n: world.full((n,), 1.0) for n in (4, 8)}
        for each in (world.all_reduce, world.all_gather):
            each(x[4])
        world.all_reduce(x[8])
        world.barrier()
        try:
            if world.rank:
                call(world, x)
            else:
                world.all_reduce(x[4])
            world.synchronize()
        except WaitTimeout as error:
            return str(error)
        return ""

    text = run(main, 2, backend)[0]
    pattern = f"(?s)What each rank called last:.*rank 0: .*{pattern}"
    assert re.search(pattern, text), text
    assert "Make the same calls, in the same order, on every rank." in text


SCRIPT = """
import os, select, sys
sys.path.insert(0, {tests!r})
import sundog, test_expired, torch
world = sundog.init("shm", heap_size=1 << 20)
end = os.pidfd_open(world.exchange(os.getpid())[0])
out = test_expired.skip_one(world)
if world.rank == 1:
    select.select([end], [], [], 60)  # until rank 0 has ended
{then}
"""
SCRIPTS = {
    "reads nothing": "sys.exit(0)",
    "catches all": "try:\n    out.tolist()\nexcept Exception:\n    pass\nworld.all_gather(out)",
}


@pytest.mark.parametrize("then", SCRIPTS)
def test_a_script_that_never_closes_its_world_fails(tmp_path: Path, then: str) -> None:
    """The rank that waited in vain exited with 0, as if nothing had been."""
    path = tmp_path / "script.py"
    here = os.path.dirname(os.path.abspath(__file__))
    path.write_text(SCRIPT.format(tests=here, then=SCRIPTS[then]))
    common = {"WORLD_SIZE": "2", "SUNDOG_TIMEOUT": "4", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    ranks = [Script(path, {**common, "RANK": str(rank)}) for rank in range(2)]
    (status, _, errors), _ = [rank.end(100) for rank in ranks]
    assert status != 0, errors
    assert "WaitTimeout" in errors
    assert "rank 1 owes the signal" in errors


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


TORCHRUN = """
import sys
import sundog, torch
world = sundog.init("shm")
x = torch.ones(4)
for step in range(2):
    if step == 0 or world.rank != 1:
        out = world.all_reduce(x)
    torch.save(out, f"out{world.rank}-{step}.pt")
print("saved", world.rank)
"""


def test_torchrun_fails_if_a_rank_skips_a_collective(tmp_path: Path) -> None:
    """The others printed NaN, saved it, and exited with 0."""
    (tmp_path / "script.py").write_text(TORCHRUN)
    status, out, errors = torchrun(tmp_path, ["script.py"], 3, {"SUNDOG_TIMEOUT": "6"})
    assert status != 0
    # It may have ended already, since it has nothing to wait for.
    named = r"rank 1 (owes the signal|of 3 ended without closing its world)"
    assert re.search(named, errors), errors
    assert "saved 0" not in out
    assert "saved 2" not in out
    saved = sorted(tmp_path.glob("*.pt"))
    assert [path.name for path in saved] == ["out0-0.pt", "out1-0.pt", "out1-1.pt", "out2-0.pt"]
    assert all(torch.equal(torch.load(path), torch.full((4,), 3.0)) for path in saved)
