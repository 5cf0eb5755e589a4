"""The simulator's machine: interleavings, sleeping polls, waves, exceptions."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog import Sim
from sundog.device import memory, signal
from sundog.errors import KernelError
from sundog.machine.accesses import Accesses

from .machine_kernels import meet, slow_then_signal, slow_then_store

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


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


@pytest.mark.parametrize("schedule", ["random:7", "pct:7:3", "pct:7:3:40"])
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
        monkeypatch.setattr(sim, "make_segments", lambda *given: place(make(*given)))
        return sundog.run(main, 8, "sim", heap_size=1 << 20)[0]

    make = sim.make_segments
    assert at_other_addresses(lambda heaps: heaps) == at_other_addresses(lambda heaps: heaps[::-1])


# no busy waiting


def count_polls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Atomics that left memory as it was, in a list of one."""
    count = [0]
    found = Accesses._found

    def counting(self: Accesses, *args: Any) -> None:
        count[0] += 1
        found(self, *args)

    monkeypatch.setattr(Accesses, "_found", counting)
    return count


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

    with open(__file__) as file:
        line = next(n for n, text in enumerate(file, 1) if "# raised here" in text)
    here = rf"rank 1 program \(0, 0, 0\) of fails at .*test_machine.py:{line}"
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
