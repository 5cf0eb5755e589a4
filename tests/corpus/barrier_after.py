"""A tensor atomic acquires lane by lane: a CTA barrier hands that on to the warps that load."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import BARRIER_AFTER
from sundog.device import memory, signal

from .pair import Kernel, Pair, everyone, values

__all__ = ["PAIRS"]

BLOCK = 16
FAMILY = "missing CTA barrier after a tensor acquire"


@triton.jit
def num_late(flags, epoch, WORLD: tl.constexpr):
    lane = tl.arange(0, WORLD)
    seen = tl.atomic_add(flags + lane, lane * 0, sem="acquire", scope="sys")
    return tl.sum((seen < epoch).to(tl.int32), 0)


@triton.jit
def gather_wrong(x, gathered, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for peer in range(WORLD):
        memory.store(gathered + rank * BLOCK + at, tl.load(x + at), peer, ctx)
    signal.signal_all(flags, 1, ctx, WORLD)
    while num_late(flags, 1, WORLD) > 0:
        pass
    # wrong: the loads below are made by all threads, of which a few acquired
    for source in range(WORLD):
        tl.store(out + source * BLOCK + at, tl.load(gathered + source * BLOCK + at))


@triton.jit
def gather_fixed(x, gathered, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for peer in range(WORLD):
        memory.store(gathered + rank * BLOCK + at, tl.load(x + at), peer, ctx)
    signal.signal_all(flags, 1, ctx, WORLD)
    while num_late(flags, 1, WORLD) > 0:
        pass
    tl.debug_barrier()
    for source in range(WORLD):
        tl.store(out + source * BLOCK + at, tl.load(gathered + source * BLOCK + at))


def gather(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(world.size, BLOCK)
    gathered = world.empty((world.size, BLOCK), name="gathered")
    flags = world.signals((world.size,), "flags")
    world.barrier()
    kernel[(1,)](x, gathered, out, flags, world.rank, world.ctx, world.size, BLOCK)
    assert torch.equal(out, everyone(world, BLOCK))


@triton.jit
def again_wrong(x, inbox, out, ready, done, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(1, 3):
        while num_late(done, step - 1, WORLD) > 0:
            pass
        # wrong: the stores below overwrite what the readers, by "done", have read
        for peer in range(WORLD):
            memory.store(inbox + rank * BLOCK + at, tl.load(x + at) * step, peer, ctx)
        signal.signal_all(ready, step, ctx, WORLD)
        signal.wait_all(ready, step, ctx, WORLD)
        for source in range(WORLD):
            here = source * BLOCK + at
            tl.store(out + step * WORLD * BLOCK + here, tl.load(inbox + here))
        signal.signal_all(done, step, ctx, WORLD)


@triton.jit
def again_fixed(x, inbox, out, ready, done, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(1, 3):
        while num_late(done, step - 1, WORLD) > 0:
            pass
        tl.debug_barrier()
        for peer in range(WORLD):
            memory.store(inbox + rank * BLOCK + at, tl.load(x + at) * step, peer, ctx)
        signal.signal_all(ready, step, ctx, WORLD)
        signal.wait_all(ready, step, ctx, WORLD)
        for source in range(WORLD):
            here = source * BLOCK + at
            tl.store(out + step * WORLD * BLOCK + here, tl.load(inbox + here))
        signal.signal_all(done, step, ctx, WORLD)


def again(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.zeros(3, world.size, BLOCK)
    inbox = world.empty((world.size, BLOCK), name="inbox")
    ready, done = world.signals((world.size,), "ready"), world.signals((world.size,), "done")
    world.barrier()
    kernel[(1,)](x, inbox, out, ready, done, world.rank, world.ctx, world.size, BLOCK)
    sent = everyone(world, BLOCK)
    assert torch.equal(out[1:], torch.stack([sent, sent * 2]))


PAIRS = [
    Pair(
        FAMILY,
        "poll, then load the tiles",
        partial(gather, gather_wrong),
        partial(gather, gather_fixed),
        2,
        BARRIER_AFTER,
    ),
    Pair(
        FAMILY,
        "poll done, then overwrite",
        partial(again, again_wrong),
        partial(again, again_fixed),
        2,
        BARRIER_AFTER,
    ),
]
