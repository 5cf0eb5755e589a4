"""Flags that remember the last call: a value that is reused, reset, or baked into a replay."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import DEADLOCK
from sundog.checker.findings import Rule
from sundog.checker.races import NO_ORDER, PLAIN_FLAG
from sundog.device import memory, signal

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def push(x, inbox, out, flag, peer, epoch, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, epoch, ctx)
    signal.wait(flag, peer, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def push_counting(x, inbox, out, flag, peer, calls, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    epoch = tl.load(calls) + 1
    signal.put_signal(inbox + at, x + at, flag, peer, epoch, ctx)
    signal.wait(flag, peer, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at))
    tl.store(calls, epoch)


def calls_with_epochs(epochs: tuple[int, int], world: sundog.World) -> None:
    out, inbox = torch.empty(BLOCK), world.empty((BLOCK,), name="inbox")
    flag = world.signals((1,), "flag")
    for call, epoch in enumerate(epochs):
        world.barrier()
        x = values(world.rank, BLOCK, call=call)
        push[(1,)](x, inbox, out, flag, neighbour(world), epoch, world.ctx, BLOCK)
        assert torch.equal(out, values(neighbour(world), BLOCK, call=call))


def replays(kernel: Kernel, world: sundog.World) -> None:
    """The same captured arguments twice, with fresh data: what replaying a graph does."""
    x, out, inbox = torch.empty(BLOCK), torch.empty(BLOCK), world.empty((BLOCK,), name="inbox")
    flag, calls = world.signals((1,), "flag"), torch.zeros(1, dtype=torch.int64)
    epoch = 1 if kernel is push else calls
    captured = partial(kernel[(1,)], x, inbox, out, flag, neighbour(world), epoch, world.ctx, BLOCK)
    for call in range(2):
        world.barrier()
        x.copy_(values(world.rank, BLOCK, call=call))
        captured()
        assert torch.equal(out, values(neighbour(world), BLOCK, call=call))


def reset_by_host(with_barrier: bool, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox, flag = world.empty((BLOCK,), name="inbox"), world.signals((1,), "flag")
    world.barrier()
    flag.zero_()
    # wrong without it: the peer may have signalled already, and the reset erases that
    if with_barrier:
        world.barrier()
    push[(1,)](x, inbox, out, flag, neighbour(world), 1, world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


@triton.jit
def reset_in_kernel_wrong(x, inbox, out, ready, done, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        signal.wait(done, peer, step, ctx)
        signal.put_signal(inbox + at, x + step * BLOCK + at, ready, peer, 1, ctx)
        signal.wait(ready, peer, 1, ctx)
        tl.store(out + step * BLOCK + at, tl.load(inbox + at))
        signal.signal(done, peer, step + 1, ctx)
        # wrong: the flag is reset after "done" has allowed the peer to set it again
        tl.store(ready, 0)


@triton.jit
def reset_in_kernel_fixed(x, inbox, out, ready, done, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        signal.wait(done, peer, step, ctx)
        signal.put_signal(inbox + at, x + step * BLOCK + at, ready, peer, 1, ctx)
        signal.wait(ready, peer, 1, ctx)
        tl.store(out + step * BLOCK + at, tl.load(inbox + at))
        tl.store(ready, 0)
        signal.signal(done, peer, step + 1, ctx)


def two_steps(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 2, BLOCK), torch.empty(2, BLOCK)
    inbox = world.empty((BLOCK,), name="inbox")
    ready, done = world.signals((1,), "ready"), world.signals((1,), "done")
    world.barrier()
    kernel[(1,)](x, inbox, out, ready, done, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), 2, BLOCK))


@triton.jit
def same_barrier_wrong(x, inbox, out, flags, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        memory.store(inbox + at, tl.load(x + step * BLOCK + at), peer, ctx)
        signal.barrier_ranks(flags, 2 * step + 1, ctx, 2)
        tl.store(out + step * BLOCK + at, tl.load(inbox + at))
        # wrong: the epoch of the barrier above again, so this one is passed at once
        signal.barrier_ranks(flags, 2 * step + 1, ctx, 2)


@triton.jit
def next_barrier_fixed(x, inbox, out, flags, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        memory.store(inbox + at, tl.load(x + step * BLOCK + at), peer, ctx)
        signal.barrier_ranks(flags, 2 * step + 1, ctx, 2)
        tl.store(out + step * BLOCK + at, tl.load(inbox + at))
        signal.barrier_ranks(flags, 2 * step + 2, ctx, 2)


def two_barriers(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 2, BLOCK), torch.empty(2, BLOCK)
    inbox, flags = world.empty((BLOCK,), name="inbox"), world.signals((2,), "flags")
    world.barrier()
    kernel[(1,)](x, inbox, out, flags, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), 2, BLOCK))


@triton.jit
def mirror(x, middle, out, counter, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part, last = tl.program_id(0), tl.num_programs(0) - 1
    tl.store(middle + part * BLOCK + at, tl.load(x + part * BLOCK + at))
    signal.barrier_programs(counter, ctx)
    tl.store(out + part * BLOCK + at, tl.load(middle + (last - part) * BLOCK + at))


def two_grids(num_counters: int, world: sundog.World) -> None:
    x, middle, out = values(0, 3, BLOCK), torch.empty(3, BLOCK), torch.empty(3, BLOCK)
    counters = world.signals((num_counters,), "counters")
    mirror[(2,)](x, middle, out, counters, world.ctx, BLOCK, launch_cooperative_grid=True)
    # wrong with one counter: it has grown by 2, and this grid expects a multiple of 3
    again = counters[num_counters - 1 :]
    mirror[(3,)](x, middle, out, again, world.ctx, BLOCK, launch_cooperative_grid=True)
    assert torch.equal(out, x.flip(0))


@triton.jit
def exactly_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        here = step * BLOCK + at
        signal.put_signal(inbox + here, x + here, flag, peer, step + 1, ctx)
    for step in range(2):
        # wrong: waits for one value of a counter that may have gone past it
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != step + 1:
            pass
        tl.store(out + step * BLOCK + at, tl.load(inbox + step * BLOCK + at))


@triton.jit
def at_least_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        here = step * BLOCK + at
        signal.put_signal(inbox + here, x + here, flag, peer, step + 1, ctx)
    for step in range(2):
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < step + 1:
            pass
        tl.store(out + step * BLOCK + at, tl.load(inbox + step * BLOCK + at))


def two_tiles(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 2, BLOCK), torch.empty(2, BLOCK)
    inbox, flag = world.empty((2, BLOCK), name="inbox"), world.signals((1,), "flag")
    world.barrier()
    kernel[(1,)](x, inbox, out, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), 2, BLOCK))


def _pair(family: str, name: str, wrong: partial, fixed: partial, rule: Rule) -> Pair:
    return Pair(family, name, wrong, fixed, 2, rule)


REUSED = "flag value reused without reset"
PAIRS = [
    _pair(
        REUSED,
        "value 1 in both calls",  # wrong: the flag of the first call lets the second one through
        partial(calls_with_epochs, (1, 1)),
        partial(calls_with_epochs, (1, 2)),
        rule=NO_ORDER,
    ),
    _pair(
        REUSED,
        "reset by the host, no barrier",
        partial(reset_by_host, False),
        partial(reset_by_host, True),
        rule=PLAIN_FLAG,
    ),
    _pair(
        REUSED,
        "reset after done",
        partial(two_steps, reset_in_kernel_wrong),
        partial(two_steps, reset_in_kernel_fixed),
        rule=NO_ORDER,
    ),
    _pair(
        "epoch baked into a replay",
        "captured integer",  # wrong: every replay waits for the epoch of the capture
        partial(replays, push),
        partial(replays, push_counting),
        rule=NO_ORDER,
    ),
    _pair(
        "barrier epoch not advanced",
        "two barriers, one epoch",
        partial(two_barriers, same_barrier_wrong),
        partial(two_barriers, next_barrier_fixed),
        rule=NO_ORDER,
    ),
    Pair(
        "grid barrier counter reused",
        "with another grid",
        partial(two_grids, 1),
        partial(two_grids, 2),
        1,
        DEADLOCK,
    ),
    _pair(
        "waits for one exact value",
        "a counter goes past it",
        partial(two_tiles, exactly_wrong),
        partial(two_tiles, at_least_fixed),
        DEADLOCK,
    ),
]
