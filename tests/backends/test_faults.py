"""Ranks that are processes: who is refused, what a lost rank did, and a stranger at the store."""

from __future__ import annotations

import os
import pickle
import re
import socket
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.scripts import Script

import sundog
from sundog.backends import _processes, shm
from sundog.backends._rendezvous import Locality
from sundog.errors import PeerLost, RankMismatch

pytestmark = pytest.mark.sim_only  # names its backend itself, so once is enough


class Processes:
    """Ranks of a script, each with the environment that torchrun would give it."""

    def __init__(self, folder: Path, size: int, source: str) -> None:
        path = folder / "ranks.py"
        path.write_text(textwrap.dedent(source))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        common = {
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }
        self.ranks = [
            Script(path, common | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)})
            for rank in range(size)
        ]

    def end(self, seconds: float = 40) -> list[tuple[int, str, str]]:
        """Exit status, output and errors of each rank."""
        try:
            return [rank.end(seconds) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()


@pytest.fixture
def start(tmp_path: Path) -> Callable[[int, str], Processes]:
    return lambda size, source: Processes(tmp_path, size, source)


def test_a_second_world_is_refused_and_the_first_stays_usable(start: Any) -> None:
    ranks = start(
        2,
        """
        import torch, sundog
        from sundog.errors import SundogError
        first = sundog.init("shm", heap_size=1 << 20, timeout=20)
        try:
            sundog.init("shm", heap_size=1 << 20, timeout=20)
        except SundogError as error:
            print(error)
        print(first.all_gather(torch.tensor([float(first.rank)])).tolist())
        first.close()
        with sundog.init("shm", heap_size=1 << 20, timeout=20) as next_one:
            print(next_one.exchange(next_one.rank))
        """,
    )
    for rank, (status, out, errors) in enumerate(ranks.end()):
        assert status == 0, errors
        refusal, *results = out.splitlines()
        assert f"this process already has World(rank={rank}, size=2, backend='shm')" in refusal
        assert "world.close()" in refusal
        assert results == ["[0.0, 1.0]", "[0, 1]"]


@pytest.mark.parametrize("what", ["boot id", "pid namespace"])
def test_shm_maps_nothing_of_another_machine(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank says that it is elsewhere; had they mapped /proc/PID/fd/N, nobody would notice."""

    def elsewhere() -> Locality:
        mine = f"own-{os.getpid()}"
        return Locality("node", *((mine, "pid:[1]") if what == "boot id" else ("same", mine)))

    monkeypatch.setattr(shm, "locality", elsewhere)
    with pytest.raises(RankMismatch, match="ranks 0 and 1 run") as error:
        sundog.run(lambda world: None, 2, "shm")
    assert what in str(error.value)
    assert len(set(re.findall(r"own-\d+", str(error.value)))) == 2, "both sides are named"


def test_the_others_hear_what_a_rank_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_processes, "_GRACE", 60)  # a busy machine must not end them before

    def main(world: sundog.World) -> None:
        world.barrier()
        if world.rank == 1:
            raise KeyError("no such shelf")
        try:
            world.barrier()
        except PeerLost as error:
            (tmp_path / str(world.rank)).write_text(str(error))
            raise

    with pytest.raises(KeyError):
        sundog.run(main, 3, "shm", timeout=20)
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert f"rank 1 of 3 raised KeyError ('no such shelf') while rank {rank} waited" in text
        assert "died" not in text


# Else the first to leave is one more that has died, and rank 0 takes the store along.
LEAVE_TOGETHER = """
                pathlib.Path(f"saw{{rank}}").touch()
                while not all(pathlib.Path(f"saw{{each}}").exists() for each in {}):
                    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("raise KeyError('no such shelf')", "raised KeyError ('no such shelf')"),
        ("sys.exit(3)", "ended without closing its world"),
        ("os.kill(os.getpid(), 9)", "died"),
    ],
)
def test_a_process_that_ends_says_why_if_it_can(start: Any, ending: str, words: str) -> None:
    ranks = start(
        3,
        f"""
        import os, pathlib, sys, time, sundog
        rank = int(os.environ["RANK"])
        try:
            world = sundog.init("shm", heap_size=1 << 20, timeout=20)
            if rank == 1:
                {ending}
            world.barrier()
        finally:
            if rank != 1:
                {LEAVE_TOGETHER.format((0, 2))}
        """,
    )
    ended = ranks.end()
    assert all(status != 0 for status, _, _ in ended)
    for rank in (0, 2):
        assert f"PeerLost: rank 1 of 3 {words} while rank {rank} waited" in ended[rank][2]


def test_the_rank_that_dies_with_the_store_is_named(start: Any) -> None:
    """Without torchrun rank 0's process holds the store; torch's own error is a C++ stack."""
    ranks = start(
        3,
        f"""
        import os, pathlib, time, sundog
        rank = int(os.environ["RANK"])
        try:
            world = sundog.init("shm", heap_size=1 << 20, timeout=20)
            if rank == 0:
                os.kill(os.getpid(), 9)
            try:
                world.barrier()
            finally:
                world.close()
        finally:
                {LEAVE_TOGETHER.format((1, 2))}
        """,
    )
    for rank, (status, _, errors) in list(enumerate(ranks.end()))[1:]:
        assert status == 1
        last = errors.strip().splitlines()[-1]
        assert f"PeerLost: rank 0 of 3 died while rank {rank} waited" in last, errors


