"""Reads of what nobody wrote."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.unwritten import NEVER_WRITTEN
from sundog.device import memory, signal

from .pair import Kernel, Pair, everyone, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16
FAMILY = "read before anyone wrote"


@triton.jit
def gather_wrong(x, gathered, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # wrong: sends to the others and forgets its own slot
    for peer in range(WORLD):
        if peer != rank:
            signal.put_signal(gathered + rank * BLOCK + at, x + at, flags + rank, peer, 1, ctx)
    for source in range(WORLD):
        if source != rank:
            signal.wait(flags + source, source, 1, ctx)
        tl.store(out + source * BLOCK + at, tl.load(gathered + source * BLOCK + at))


@triton.jit
def gather_fixed(x, gathered, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for peer in range(WORLD):
        signal.put_signal(gathered + rank * BLOCK + at, x + at, flags + rank, peer, 1, ctx)
    for source in range(WORLD):
        signal.wait(flags + source, source, 1, ctx)
        tl.store(out + source * BLOCK + at, tl.load(gathered + source * BLOCK + at))


def gather(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(world.size, BLOCK)
    gathered = world.empty((world.size, BLOCK), name="gathered")
    flags = world.signals((world.size,), "flags")
    world.barrier()
    kernel[(1,)](x, gathered, out, flags, world.rank, world.ctx, world.size, BLOCK)
    assert torch.equal(out, everyone(world, BLOCK))


@triton.jit
def send_part(x, inbox, flag, peer, n, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx, mask=at < n)
    signal.wait(flag, peer, 1, ctx)


@triton.jit
def total_wrong(inbox, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # wrong: the sender's mask left the tail of this padded tensor as it was
    tl.store(out, tl.sum(tl.load(inbox + at), 0))


@triton.jit
def total_fixed(inbox, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(inbox + at, mask=at < n, other=0), 0))


def padded(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 11), torch.empty(1)
    inbox, flag = world.empty((BLOCK,), name="inbox"), world.signals((1,), "flag")
    world.barrier()
    send_part[(1,)](x, inbox, flag, neighbour(world), 11, world.ctx, BLOCK)
    kernel[(1,)](inbox, out, 11, BLOCK)
    assert out.item() == values(neighbour(world), 11).sum()


@triton.jit
def accumulate(x, total, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for part in range(PARTS):
        tl.store(total + at, tl.load(total + at) + tl.load(x + part * BLOCK + at))


def sums(start: Kernel, world: sundog.World) -> None:
    x, total = values(0, 3, BLOCK), start(BLOCK)
    accumulate[(1,)](x, total, 3, BLOCK)
    assert torch.equal(total, x.sum(0))


@triton.jit
def push(x, inbox, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    signal.wait(flag, peer, 1, ctx)


def flag_of(zeroed: bool, world: sundog.World) -> None:
    x, inbox = values(world.rank, BLOCK), world.empty((BLOCK,), name="inbox")
    flag = world.empty((1,), torch.int64, "flag")
    if zeroed:  # wrong if not: a flag starts with whatever the memory held
        flag.zero_()
    world.barrier()
    push[(1,)](x, inbox, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(inbox, values(neighbour(world), BLOCK))


@triton.jit
def pull(x, out, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, memory.load(x + at, peer, ctx))


def fill_some(everywhere: bool, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x"), torch.empty(BLOCK)
    if everywhere or world.rank == 0:  # wrong: only rank 0 fills the tensor that all ranks read
        x.copy_(values(world.rank, BLOCK))
    world.barrier()
    pull[(1,)](x, out, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


def _pair(name: str, wrong: partial, fixed: partial, world_size: int) -> Pair:
    return Pair(FAMILY, name, wrong, fixed, world_size, NEVER_WRITTEN)


PAIRS = [
    _pair("own slot", partial(gather, gather_wrong), partial(gather, gather_fixed), 2),
    _pair("masked tail", partial(padded, total_wrong), partial(padded, total_fixed), 2),
    # wrong: adds to what torch.empty left there
    _pair("accumulator", partial(sums, torch.empty), partial(sums, torch.zeros), 1),
    _pair("flag", partial(flag_of, False), partial(flag_of, True), 2),
    _pair("filled on one rank", partial(fill_some, False), partial(fill_some, True), 2),
]
