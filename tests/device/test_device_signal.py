"""Signals, waits and barriers inside kernels: repeated, two-sided, near the largest epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.device import memory, signal

Run = Callable[..., list]
WORLDS = [1, 2, 3, 4, 8]
LAST = (1 << 63) - 1  # the largest epoch
N = 37


def data(rank: int, round: int) -> torch.Tensor:
    torch.manual_seed(1000 * rank + round)
    return torch.randn(N)


@triton.jit
def ring(x, inbox, out, ready, done, ctx, first, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Send row `i` of x to the next rank, which keeps it; the inbox is used again every round."""
    at = tl.arange(0, BLOCK)
    mask = at < n
    rank, size = tl.load(ctx), tl.load(ctx + 1)
    up, down = (rank + 1) % size, (rank + size - 1) % size
    for i in range(ROUNDS):
        epoch = first + i
        signal.wait(done, up, epoch - 1, ctx)  # the next rank has read what it got last time
        signal.put_signal(inbox + at, x + i * n + at, ready, up, epoch, ctx, mask=mask)
        signal.wait(ready, down, epoch, ctx)
        tl.store(out + i * n + at, tl.load(inbox + at, mask=mask), mask=mask)
        signal.signal(done, down, epoch, ctx)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("first", [1, LAST - 5], ids=["from 1", "to the last epoch"])
def test_two_sided_reuse(run: Run, size: int, first: int) -> None:
    """Two launches of three rounds through one inbox; the last epoch used is 2^63 - 1."""
    rounds = 3

    def main(world: sundog.World) -> Any:
        x = world.empty((2 * rounds, N))
        x.copy_(torch.stack([data(world.rank, i) for i in range(2 * rounds)]))
        inbox, out = world.empty((N,)), world.empty((2 * rounds, N))
        ready, done = world.signals(1, "ready"), world.signals(1, "done")
        ready.fill_(first - 1)
        done.fill_(first - 1)
        world.barrier()
        for half in (0, 1):
            part = slice(half * rounds, (half + 1) * rounds)
            ring[(1,)](
                x[part], inbox, out[part], ready, done, world.ctx, first + half * rounds, N,
                ROUNDS=rounds, BLOCK=64,
            )  # fmt: skip
        world.barrier()
        return out.clone(), int(ready), int(done)

    for rank, (out, ready, done) in enumerate(run(main, size)):
        expected = torch.stack([data((rank - 1) % size, i) for i in range(2 * rounds)])
        assert torch.equal(out.cpu(), expected)
        assert ready == done == first + 2 * rounds - 1