@pytest.mark.parametrize("waits_in", ["host", "kernel"])
def test_a_stopped_rank_that_holds_the_store_is_named(start: Any, waits_in: str) -> None:
    """Its store answers nobody, and torch would wait for the answer for ever."""
    ranks = start(
        2,
        f"""
        import os, signal, torch, sundog
        world = sundog.init("shm", heap_size=1 << 20, timeout=2)
        x = torch.ones(4)
        world.all_reduce(x)
        world.barrier()
        if world.rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        if {waits_in!r} == "kernel":
            world.all_reduce(x).tolist()
        world.barrier()
        """,
    )
    try:
        status, _, errors = ranks.ranks[1].end()
    finally:
        ranks.ranks[0].kill()
    assert status == 1
    stopped = "PeerLost: rank 0 of 2 was stopped (SIGSTOP, or a debugger) while rank 1 waited"
    owes = "WaitTimeout: .*rank 0 owes the signal"  # if the kernel's time runs out before
    assert stopped in errors or (waits_in == "kernel" and re.search(owes, errors)), errors


def test_no_cpp_stack_is_shown_after_the_store_has_gone(start: Any) -> None:
    """At a call, and at the end of a script that makes no more: torch warned three times."""
    ranks = start(
        2,
        """
        import os, pathlib, select, time, torch, sundog
        world = sundog.init("shm", heap_size=1 << 20, timeout=20)
        world.all_reduce(torch.ones(4))
        end = os.pidfd_open(world.exchange(os.getpid())[0])
        watched = pathlib.Path("watched")  # rank 0 dies after rank 1 has its answer
        if world.rank == 0:
            while not watched.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), 9)
        watched.touch()
        select.select([end], [], [], 20)
        try:
            world.barrier()
        except sundog.errors.PeerLost as error:
            print(error)
        """,
    )
    _, (_, out, errors) = ranks.end()
    assert out.startswith("rank 0 of 2 died while rank 1 waited"), errors
    assert "frame #" not in errors
    assert "TCPStore" not in errors


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_stranger_at_the_store_runs_nothing(start: Any, tmp_path: Path) -> None:
    """He reaches its port, and writes a pickle where rank 0 expects the value of rank 1."""
    ranks = start(
        2,
        """
        import os, time, sundog
        world = sundog.init("shm", heap_size=1 << 20, timeout=20)
        while world.rank == 1 and not os.path.exists("written"):
            time.sleep(0.01)
        if world.rank == 0:
            world.barrier()
        """,
    )
    stranger = _connect(ranks.port)
    barrier = _key(stranger, "/world/1/0")  # rank 0 waits in it
    target = tmp_path / "ran"
    stranger.set(barrier[:-1] + "1", pickle.dumps(Malicious(target)))
    ranks.ranks[0].has_ended(20)
    (tmp_path / "written").touch()
    status, _, errors = ranks.end()[0]
    assert not target.exists(), "the command ran"
    assert status != 0
    assert "BadValue: the value of rank 1 at a barrier is not data that sundog wrote" in errors
    assert "docs/security.md" in errors


def _connect(port: int) -> dist.TCPStore:
    deadline = time.monotonic() + 30
    while True:
        try:
            return dist.TCPStore("127.0.0.1", port, is_master=False)
        except RuntimeError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _key(store: dist.TCPStore, name: str) -> str:
    """As the store spells it: torch puts the name of the group in front."""
    deadline = time.monotonic() + 30
    while True:
        found = [key for key in store.list_keys() if key.endswith(name)]
        if found:
            return found[0]
        assert time.monotonic() < deadline, store.list_keys()
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_values_that_need_pickle_are_refused_unless_asked_for(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(world: sundog.World) -> None:
        world.exchange(Path("x"))

    def asked(world: sundog.World) -> Any:
        mine = Path(str(world.rank))
        return world.exchange(mine, pickle=True), world.broadcast_object(mine, 1, pickle=True)

    def by_knob(world: sundog.World) -> Any:
        return world.exchange(Path(str(world.rank)))

    both = [Path("0"), Path("1")]
    with pytest.raises(ValueError, match=r"Path would need pickle.*SUNDOG_ALLOW_PICKLE=1"):
        sundog.run(refused, 2, backend)
    assert sundog.run(asked, 2, backend) == [(both, Path("1"))] * 2
    monkeypatch.setenv("SUNDOG_ALLOW_PICKLE", "1")
    assert sundog.run(by_knob, 2, backend) == [both] * 2


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_pickle_is_asked_for_on_every_rank_or_none(backend: str) -> None:
    def main(world: sundog.World) -> None:
        world.exchange(1, pickle=world.rank == 0)

    with pytest.raises(RankMismatch, match="pickle=True"):
        sundog.run(main, 2, backend)
