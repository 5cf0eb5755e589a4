"""A process per rank on shared memory: real faults, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import select
import signal as signals
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.scripts import Script
from torch.distributed import FileStore

import sundog
from sundog.backends import _processes, shm
from sundog.device import memory, signal
from sundog.errors import PeerLost, RankMismatch, SundogError, WaitTimeout

pytestmark = pytest.mark.sim_only  # names its backend itself, so once is enough


@triton.jit
def push(x, out, flags, epoch, ctx, LANES: tl.constexpr):
    rank = tl.load(ctx)
    for peer in range(tl.load(ctx + 1)):
        memory.put(out + rank, x, peer, ctx)
    signal.barrier_ranks(flags, epoch, ctx, LANES)


def all_gather(world: sundog.World, epoch: int = 1) -> list[int]:
    with world.scope():
        x = world.full((1,), 100 + world.rank, torch.int64)
        out = world.zeros((world.size,), torch.int64)
        flags = world.signals(world.size, "flags")
        world.barrier()
        lanes = triton.next_power_of_2(world.size)
        push[(1,)](x, out, flags, epoch, world.ctx, LANES=lanes)
        world.barrier()
        return out.tolist()


def run(fn: Callable[[sundog.World], Any], size: int, timeout: float = 20) -> list[Any]:
    return sundog.run(fn, size, "shm", timeout=timeout, heap_size=1 << 20)


@pytest.fixture(scope="module")
def warm() -> None:
    """What torch and multiprocessing open once and keep."""
    run(all_gather, 2)


@pytest.fixture(autouse=True)
def nothing_is_left(warm: None) -> Iterator[None]:
    """No process, file descriptor, or shared memory more than before."""
    gc.collect()  # what earlier tests left behind is not this one's
    before = left()
    yield
    gc.collect()
    for _ in range(50):
        if left() == before:
            break
        time.sleep(0.05)
    assert left() == before


def left() -> dict[str, Any]:
    return {
        "shm": sorted(os.listdir("/dev/shm")),
        "fds": len(os.listdir("/proc/self/fd")),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "segments": [m for m in Path("/proc/self/maps").read_text().splitlines() if "sundog" in m],
    }


def test_kernels_talk_between_processes() -> None:
    def main(world: sundog.World) -> Any:
        return os.getpid(), all_gather(world)

    results = run(main, 3)
    assert len({pid for pid, _ in results} | {os.getpid()}) == 4
    assert [out for _, out in results] == [[100, 101, 102]] * 3


def test_a_late_rank_is_waited_for() -> None:
    """In the kernel and on the host, for longer than any internal patience."""

    def main(world: sundog.World) -> list[int]:
        if world.rank == 1:
            time.sleep(0.7)
        x = world.full((1,), 100 + world.rank, torch.int64)
        out, flags = world.zeros((2,), torch.int64), world.signals(2, "flags")
        world.barrier()
        if world.rank == 1:
            time.sleep(0.7)
        push[(1,)](x, out, flags, 1, world.ctx, LANES=2)
        world.barrier()
        return out.tolist()

    assert run(main, 2) == [[100, 101]] * 2


@pytest.mark.parametrize("where", ["host", "kernel"])
def test_a_killed_rank_is_named_by_all_others(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGKILL, while the others wait on the host or inside a kernel."""
    monkeypatch.setattr(_processes, "_GRACE", 60)  # a busy machine must not end them before

    def main(world: sundog.World) -> None:
        x, out = world.zeros((1,), torch.int64), world.zeros((3,), torch.int64)
        flags = world.signals(3, "flags")
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signals.SIGKILL)
        try:
            if where == "kernel":
                push[(1,)](x, out, flags, 1, world.ctx, LANES=4)
            world.barrier()
        except PeerLost as error:
            with pytest.raises(SundogError):
                world.barrier()
            (tmp_path / str(world.rank)).write_text(str(error))  # if the line before held
            raise

    start = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 of 3 died \(signal 9, SIGKILL\)"):
        run(main, 3, timeout=60)
    assert time.monotonic() - start < 30, "noticed at once, not at the timeout"
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        # The other one may have ended too by then, for the same reason.
        assert re.match(rf"rank (0, )?1(, 2)? of 3 died while rank {rank} waited", text)
        assert "start all ranks again" in text


