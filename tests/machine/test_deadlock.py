"""Deadlocks, what is reported of them, and bounded waits that run out instead."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog import Sim
from sundog.device import signal
from sundog.errors import Deadlock, WaitTimeout
from sundog.machine.deadlock import Wait

from . import machine_kernels
from .machine_kernels import circle, gather, meet, slow_then_signal, slow_then_store

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


def line_of(text: str, path: str = __file__) -> int:
    """The number of the first line of a file that holds the text."""
    with open(path) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def deadlock(
    main: Callable[[sundog.World], Any], size: int, **options: Any
) -> tuple[str, list[Wait], float]:
    start = time.monotonic()
    with pytest.raises(Deadlock) as error:
        sundog.run(main, size, "sim", sim=Sim(**options))
    waits = sorted(error.value.waits, key=lambda w: (w.rank, w.program))  # type: ignore[attr-defined]
    return str(error.value), waits, time.monotonic() - start  # type: ignore[return-value]


def in_a_circle(world: sundog.World) -> None:
    flags = world.signals(3, "flags")
    flags.fill_(4)
    world.barrier()
    circle[(1,)](flags, world.ctx, 5)
    world.barrier()


def test_source_lines_far_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone our signal.py would be Python's."""
    monkeypatch.chdir(tmp_path)
    text, waits, _ = deadlock(in_a_circle, 3)
    assert "# circular wait" in text
    ours = Path(signal.__file__).read_text()
    assert waits[0].stack[0].startswith("signal.py:")
    assert all(line in ours for line in waits[0].source[:-1])


def test_circular_wait() -> None:
    text, waits, seconds = deadlock(in_a_circle, 3)
    assert seconds < 10
    assert [w.rank for w in waits] == [0, 1, 2]
    line = line_of("# circular wait", machine_kernels.__file__)
    here = f"tests/machine/machine_kernels.py:{line} circle"
    for rank, wait in enumerate(waits):
        assert (wait.kernel, wait.program) == ("circle", (0, 0, 0))
        assert (wait.flags, wait.seen, wait.owners) == (("flags[2]",), (4,), (rank,))
        assert wait.expected == "< 5"
        assert wait.stack[0].startswith("sundog/device/signal.py:")
        assert any(frame.endswith(" wait") for frame in wait.stack)
        assert wait.stack[-1].endswith(here)
        assert f"rank {rank} program (0, 0, 0) of circle waits for flags[2] = 4" in text
        assert f"rank {rank}: its host waits for its kernels to end (circle)" in text
        launched = f"tests/machine/test_deadlock.py:{line_of('circle[(1,)]')}"
        assert f"circle[1, 1, 1] launched at {launched}" in text
    assert "# circular wait" in text, "the source line"
    assert "random:0" in text


def test_a_rank_that_never_launched() -> None:
    """Each waiting rank lacks one flag of three; the report says which, and that rank 1 is gone."""

    def main(world: sundog.World) -> None:
        flags = world.signals(3, "meeting")
        world.barrier()
        if world.rank != 1:
            meet[(1,)](flags, world.ctx, LANES=4)

    text, waits, _ = deadlock(main, 3)
    assert [(w.rank, w.flags, w.seen, w.expected) for w in waits] == [
        (0, ("meeting[1]",), (0,), "< 1"),
        (2, ("meeting[1]",), (0,), "< 1"),
    ]
    assert "rank 1: its host has returned; no kernel is running" in text
    assert "rank 0: its host waits for its kernels to end (meet)" in text


@triton.jit
def wait_for_later(counter, ctx):
    signal.barrier_programs(counter, ctx)


def test_waiting_for_a_program_that_is_not_resident() -> None:
    def main(world: sundog.World) -> int:
        counter = world.signals(1, "counter")
        wait_for_later[(2, 3)](counter, world.ctx)
        return int(counter)

    text, waits, _ = deadlock(main, 1, num_sms=4)
    assert [w.program for w in waits] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert {(w.flags, w.seen, w.expected) for w in waits} == {(("counter[0]",), (4,), "< 6")}
    assert "programs 4 to 5 of wait_for_later have not started, as 4 fit at a time" in text
    assert "must not wait for a later one" in text
    assert sundog.run(main, 1, "sim", sim=Sim(num_sms=6)) == [6]


def test_a_host_barrier_that_one_rank_does_not_reach() -> None:
    def main(world: sundog.World) -> None:
        if world.rank == 2:
            return
        world.barrier()  # without rank 2

    text, waits, _ = deadlock(main, 4)
    assert waits == []
    here = f"tests/machine/test_deadlock.py:{line_of('# without rank 2')}"
    for rank in (0, 1, 3):
        assert f"rank {rank}: its host waits for rank 2 at a barrier ({here})" in text
    assert "rank 2: its host has returned" in text


def test_a_kernel_queued_behind_a_waiting_one() -> None:
    """The second kernel of rank 0 would signal, but a stream runs one after the other."""

    def main(world: sundog.World) -> None:
        flags = world.signals(3, "flags")
        world.barrier()
        if world.rank == 0:
            circle[(1,)](flags, world.ctx, 1)
            slow_then_signal[(1,)](flags, flags[2:], world.ctx, TIMES=1)

    text, _, _ = deadlock(main, 2)
    assert "rank 0: slow_then_signal is queued behind another kernel" in text


