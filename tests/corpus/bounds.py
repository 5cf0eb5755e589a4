"""Memory that is not there: past the end, freed, not allocated yet, not symmetric."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import BAD_ACCESS, ERROR
from sundog.checker.races import NO_ORDER
from sundog.device import memory, signal

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def copy_wrong(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # wrong: the store has a mask, the load has none
    tl.store(out + at, tl.load(x + at), mask=at < n)


@triton.jit
def copy_fixed(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def ragged(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(0, 41), torch.empty(41)
    kernel[(3,)](x, out, 41, BLOCK)
    assert torch.equal(out, x)


@triton.jit
def pull(x, out, peer, n, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, memory.load(x + at, peer, ctx, mask=at < n), mask=at < n)


def pull_from(wraps: bool, world: sundog.World) -> None:
    x, out = world.empty((13,), name="x").copy_(values(world.rank, 13)), torch.empty(13)
    world.barrier()
    # wrong if it does not wrap: the last rank has no next one
    peer = neighbour(world) if wraps else world.rank + 1
    pull[(1,)](x, out, peer, 13, world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), 13))
    world.barrier()


def pull_tail(wrong: bool, world: sundog.World) -> None:
    sizes = (13, 9)
    largest = 9 if wrong else max(sizes)  # wrong: room for this rank's rows, read with the peer's
    x, out = world.empty((largest,), name="x"), torch.empty(16)
    x[:9].copy_(values(world.rank, 9))
    world.barrier()
    pull[(1,)](x, out, neighbour(world), 9 if world.rank or not wrong else 13, world.ctx, BLOCK)
    assert torch.equal(out[:9], values(neighbour(world), 9))
    world.barrier()


def not_symmetric(wrong: bool, world: sundog.World) -> None:
    x, out = values(world.rank, 13), torch.empty(13)
    if not wrong:  # wrong: an ordinary tensor has no copy at the same offset of the peer
        x = world.as_symmetric(x, "x")
    world.barrier()
    pull[(1,)](x, out, neighbour(world), 13, world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), 13))
    world.barrier()


def out_of_scope(inside: bool, world: sundog.World) -> None:
    out = torch.empty(13)
    with world.scope():
        x = world.empty((13,), name="x").copy_(values(0, 13))
        if inside:
            pull[(1,)](x, out, 0, 13, world.ctx, BLOCK)
    # wrong: the scope has given x back
    if not inside:
        pull[(1,)](x, out, 0, 13, world.ctx, BLOCK)
    assert torch.equal(out, values(0, 13))


def free_at_peer(waits: bool, world: sundog.World) -> None:
    x, out = world.empty((13,), name="x").copy_(values(world.rank, 13)), torch.empty(13)
    world.barrier()
    pull[(1,)](x, out, neighbour(world), 13, world.ctx, BLOCK)
    # wrong: this rank's kernel has ended, the peer's may still read x
    if waits:
        world.barrier()
    else:
        world.synchronize()
    world.free(x)
    assert torch.equal(out, values(neighbour(world), 13))


def free_and_reuse(waits: bool, world: sundog.World) -> None:
    x, out = world.empty((13,), name="x").copy_(values(world.rank, 13)), torch.empty(13)
    world.barrier()
    pull[(1,)](x, out, neighbour(world), 13, world.ctx, BLOCK)
    # wrong: the next tensor takes the place of x, which the peer may still read
    if waits:
        world.barrier()
    else:
        world.synchronize()
    world.free(x)
    world.zeros((13,), name="y")
    assert torch.equal(out, values(neighbour(world), 13))


@triton.jit
def push(x, inbox, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    signal.wait(flag, peer, 1, ctx)


def touch_early(waits: bool, world: sundog.World) -> None:
    flag, x = world.signals((1,), "flag"), values(world.rank, BLOCK)
    world.barrier()
    inbox = world.empty((BLOCK,), name="inbox")
    # wrong without it: the peer may not have allocated its inbox yet
    if waits:
        world.barrier()
    push[(1,)](x, inbox, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(inbox, values(neighbour(world), BLOCK))


def diverge(wrong: bool, world: sundog.World) -> None:
    x, flag = values(world.rank, BLOCK), world.signals((1,), "flag")
    # wrong: rank 0 has one allocation more, and its offsets no longer match
    if not wrong or world.rank == 0:
        world.zeros((1,), name="statistics")
    inbox = world.empty((BLOCK,), name="inbox")
    world.barrier()
    push[(1,)](x, inbox, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(inbox, values(neighbour(world), BLOCK))


def _pair(family: str, name: str, host: Kernel, world_size: int, wrong: bool) -> Pair:
    hosts = partial(host, wrong), partial(host, not wrong)
    return Pair(family, name, *hosts, world_size, BAD_ACCESS)


FREED, ASYMMETRIC = "use after free", "asymmetric allocation"
PAIRS = [
    Pair(
        "ragged tail past the end",
        "load without a mask",
        partial(ragged, copy_wrong),
        partial(ragged, copy_fixed),
        1,
        BAD_ACCESS,
    ),
    _pair("ragged tail past the end", "rows of the other rank", pull_tail, 2, wrong=True),
    _pair("off-by-one peer", "no wrap at the last rank", pull_from, 2, wrong=False),
    _pair(FREED, "own tensor, out of scope", out_of_scope, 1, wrong=False),
    _pair(FREED, "peer still reads", free_at_peer, 2, wrong=False),
    Pair(
        FREED,
        "peer still reads, memory given out again",
        partial(free_and_reuse, False),
        partial(free_and_reuse, True),
        2,
        NO_ORDER,
    ),
    _pair(ASYMMETRIC, "ordinary tensor", not_symmetric, 2, wrong=True),
    _pair(ASYMMETRIC, "touched before the barrier", touch_early, 2, wrong=False),
    Pair(
        ASYMMETRIC,
        "one rank allocates more",
        partial(diverge, True),
        partial(diverge, False),
        2,
        ERROR,
    ),
]