def test_an_exception_keeps_its_type_and_names_the_rank() -> None:
    def main(world: sundog.World) -> None:
        world.barrier()
        if world.rank == 1:
            raise FileNotFoundError(2, "no such shelf")
        world.barrier()

    with pytest.raises(FileNotFoundError, match="no such shelf") as error:
        run(main, 3)
    cause = str(error.value.__cause__)
    assert "raised on rank 1 of 3" in cause
    assert "test_shm.py" in cause


class Awkward(Exception):
    """Can't be rebuilt from its arguments."""

    def __init__(self, shelf: int, book: str) -> None:
        super().__init__(f"shelf {shelf} has no {book}")


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    def main(world: sundog.World) -> None:
        if world.rank == 0:
            raise Awkward(17, "map")
        world.barrier()

    with pytest.raises(SundogError, match="Awkward: shelf 17 has no map"):
        run(main, 2)


def test_a_result_that_cannot_travel_says_so() -> None:
    with pytest.raises(SundogError, match=r"result of rank 0 .*lambda"):
        run(lambda world: lambda: None, 2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels wait for a second, and hosts for 20: on a busy machine they are late, not lost."""
    monkeypatch.setattr(shm, "KERNELS_WAIT", 0.05)


def test_wait_timeout_travels_with_its_record(impatient: None) -> None:
    def main(world: sundog.World) -> None:
        x, out = world.zeros((1,), torch.int64), world.zeros((2,), torch.int64)
        flags = world.signals(2, "flags")
        world.barrier()
        if world.rank == 0:
            push[(1,)](x, out, flags, 1, world.ctx, LANES=2)
        world.barrier()

    with pytest.raises(WaitTimeout, match="rank 1 owes") as error:
        run(main, 2)
    record = error.value.record
    assert (record.rank, record.flag, record.expected, record.seen) == (0, "flags[1]", 1, 0)


def test_recovery_after_a_wait_ran_out(impatient: None) -> None:
    def main(world: sundog.World) -> Any:
        x, out = world.full((1,), 5, torch.int64), world.zeros((2,), torch.int64)
        flags = world.signals(2, "flags")
        world.barrier()
        told = None
        if world.rank == 0:
            push[(1,)](x, out, flags, 1, world.ctx, LANES=2)
            with pytest.raises(WaitTimeout) as error:
                world.barrier()
            told = error.value.record.flag
        world.barrier()
        return told, all_gather(world)

    assert run(main, 2) == [("flags[1]", [100, 101]), (None, [100, 101])]


def test_a_rank_that_never_comes() -> None:
    """It sleeps for a minute; the others raise at the timeout, and it is not waited for."""

    def main(world: sundog.World) -> None:
        if world.rank == 2:
            time.sleep(60)
        world.barrier()

    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 2 did not arrive within 1 s") as error:
        run(main, 3, timeout=1)
    assert time.monotonic() - start < 30
    assert "SUNDOG_TIMEOUT" in str(error.value)


def test_all_ranks_killed() -> None:
    def main(world: sundog.World) -> None:
        all_gather(world)
        os.kill(os.getpid(), signals.SIGKILL)

    with pytest.raises(PeerLost, match=r"rank 0 of 4 died \(signal 9, SIGKILL\)"):
        run(main, 4)


def test_a_rank_that_is_killed_while_it_sends_its_result() -> None:
    def end(rank: int, size: int, store: Any) -> sundog.World:
        pipe = sys._getframe(1).f_locals["pipe"]
        os.write(pipe.fileno(), (1000).to_bytes(4, "big") + b"the first of its bytes")
        os.kill(os.getpid(), signals.SIGKILL)
        raise AssertionError

    with pytest.raises(PeerLost, match=r"rank 0 of 1 died \(signal 9, SIGKILL"):
        _processes.run(lambda world: None, 1, end)


def test_ranks_that_open_different_heaps() -> None:
    def open_world(rank: int, size: int, store: Any) -> sundog.World:
        fds = len(os.listdir("/proc/self/fd"))
        try:
            shm.open_world(rank, size, store, (1 + rank) << 20, 20.0)
        except RankMismatch as error:
            told.append(str(error))
        assert len(os.listdir("/proc/self/fd")) == fds
        assert sundog.run(lambda world: world.rank, 2, "sim") == [0, 1]  # nothing is left of it
        return shm.open_world(rank, size, store, 1 << 20, 20.0)

    told: list[str] = []
    texts = _processes.run(lambda world: told[0], 2, open_world)
    assert all("heap 1048576" in text and "heap 2097152" in text for text in texts)


def script(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(body))
    return path


def test_the_parent_is_killed(tmp_path: Path) -> None:
    """Its ranks end by themselves, and no shared memory stays."""
    path = script(
        tmp_path,
        """
        import os, time, sundog
        def main(world):
            everyone = world.exchange(os.getpid())
            if world.rank == 0:
                os.write(1, " ".join(map(str, everyone)).encode())
                os.rename("ranks.txt", "ranks")
            time.sleep(60)
        os.dup2(os.open("ranks.txt", os.O_CREAT | os.O_WRONLY), 1)
        sundog.run(main, 2, "shm", timeout=60)
        """,
    )
    parent, told = Script(path), tmp_path / "ranks"
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ends = [os.pidfd_open(int(pid)) for pid in told.read_text().split()]
    parent.kill()
    for end in ends:
        assert select.select([end], [], [], 20)[0], "a rank outlived its parent"
        os.close(end)
    parent.end()


def test_torchrun(tmp_path: Path) -> None:
    """`init` twice in each process, by `python -m torch.distributed.run`."""
    path = script(
        tmp_path,
        f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        import sundog, test_shm, torch.distributed as dist
        for _ in range(2):
            with sundog.init("shm", heap_size=1 << 20, timeout=20) as world:
                text = f"rank {{world.rank}} of {{world.size}}: {{test_shm.all_gather(world)}}"
                sys.stdout.write(text + "\\n")  # in one piece: print may be cut in between
                sys.stdout.flush()
        dist.destroy_process_group()
        """,
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    expected = [f"rank {rank} of 2: [100, 101]" for rank in (0, 0, 1, 1)]
    assert sorted(done.stdout.splitlines()) == expected


def usage() -> tuple[int, int, int]:
    """File descriptors, memory maps, megabytes of address space."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return len(os.listdir("/proc/self/fd")), maps, pages * os.sysconf("SC_PAGE_SIZE") >> 20


def grown(once: Callable[[], Any], times: int) -> tuple[int, int, int]:
    """What more worlds take, without help from the garbage collector."""
    for _ in range(3):
        once()
    gc.collect()
    with no_gc():
        before = usage()
        for _ in range(times):
            once()
        after = usage()
    return tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]


@contextlib.contextmanager
def no_gc() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_50_simulated_worlds_in_one_process() -> None:
    fds, maps, megabytes = grown(lambda: sundog.run(all_gather, 2, "sim", heap_size=8 << 20), 50)
    assert fds == 0
    assert maps < 20
    assert megabytes < 400  # 800 if they were kept; malloc leaves some holes


def test_50_runs_of_processes_from_one_process() -> None:
    fds, maps, megabytes = grown(lambda: run(lambda world: world.rank, 1), 50)
    assert fds == 0
    assert maps < 20
    assert megabytes < 100


def test_50_worlds_inside_one_rank(tmp_path: Path) -> None:
    """Each of two processes opens and closes 50 worlds, one after the other."""

    def main(world: sundog.World) -> Any:
        world.close()
        store = FileStore(str(tmp_path / "store"))

        def once() -> None:
            with shm.open_world(world.rank, 2, store, 8 << 20, 20.0) as another:
                assert all_gather(another) == [100, 101]

        return grown(once, 50)

    for fds, maps, megabytes in run(main, 2):
        assert fds == 0
        assert maps < 20
        assert megabytes < 400  # 800 if they were kept; malloc leaves some holes