def test_an_own_poll_of_a_user_is_reported_too() -> None:
    def main(world: sundog.World) -> None:
        x, flag = world.zeros((1,), torch.int32), world.signals(2, "mine")
        slow_then_store[(2,)](x, flag[1:], world.ctx, TIMES=1)
        world.barrier()

    def only_rank_1(world: sundog.World) -> None:
        if world.rank == 1:
            main(world)

    _, waits, _ = deadlock(only_rank_1, 2)
    assert [(w.program, w.flags, w.seen) for w in waits] == [
        ((0, 0, 0), ("mine[1]",), (0,)),
        ((1, 0, 0), ("mine[1]",), (0,)),
    ]
    assert {w.expected for w in waits} == {"== 0"}


@triton.jit
def poll_if(x, flag):
    while x == 0 and tl.atomic_add(flag, 0) == 0:
        pass


def test_a_poll_inside_of_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    find = inspect.findsource

    def as_in_python_3_13(thing: Any) -> tuple[list[str], int]:  # begins in the middle of a loop
        lines, first = find(thing)
        return lines, thing.co_firstlineno - 1 if inspect.iscode(thing) else first

    def main(world: sundog.World) -> None:
        poll_if[(1,)](0, world.signals(1, "mine"))

    monkeypatch.setattr(inspect, "findsource", as_in_python_3_13)
    _, (wait,), _ = deadlock(main, 1)
    assert wait.flags == ("mine[0]",)


@triton.jit
def add_up(x, out, n):
    done, total = 0, 0
    while done < n:  # the same word again and again, which waits for nobody
        total += tl.load(x)
        done += 1
    tl.store(out, total)


def test_a_loop_that_computes_is_no_poll() -> None:
    def main(world: sundog.World) -> int:
        out = torch.zeros(1, dtype=torch.int32)
        add_up[(1,)](torch.full((1,), 3, dtype=torch.int32), out, 1000)
        return int(out.item())

    assert sundog.run(main, 1, "sim") == [3000]


def test_a_large_deadlock_is_found_quickly() -> None:
    """16 ranks, 8 programs each: 128 waiting programs, of which 32 are shown."""

    def main(world: sundog.World) -> None:
        flags = world.signals(3, "flags")
        world.barrier()
        circle[(8,)](flags, world.ctx, 1)

    text, waits, seconds = deadlock(main, 16)
    assert len(waits) == 128
    assert seconds < 20
    assert "and 96 more waiting programs" in text


# bounded waits


def test_expiry_and_recovery() -> None:
    """Rank 2 is absent from one meeting; afterwards the same flags serve the next ones."""

    def main(world: sundog.World) -> Any:
        flags = world.signals(world.size, "flags")
        out = world.zeros((3,), torch.int64)
        world.barrier()
        told = None
        if world.rank != 2:
            meet[(1,)](flags, world.ctx, LANES=4)
        try:
            world.barrier()
        except WaitTimeout as error:
            told = error.record
            world.barrier()
        for place in range(3):
            gather[(1,)](out, flags, place, place + 1, world.ctx, LANES=4)
        world.barrier()
        return told, out.tolist()

    results = sundog.run(main, 3, "sim", sim=Sim(expire=True))
    for rank, (record, out) in enumerate(results):
        assert out == [3, 3, 3]
        if rank == 2:
            assert record is None
            continue
        assert (record.rank, record.program, record.flag) == (rank, 0, "flags[2]")
        assert (record.expected, record.seen, record.peer) == (1, 0, 2)


def test_expiry_of_a_group_leaves_the_world_alone() -> None:
    def main(world: sundog.World) -> Any:
        group = world.group([0, 1], 1 << 16)
        flags, out = world.signals(3, "flags"), world.zeros((1,), torch.int64)
        world.barrier()
        if group is not None:
            inner = group.signals(2, "inner")
            group.barrier()
            if group.rank == 0:
                meet[(1,)](inner, group.ctx, LANES=2)
            try:
                group.barrier()
            except WaitTimeout:
                group.barrier()
            meet[(1,)](inner, group.ctx, LANES=2)
        world.barrier()
        gather[(1,)](out, flags, 0, 1, world.ctx, LANES=4)
        world.barrier()
        return int(out)

    assert sundog.run(main, 3, "sim", sim=Sim(expire=True)) == [3, 3, 3]


def test_what_has_no_bound_is_a_deadlock_also_with_expire() -> None:
    def main(world: sundog.World) -> None:
        x, flag = world.zeros((1,), torch.int32), world.signals(1, "flag")
        if world.rank == 1:
            slow_then_store[(2,)](x, flag, world.ctx, TIMES=1)
        world.barrier()

    deadlock(main, 2, expire=True)


def test_an_uncaught_timeout_ends_the_run() -> None:
    def main(world: sundog.World) -> None:
        flags = world.signals(2, "flags")
        world.barrier()
        if world.rank == 0:
            meet[(1,)](flags, world.ctx, LANES=2)
        world.barrier()

    with pytest.raises(WaitTimeout, match="rank 1 owes the signal"):
        sundog.run(main, 2, "sim", sim=Sim(expire=True))