@triton.jit
def gather_and_sum(x, out, flags, epochs, ctx, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    """Every round: x += 1, then the sum of all ranks' x. A barrier before and after reading."""
    size = tl.load(ctx + 1)
    for i in range(ROUNDS):
        epoch = tl.load(epochs) + 1
        tl.store(x, tl.load(x) + 1)
        signal.barrier_ranks(flags, epoch, ctx, LANES)
        total = tl.zeros((), tl.int64)
        for peer in range(size):
            total += memory.load(x, peer, ctx)
        tl.store(out + i, total)
        signal.barrier_ranks(flags, epoch + 1, ctx, LANES)
        tl.store(epochs, epoch + 1)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("start", [0, LAST - 12], ids=["from 0", "to the last epoch"])
def test_barrier_ranks_repeated(run: Run, size: int, start: int) -> None:
    """Three launches of two rounds of two barriers: twelve epochs, the last may be 2^63 - 1."""

    def main(world: sundog.World) -> Any:
        x = world.full((1,), 100 * world.rank, torch.int64)
        out = world.zeros((3, 2), torch.int64)
        flags, epochs = world.signals(world.size, "flags"), world.signals(1, "epoch")
        flags.fill_(start)
        epochs.fill_(start)
        world.barrier()
        for call in range(3):
            gather_and_sum[(1,)](
                x, out[call], flags, epochs, world.ctx,
                ROUNDS=2, LANES=triton.next_power_of_2(world.size),
            )  # fmt: skip
        world.barrier()
        return out.flatten().tolist(), int(epochs), flags.tolist()

    ranks = sum(100 * rank for rank in range(size))
    for sums, epoch, flags in run(main, size):
        assert sums == [ranks + size * (i + 1) for i in range(6)]
        assert epoch == start + 12
        assert flags == [start + 12] * size


@triton.jit
def all_signal(x, flags, seen, epoch, ctx, LANES: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    rank, size = tl.load(ctx), tl.load(ctx + 1)
    for peer in range(size):
        memory.store(x + rank * N + at, at + 1000 * rank, peer, ctx)
    signal.signal_all(flags, epoch, ctx, LANES)
    signal.wait_all(flags, epoch, ctx, LANES)
    for peer in range(size):
        tl.store(seen + peer * N + at, tl.load(x + peer * N + at))


@pytest.mark.parametrize("size", WORLDS)
def test_signal_all_and_wait_all(run: Run, size: int) -> None:
    """More lanes than ranks; what was stored before the signal is there after the wait."""

    def main(world: sundog.World) -> Any:
        x = world.full((size, 32), -1, torch.int32)
        seen = world.full((size, 32), -2, torch.int32)
        flags = world.signals(size, "flags")
        world.barrier()
        all_signal[(1,)](x, flags, seen, 7, world.ctx, LANES=16, N=32)
        world.barrier()
        return seen.clone(), flags.tolist()

    expected = torch.arange(32, dtype=torch.int32) + 1000 * torch.arange(size)[:, None].int()
    for seen, flags in run(main, size):
        assert torch.equal(seen.cpu(), expected)
        assert flags == [7] * size


@triton.jit
def stages(a, b, counter, ctx, N: tl.constexpr, ROUNDS: tl.constexpr):
    """Each program writes its word; after the barrier each reads its right neighbour's."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    me = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    for i in range(ROUNDS):
        tl.store(a + me, 10 * me + i)
        signal.barrier_programs(counter, ctx)
        tl.store(b + i * programs + me, tl.load(a + (me + 1) % programs))
        signal.barrier_programs(counter, ctx)


@pytest.mark.parametrize("grid", [(1,), (2,), (5,), (3, 2), (2, 2, 2)], ids=str)
def test_barrier_programs(run: Run, grid: tuple[int, ...]) -> None:
    """Two launches share the counter, which is never reset."""
    programs, rounds = int(torch.tensor(grid).prod()), 3

    def main(world: sundog.World) -> Any:
        a = world.zeros((programs,), torch.int64)
        b = world.zeros((2, rounds, programs), torch.int64)
        counter = world.signals(1, "counter")
        world.barrier()
        for call in range(2):
            stages[grid](a, b[call], counter, world.ctx, N=programs, ROUNDS=rounds)
        world.barrier()
        return b.tolist(), int(counter)

    row = [[10 * ((p + 1) % programs) + i for p in range(programs)] for i in range(rounds)]
    for b, counter in run(main, 2):
        assert b == [row, row]
        assert counter == 2 * 2 * rounds * programs


@triton.jit
def late_epoch(flag, out, ctx):
    """A wait is for an epoch or a later one: it may find the flag ahead."""
    signal.wait(flag, 0, 3, ctx)
    tl.store(out, 1)


def test_a_flag_may_be_ahead(run: Run) -> None:
    def main(world: sundog.World) -> int:
        flag, out = world.signals(1, "flag"), world.zeros((1,), torch.int32)
        flag.fill_(1000)
        world.barrier()
        late_epoch[(1,)](flag, out, world.ctx)
        world.barrier()
        return int(out)

    assert run(main, 2) == [1, 1]


@triton.jit
def wait_for(flag, peer, epoch, ctx):
    signal.wait(flag, peer, epoch, ctx)


@triton.jit
def wait_for_all(flags, epoch, ctx, LANES: tl.constexpr):
    signal.wait_all(flags, epoch, ctx, LANES)


@triton.jit
def wait_for_programs(counter, ctx):
    if tl.program_id(0) > 0:
        signal.barrier_programs(counter, ctx)


def expiring(run: Run, backend: str) -> Callable[..., list]:
    """Runs in which bounded waits run out soon."""

    def call(fn: Callable[[sundog.World], Any], size: int) -> list:
        if backend == "sim":
            return run(fn, size, sim=sundog.Sim(expire=True))
        return run(fn, size, timeout=2)

    return call


@pytest.mark.parametrize("kind", ["wait", "wait_all", "barrier_programs"])
def test_a_wait_that_runs_out_leaves_a_record(run: Run, backend: str, kind: str) -> None:
    """Rank 1 never signals: rank 0 learns which flag, who owes it, what it expected and saw."""

    def main(world: sundog.World) -> Any:
        flags = world.signals(4, "inbox")
        if world.rank == 0:
            flags[2] = 3
        world.barrier()
        if world.rank == 0:
            if kind == "wait":
                wait_for[(1,)](flags[2:], 1, 5, world.ctx)
            elif kind == "wait_all":
                wait_for_all[(1,)](flags[1:], 1, world.ctx, LANES=2)
            else:
                wait_for_programs[(3,)](flags[3:], world.ctx)
        try:
            world.barrier()
        except sundog.errors.WaitTimeout as error:
            record = error.record
            world.barrier()
            return str(error), record, flags.tolist()
        return None, None, flags.tolist()

    (text, record, flags), (none, _, other) = expiring(run, backend)(main, 2)
    assert none is None
    assert flags == other == [0] * 4, "recovery sets the flags back"
    assert (record.rank, record.flag) == {
        "wait": (0, "inbox[2]"),
        "wait_all": (0, "inbox[1]"),
        "barrier_programs": (0, "inbox[3]"),
    }[kind]
    assert (record.expected, record.seen, record.peer) == {
        "wait": (5, 3, 1),
        "wait_all": (1, 0, 0),
        "barrier_programs": (3, 2, 0),
    }[kind]
    for part in ("rank 0", record.flag, str(record.expected), str(record.seen), "world.barrier()"):
        assert part in text


def test_one_wait_that_runs_out_ends_the_others(run: Run, backend: str) -> None:
    """Five programs wait; one record is left, and none of them hangs."""

    def main(world: sundog.World) -> Any:
        flag = world.signals(1, "flag")
        world.barrier()
        if world.rank == 0:
            wait_for[(5,)](flag, 1, 2, world.ctx)
            # Queued after it: ends at once too. One binary serves 2 and 3, so none is loaded while
            # the first waits.
            wait_for[(5,)](flag, 1, 3, world.ctx)
        try:
            world.barrier()
        except sundog.errors.WaitTimeout as error:
            world.barrier()
            return error.record.expected
        return None

    assert expiring(run, backend)(main, 2) == [2, None]
