"""Kernels of which every kind of mutant can be made, and one that has atomics only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sundog import World
from sundog.device import context, memory, signal


@triton.jit
def pass_on(x, inbox, flags, words, epoch, ctx, n, SEM: tl.constexpr, BLOCK: tl.constexpr):
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    at = tl.arange(0, BLOCK)
    # my right neighbour has read what I sent last: its inbox may be overwritten
    signal.wait(flags + right, right, epoch - 1, ctx)
    memory.store(inbox + at, tl.load(x + at, mask=at < n), right, ctx, mask=at < n)
    tl.debug_barrier()  # all warps' part of the tile before the exchange
    # releases my tile to my right neighbour, who polls the word
    tl.atomic_xchg(memory.translate(words, right, ctx), epoch, sem=SEM, scope="sys")
    seen = tl.atomic_add(words, 0, sem="acquire", scope="sys")
    while seen < epoch:
        seen = tl.atomic_add(words, 0, sem="acquire", scope="sys")
    tl.store(x + at, tl.load(inbox + at, mask=at < n), mask=at < n)
    # my left neighbour may write to my inbox again
    signal.signal(flags + rank, left, epoch, ctx)


def everything(world: World) -> torch.Tensor:
    n = 37
    x, inbox = torch.full((n,), float(world.rank)), world.empty((n,), name="inbox")
    flags, words = world.signals(world.size, "flags"), world.signals(1, "words")
    world.barrier()  # everybody's flags are zero
    for epoch in range(1, 3):
        pass_on[(1,)](x, inbox, flags, words, epoch, world.ctx, n, SEM="release", BLOCK=64)
    return x


@triton.jit
def count(total, arrived, out, PROGRAMS: tl.constexpr):
    """Add to a sum; the last program to arrive reads it. Atomics only, with Triton's defaults."""
    one = tl.cast(1, tl.int64)
    tl.atomic_add(total, one, sem="relaxed", scope="gpu")
    # releases my addition to the program that arrives last, which acquires all of them
    before = tl.atomic_add(arrived, one)
    if before == PROGRAMS - 1:
        seen = tl.atomic_add(total, 0, sem="relaxed", scope="gpu")
        tl.store(out, seen)


def atomics_only(world: World) -> int:
    total, arrived = world.signals(1, "total"), world.signals(1, "arrived")
    out = torch.zeros(1, dtype=torch.int64)
    count[(3,)](total, arrived, out, PROGRAMS=3)
    assert out.item() == 3, "the last one did not see all additions"
    return int(out.item())
