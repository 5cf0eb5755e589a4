"""The simulator's machine: interleavings, sleeping polls, deadlocks, waves, expiry, exceptions."""

from __future__ import annotations

import io
import pdb
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog import Sim
from sundog.device import memory, signal
from sundog.errors import Deadlock, KernelError, WaitTimeout
from sundog.sim.machine import Machine
from sundog.sim.report import Wait

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


def line_of(text: str) -> int:
    """The number of the first line of this file that holds the text."""
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


# the same seed, the same interleaving


@triton.jit
def draw(counter, order, ctx, TIMES: tl.constexpr):
    """Each program takes numbers from one counter: who got which is the interleaving."""
    me = tl.load(ctx) * tl.num_programs(0) + tl.program_id(0)
    one = tl.full((), 1, tl.int64)
    for _ in range(TIMES):
        memory.store(order + memory.atomic_add(counter, one, 0, ctx), me, 0, ctx)


def interleaving(schedule: str) -> list[int]:
    def main(world: sundog.World) -> list[int]:
        counter, order = world.signals(1, "counter"), world.zeros((24,), torch.int64)
        world.barrier()
        draw[(2,)](counter, order, world.ctx, TIMES=4)
        world.barrier()
        return order.tolist()

    return sundog.run(main, 3, "sim", sim=Sim(schedule=schedule))[0]


@pytest.mark.parametrize("schedule", ["random:7", "pct:7:3"])
def test_same_seed_same_interleaving(schedule: str) -> None:
    first = interleaving(schedule)
    assert sorted(first) == sorted(list(range(6)) * 4)
    ballast = [torch.empty(1 << 20) for _ in range(7)]  # addresses differ from run to run
    for _ in range(3):
        assert interleaving(schedule) == first
        ballast.pop(0)


@pytest.mark.parametrize("kind", ["random:{}", "pct:{}:3"])
def test_other_seeds_differ(kind: str) -> None:
    assert len({tuple(interleaving(kind.format(seed))) for seed in range(8)}) >= 7


def test_the_seed_is_a_knob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUNDOG_SEED", "5")
    assert interleaving("") == interleaving("random:5")


