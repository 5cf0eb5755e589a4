"""Hosts touch memory too: a torch operation is ordered with its own stream, not with a peer's."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import NO_ORDER
from sundog.device import memory

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def pull(x, out, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, memory.load(x + at, peer, ctx))


@triton.jit
def push(x, inbox, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)


def fill_then_pull(fixed: bool, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x"), torch.empty(BLOCK)
    world.barrier()
    x.copy_(values(world.rank, BLOCK))
    # wrong without it: the peer may read before this rank has filled
    if fixed:
        world.barrier()
    pull[(1,)](x, out, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


def kernel_then_pull(fixed: bool, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x"), torch.empty(BLOCK)
    world.barrier()
    push[(1,)](values(world.rank, BLOCK), x, world.rank, world.ctx, BLOCK)
    # wrong without it: stream order is this rank's, and says nothing about the peer's kernel
    if fixed:
        world.barrier()
    pull[(1,)](x, out, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


def tell_then_pull(fixed: bool, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x"), torch.empty(BLOCK)
    world.barrier()
    x.copy_(values(world.rank, BLOCK))
    # wrong: hosts that exchange a message have ordered no memory
    if fixed:
        world.barrier()
    else:
        world.broadcast_object("filled")
    pull[(1,)](x, out, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


def pull_then_fill(fixed: bool, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x").copy_(values(world.rank, BLOCK)), torch.empty(BLOCK)
    world.barrier()
    pull[(1,)](x, out, neighbour(world), world.ctx, BLOCK)
    # wrong without it: the next input overwrites x while the peer's kernel may read it
    if fixed:
        world.barrier()
    x.copy_(values(world.rank, BLOCK, call=1))
    assert torch.equal(out, values(neighbour(world), BLOCK))


def push_then_read(fixed: bool, world: sundog.World) -> None:
    inbox = world.empty((BLOCK,), name="inbox")
    world.barrier()
    push[(1,)](values(world.rank, BLOCK), inbox, neighbour(world), world.ctx, BLOCK)
    # wrong without it: this rank has sent, which does not mean that it has received
    if fixed:
        world.barrier()
    assert torch.equal(inbox, values(neighbour(world), BLOCK))


def read_peer(fixed: bool, world: sundog.World) -> None:
    x = world.empty((BLOCK,), name="x")
    world.barrier()
    push[(1,)](values(world.rank, BLOCK), x, world.rank, world.ctx, BLOCK)
    # wrong: waits for its own kernel and reads what the peer's kernel writes
    if fixed:
        world.barrier()
    else:
        world.synchronize()
    theirs = world.peer(x, neighbour(world)).clone()
    assert torch.equal(theirs, values(neighbour(world), BLOCK))
    world.barrier()


def write_peer(fixed: bool, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x"), torch.empty(BLOCK)
    world.barrier()
    world.peer(x, neighbour(world)).copy_(values(world.rank, BLOCK))
    # wrong without it: the host's copy to the peer and the peer's kernel are not ordered
    if fixed:
        world.barrier()
    pull[(1,)](x, out, world.rank, world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


def _pair(family: str, name: str, host: Kernel) -> Pair:
    return Pair(family, name, partial(host, False), partial(host, True), 2, NO_ORDER)


FILL, READ = "no barrier between fill and read", "host reads before the wait"
PAIRS = [
    _pair(FILL, "filled by the host", fill_then_pull),
    _pair(FILL, "filled by a kernel", kernel_then_pull),
    _pair(FILL, "message instead of a barrier", tell_then_pull),
    _pair(FILL, "filled by the peer's host", write_peer),
    _pair("host overwrites what a peer reads", "next input", pull_then_fill),
    _pair(READ, "own inbox", push_then_read),
    _pair(READ, "memory of the peer", read_peer),
]
