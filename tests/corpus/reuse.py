"""A buffer is used again: the writer must know that every reader of the last value is done."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import NO_ORDER
from sundog.device import memory, signal

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def once_wrong(x, inbox, out, ready, done, peer, epoch, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # wrong: nobody asks whether the peer has read what the last call sent
    signal.put_signal(inbox + at, x + at, ready, peer, epoch, ctx)
    signal.wait(ready, peer, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def once_fixed(x, inbox, out, ready, done, peer, epoch, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.wait(done, peer, epoch - 1, ctx)
    signal.put_signal(inbox + at, x + at, ready, peer, epoch, ctx)
    signal.wait(ready, peer, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at))
    signal.signal(done, peer, epoch, ctx)


@triton.jit
def old_epoch_wrong(x, inbox, out, ready, done, peer, epoch, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # wrong: off by one; the call before the last was done long ago
    signal.wait(done, peer, epoch - 2, ctx)
    signal.put_signal(inbox + at, x + at, ready, peer, epoch, ctx)
    signal.wait(ready, peer, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at))
    signal.signal(done, peer, epoch, ctx)


@triton.jit
def early_done_wrong(x, inbox, out, ready, done, peer, epoch, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.wait(done, peer, epoch - 1, ctx)
    signal.put_signal(inbox + at, x + at, ready, peer, epoch, ctx)
    signal.wait(ready, peer, epoch, ctx)
    # wrong: says done before the last read
    signal.signal(done, peer, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at))


def calls(kernel: Kernel, world: sundog.World) -> None:
    """Two calls back to back: nothing but the kernels' own flags keeps them apart."""
    x = [values(world.rank, BLOCK, call=call) for call in range(2)]
    out = [torch.empty(BLOCK), torch.empty(BLOCK)]
    inbox = world.empty((BLOCK,), name="inbox")
    ready, done = world.signals((1,), "ready"), world.signals((1,), "done")
    world.barrier()
    peer = neighbour(world)
    for call in range(2):
        kernel[(1,)](x[call], inbox, out[call], ready, done, peer, call + 1, world.ctx, BLOCK)
    for call in range(2):
        assert torch.equal(out[call], values(peer, BLOCK, call=call))


@triton.jit
def stream_wrong(
    x, slots, out, ready, done, rank, ctx,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    for step in range(STEPS):
        here, slot = step * BLOCK + at, step % SLOTS * BLOCK + at
        if rank == 0:
            # wrong: lets the writer be SLOTS + 1 steps ahead, one more than there are slots
            signal.wait(done, 1, step - SLOTS, ctx)
            signal.put_signal(slots + slot, x + here, ready, 1, step + 1, ctx)
        else:
            signal.wait(ready, 0, step + 1, ctx)
            tl.store(out + here, tl.load(slots + slot))
            signal.signal(done, 0, step + 1, ctx)


@triton.jit
def stream_fixed(
    x, slots, out, ready, done, rank, ctx,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    for step in range(STEPS):
        here, slot = step * BLOCK + at, step % SLOTS * BLOCK + at
        if rank == 0:
            signal.wait(done, 1, step + 1 - SLOTS, ctx)
            signal.put_signal(slots + slot, x + here, ready, 1, step + 1, ctx)
        else:
            signal.wait(ready, 0, step + 1, ctx)
            tl.store(out + here, tl.load(slots + slot))
            signal.signal(done, 0, step + 1, ctx)


def stream(kernel: Kernel, slots: int, world: sundog.World) -> None:
    steps = 4
    x, out = values(world.rank, steps, BLOCK), torch.empty(steps, BLOCK)
    buffers = world.empty((slots, BLOCK), name="slots")
    ready, done = world.signals((1,), "ready"), world.signals((1,), "done")
    world.barrier()
    kernel[(1,)](x, buffers, out, ready, done, world.rank, world.ctx, steps, slots, BLOCK)
    if world.rank == 1:
        assert torch.equal(out, values(0, steps, BLOCK))


@triton.jit
def one_reader_wrong(x, inbox, out, ready, done, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        if rank == 0:
            # wrong: two readers, and only one of them is asked
            signal.wait(done + 1, 1, step, ctx)
            memory.store(inbox + at, tl.load(x + step * BLOCK + at), 0, ctx)
            for peer in range(1, 3):
                signal.signal(ready, peer, step + 1, ctx)
        else:
            signal.wait(ready, 0, step + 1, ctx)
            tl.store(out + step * BLOCK + at, memory.load(inbox + at, 0, ctx))
            signal.signal(done + rank, 0, step + 1, ctx)


@triton.jit
def all_readers_fixed(x, inbox, out, ready, done, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(2):
        if rank == 0:
            for peer in range(1, 3):
                signal.wait(done + peer, peer, step, ctx)
            memory.store(inbox + at, tl.load(x + step * BLOCK + at), 0, ctx)
            for peer in range(1, 3):
                signal.signal(ready, peer, step + 1, ctx)
        else:
            signal.wait(ready, 0, step + 1, ctx)
            tl.store(out + step * BLOCK + at, memory.load(inbox + at, 0, ctx))
            signal.signal(done + rank, 0, step + 1, ctx)


def broadcast(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 2, BLOCK), torch.empty(2, BLOCK)
    inbox = world.empty((BLOCK,), name="inbox")
    ready, done = world.signals((1,), "ready"), world.signals((3,), "done")
    world.barrier()
    kernel[(1,)](x, inbox, out, ready, done, world.rank, world.ctx, BLOCK)
    if world.rank > 0:
        assert torch.equal(out, values(0, 2, BLOCK))


def _pair(family: str, name: str, wrong: partial, fixed: partial, world_size: int = 2) -> Pair:
    return Pair(family, name, wrong, fixed, world_size, NO_ORDER)


MISSING = "missing done flag on reuse"
PAIRS = [
    _pair(MISSING, "two calls", partial(calls, once_wrong), partial(calls, once_fixed)),
    _pair(MISSING, "epoch of done", partial(calls, old_epoch_wrong), partial(calls, once_fixed)),
    _pair(
        MISSING,
        "one of two readers",
        partial(broadcast, one_reader_wrong),
        partial(broadcast, all_readers_fixed),
        3,
    ),
    _pair(
        "done before the last read",
        "swapped lines",
        partial(calls, early_done_wrong),
        partial(calls, once_fixed),
    ),
    _pair(
        "one buffer short",
        "double buffering",
        partial(stream, stream_wrong, 2),
        partial(stream, stream_fixed, 2),
    ),
    _pair(
        "one buffer short",
        "single buffer",
        partial(stream, stream_wrong, 1),
        partial(stream, stream_fixed, 1),
    ),
]