@triton.jit
def race_to_wake(flags, out, counter, ctx):
    """All ranks but one sleep; one store of a tile wakes them, and their order is recorded."""
    if tl.load(ctx) == 0:
        for _ in range(200):  # until all of them sleep
            tl.atomic_add(counter + 1, 1, sem="relaxed", scope="gpu")
        lane = tl.arange(0, 64)
        tl.store(memory.translate(flags + lane % 8, lane // 8, ctx), 1)
    else:
        signal.wait(flags, 0, 1, ctx)
    one = tl.full((), 1, tl.int64)
    memory.store(out + memory.atomic_add(counter, one, 0, ctx), tl.load(ctx), 0, ctx)


def test_waking_does_not_depend_on_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One store wakes sleepers in several heaps, whose order in memory is up to the system."""
    from sundog.backends import sim

    def main(world: sundog.World) -> list[int]:
        flags, counter = world.signals(8, "flags"), world.signals(2, "counter")
        out = world.zeros((8,), torch.int64)
        world.barrier()
        race_to_wake[(1,)](flags, out, counter, world.ctx)
        world.barrier()
        return out.tolist()

    def at_other_addresses(place: Callable[[list], list]) -> list[int]:
        pool = place(sorted((make(1 << 20) for _ in range(8)), key=lambda s: s.data_ptr()))
        monkeypatch.setattr(sim, "make_segment", lambda nbytes: pool.pop())
        return sundog.run(main, 8, "sim", heap_size=1 << 20)[0]

    make = sim.make_segment
    assert at_other_addresses(lambda pool: pool) == at_other_addresses(lambda pool: pool[::-1])


# no busy waiting


def count_polls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Atomics that left memory as it was, in a list of one."""
    count = [0]
    found = Machine._found

    def counting(self: Machine, *args: Any) -> None:
        count[0] += 1
        found(self, *args)

    monkeypatch.setattr(Machine, "_found", counting)
    return count


@triton.jit
def slow_then_signal(x, flag, ctx, TIMES: tl.constexpr):
    """Rank 0 works for a while and signals rank 1, which has been waiting all the time."""
    if tl.load(ctx) == 0:
        for _ in range(TIMES):
            tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
        signal.signal(flag, 1, 1, ctx)
    else:
        signal.wait(flag, 0, 1, ctx)


@triton.jit
def slow_then_store(x, flag, ctx, TIMES: tl.constexpr):
    """The same with a volatile poll, and a plain one (races both, but they must not spin)."""
    if tl.load(ctx) == 0:
        for _ in range(TIMES):
            tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
        memory.store(flag, 1, 1, ctx)
    elif tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            pass
    else:
        while tl.load(flag) == 0:
            pass


@pytest.mark.parametrize(
    ("kernel", "grid", "most"), [(slow_then_signal, 1, 12), (slow_then_store, 2, 150)]
)
def test_polling_sleeps(monkeypatch: pytest.MonkeyPatch, kernel: Any, grid: int, most: int) -> None:
    """The number of polls does not grow with the time that is waited."""

    def polls(times: int) -> int:
        def main(world: sundog.World) -> None:
            x, flag = world.zeros((1,), torch.int32), world.signals(1, "flag")
            world.barrier()
            kernel[(grid,)](x, flag, world.ctx, TIMES=times)
            world.barrier()

        count = count_polls(monkeypatch)
        sundog.run(main, 2, "sim")
        monkeypatch.undo()
        return count[0]

    assert 0 < polls(50) <= most
    assert 0 < polls(400) <= most


@triton.jit
def poll_many(x, flags, out, ctx, F: tl.constexpr, TIMES: tl.constexpr):
    """One loop over many flags, again and again, until all are set."""
    if tl.load(ctx) == 0:
        for _ in range(TIMES):
            tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
        for i in range(F):
            signal.signal(flags + i, 1, 1, ctx)
    else:
        done = 0
        while done < F:
            done = 0
            for i in range(F):
                done += tl.atomic_add(flags + i, 0, sem="acquire", scope="sys").to(tl.int32)
        tl.store(out, done)


def test_polling_of_many_flags_sleeps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = 40

    def main(world: sundog.World) -> int:
        x, out = world.zeros((1,), torch.int32), world.zeros((1,), torch.int32)
        words = world.signals(flags, "flags")
        world.barrier()
        poll_many[(1,)](x, words, out, world.ctx, F=flags, TIMES=300)
        world.barrier()
        return int(out)

    count = count_polls(monkeypatch)
    assert sundog.run(main, 2, "sim") == [0, flags]
    assert count[0] < 5 * flags + 5 * flags**2 / 2


# work that looks like polling


@triton.jit
def same_loads(x, out, N, LOOP: tl.constexpr):
    """Reads one word over and over, and that is all that it has to do."""
    total = tl.zeros((), tl.int64)
    if LOOP == "for":
        for _ in range(N):
            total += tl.load(x)
    elif LOOP == "atomic":
        for _ in range(N):
            total += tl.atomic_max(x, 2, sem="relaxed", scope="gpu")
    elif LOOP == "tiles":
        i = 0
        while i < N:
            total += tl.load(x) + tl.sum(tl.load(x + 1 + i + tl.arange(0, 2)), 0)
            i += 1
    else:
        i = 0
        while i < N:
            total += tl.load(x) + tl.load(x + 1 + i)
            i += 1
    tl.store(out, total)


@pytest.mark.parametrize("loop", ["for", "atomic", "tiles", "scalars"])
def test_work_is_not_taken_for_waiting(loop: str) -> None:
    n = 400

    def main(world: sundog.World) -> int:
        x, out = world.zeros((n + 8,), torch.int64), world.zeros((1,), torch.int64)
        x[0] = 3
        same_loads[(1,)](x, out, n, LOOP=loop)
        return int(out)

    assert sundog.run(main, 1, "sim") == [3 * n]


# deadlocks


def deadlock(
    main: Callable[[sundog.World], Any], size: int, **options: Any
) -> tuple[str, list[Wait], float]:
    start = time.monotonic()
    with pytest.raises(Deadlock) as error:
        sundog.run(main, size, "sim", sim=Sim(**options))
    waits = sorted(error.value.waits, key=lambda w: (w.rank, w.program))  # type: ignore[attr-defined]
    return str(error.value), waits, time.monotonic() - start  # type: ignore[return-value]


@triton.jit
def circle(flags, ctx, epoch):
    """Everybody waits for the rank below before it signals the rank above."""
    rank, size = tl.load(ctx), tl.load(ctx + 1)
    down = (rank + size - 1) % size
    signal.wait(flags + 2, down, epoch, ctx)  # circular wait
    signal.signal(flags + 2, (rank + 1) % size, epoch, ctx)


def test_circular_wait() -> None:
    def main(world: sundog.World) -> None:
        flags = world.signals(3, "flags")
        flags.fill_(4)
        world.barrier()
        circle[(1,)](flags, world.ctx, 5)
        world.barrier()

    text, waits, seconds = deadlock(main, 3)
    assert seconds < 10
    assert [w.rank for w in waits] == [0, 1, 2]
    here = f"test_machine.py:{line_of('# circular wait')} circle"
    for rank, wait in enumerate(waits):
        assert (wait.kernel, wait.program) == ("circle", (0, 0, 0))
        assert (wait.flags, wait.seen, wait.owners) == (("flags[2]",), (4,), (rank,))
        assert wait.expected == "< 5"
        assert wait.stack[0].startswith("sundog/device/signal.py:")
        assert any(frame.endswith(" wait") for frame in wait.stack)
        assert wait.stack[-1].endswith(here)
        assert f"rank {rank} program (0, 0, 0) of circle waits for flags[2] = 4" in text
        assert f"rank {rank}: its host waits for its kernels to end (circle)" in text
        assert f"circle[1, 1, 1] launched at tests/sim/test_machine.py:{line_of('circle[(1,)]')}"
    assert "# circular wait" in text, "the source line"
    assert "random:0" in text


@triton.jit
def meet(flags, ctx, LANES: tl.constexpr):
    signal.barrier_ranks(flags, 1, ctx, LANES)


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
    here = f"tests/sim/test_machine.py:{line_of('# without rank 2')}"
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


# waves


@triton.jit
def touch(started, most, running, out, ctx):
    """Counts how many programs are there at once."""
    now = tl.atomic_add(running, 1, sem="relaxed", scope="gpu") + 1
    tl.atomic_max(most, now, sem="relaxed", scope="gpu")
    place = tl.atomic_add(started, 1, sem="relaxed", scope="gpu")
    me = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1)
    tl.store(out + me, place)
    tl.atomic_add(running, -1, sem="relaxed", scope="gpu")


@pytest.mark.parametrize("num_sms", [1, 4, 100])
def test_grids_larger_than_the_machine_run_in_waves(num_sms: int) -> None:
    def main(world: sundog.World) -> Any:
        words = world.zeros((3,), torch.int32)
        out = world.full((30,), -1, torch.int32)
        world.barrier()
        touch[(10, 3)](words[0:], words[1:], words[2:], out, world.ctx)
        world.barrier()
        return words.tolist(), sorted(out.tolist()), out.tolist()

    for words, places, order in sundog.run(main, 2, "sim", sim=Sim(num_sms=num_sms)):
        assert words[0] == 30
        assert words[1] <= num_sms
        assert words[1] == num_sms or num_sms == 100
        assert words[2] == 0
        assert places == list(range(30))
        if num_sms == 1:
            assert order == list(range(30)), "programs start in the order of the grid"


def test_ranks_may_launch_different_grids() -> None:
    def main(world: sundog.World) -> Any:
        words = world.zeros((3,), torch.int32)
        out = world.full((9,), -1, torch.int32)
        world.barrier()
        touch[(world.rank, 3)](words[0:], words[1:], words[2:], out, world.ctx)
        world.barrier()
        return int(words[0]), int((out >= 0).sum())

    assert sundog.run(main, 4, "sim") == [(3 * rank, 3 * rank) for rank in range(4)]


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


@triton.jit
def gather(out, flags, place, epoch, ctx, LANES: tl.constexpr):
    one = tl.full((), 1, tl.int64)
    for peer in range(tl.load(ctx + 1)):
        memory.atomic_add(out + place, one, peer, ctx)
    signal.barrier_ranks(flags, epoch, ctx, LANES)


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


# exceptions, print, pdb


@pytest.mark.parametrize("kind", [ValueError, KeyError, KeyboardInterrupt, SystemExit])
def test_exceptions_keep_their_type_and_name_the_rank(kind: type[BaseException]) -> None:
    ended = []

    def main(world: sundog.World) -> None:
        flags = world.signals(2, "flags")
        try:
            world.barrier()
            if world.rank == 1:
                raise kind("seven")
            meet[(1,)](flags, world.ctx, LANES=2)
            world.barrier()
        finally:
            ended.append(world.rank)

    with pytest.raises(kind, match="seven") as error:
        sundog.run(main, 2, "sim")
    assert "raised on rank 1 of 2" in "".join(getattr(error.value, "__notes__", [])) + str(error)
    assert sorted(ended) == [0, 1], "finally blocks of the other ranks ran"
    assert sundog.run(lambda world: world.rank, 2, "sim") == [0, 1], "and the next run works"


@triton.jit
def fails(x, ctx):
    if tl.load(ctx) == 1:
        tl.static_assert(False, "on purpose")  # raised here
    tl.store(x, 1)


def test_an_exception_in_a_kernel_names_rank_program_and_line() -> None:
    def main(world: sundog.World) -> None:
        x = world.zeros((1,))
        fails[(1,)](x, world.ctx)
        world.barrier()

    here = rf"rank 1 program \(0, 0, 0\) of fails at .*test_machine.py:{line_of('# raised here')}"
    with pytest.raises(KernelError, match=here):
        sundog.run(main, 2, "sim")


def test_print_works(capsys: pytest.CaptureFixture[str]) -> None:
    def main(world: sundog.World) -> None:
        print("hello from", world.rank, world.full((2,), 3.0))
        world.barrier()
        print("bye from", world.rank)

    sundog.run(main, 2, "sim")
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:2]) == [f"hello from {rank} tensor([3., 3.])" for rank in range(2)]
    assert sorted(lines[2:]) == [f"bye from {rank}" for rank in range(2)]


def test_pdb_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breakpoint in one rank: look around, step over a barrier and a launch, go on."""
    commands = "p 'rank', world.rank\nn\nn\np 'total', int(x)\nc\n"
    told = io.StringIO()

    def scripted() -> None:
        debugger = pdb.Pdb(stdin=io.StringIO(commands), stdout=told, nosigint=True, readrc=False)
        debugger.set_trace(sys._getframe(1))

    monkeypatch.setattr(sys, "breakpointhook", scripted)

    def main(world: sundog.World) -> int:
        x, flag = world.zeros((1,), torch.int32), world.signals(1, "flag")
        world.barrier()
        if world.rank == 0:
            breakpoint()
            slow_then_signal[(1,)](x, flag, world.ctx, TIMES=3)
            done = int(x)
            return done
        slow_then_signal[(1,)](x, flag, world.ctx, TIMES=3)
        return 10

    assert sundog.run(main, 2, "sim") == [3, 10]
    assert "('rank', 0)" in told.getvalue()
    assert "('total', 3)" in told.getvalue()
