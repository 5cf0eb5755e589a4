"""A neighbour exchange in Gluon, right and with one fault each, for the checker."""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import sundog
from sundog.device import context, signal
from sundog.device import gluon as device

LAYOUT = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
BLOCK = gl.constexpr(64)
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # so called in Triton 3.6


@gluon.jit
def exchange(
    x, inbox, out, flag, ctx, n, BARRIER: gl.constexpr, SIGNAL: gl.constexpr, POLL: gl.constexpr
):
    """Store to the right and raise its flag; wait for the left and read. By hand."""
    rank, size = gl.load(ctx + context.RANK), gl.load(ctx + context.SIZE)
    at = gl.arange(0, BLOCK, LAYOUT)
    right = (rank + 1) % size
    device.store(inbox + at, gl.load(x + at, mask=at < n), right, ctx, mask=at < n)
    if BARRIER:
        barrier()  # all warps' stores before the release of one thread
    gl.atomic_xchg(signal.translate(flag, right, ctx), 1, sem=SIGNAL, scope="sys")
    while gl.atomic_add(flag, 0, sem=POLL, scope="sys") == 0:  # the left one's tile before my loads
        pass
    gl.store(out + at, gl.load(inbox + at, mask=at < n), mask=at < n)


@gluon.jit
def exchange_by_name(x, inbox, out, flag, ctx, n):
    """The same with sundog's signal and wait."""
    rank, size = gl.load(ctx + context.RANK), gl.load(ctx + context.SIZE)
    at = gl.arange(0, BLOCK, LAYOUT)
    device.store(inbox + at, gl.load(x + at, mask=at < n), (rank + 1) % size, ctx, mask=at < n)
    device.signal(flag, (rank + 1) % size, 1, ctx)  # my tile, to who waits below on the right
    device.wait(flag, (rank + size - 1) % size, 1, ctx)  # the left one's tile before my loads
    gl.store(out + at, gl.load(inbox + at, mask=at < n), mask=at < n)


def _run(world: sundog.World, kernel: object, **constants: object) -> None:
    n = 37
    torch.manual_seed(world.rank)
    x, inbox = world.randn((n,), name="x"), world.empty((n,), name="inbox")
    out = torch.empty(n)
    flag = world.signals(1, "flag")
    world.barrier()
    kernel[(1,)](x, inbox, out, flag, world.ctx, n, **constants)
    world.synchronize()
    left = world.exchange(x)[world.rank - 1]
    assert torch.equal(out, left), "not what the left neighbour has"


def by_name(world: sundog.World) -> None:
    _run(world, exchange_by_name)


def by_hand(world: sundog.World) -> None:
    _run(world, exchange, BARRIER=True, SIGNAL="release", POLL="acquire")


def no_barrier(world: sundog.World) -> None:
    _run(world, exchange, BARRIER=False, SIGNAL="release", POLL="acquire")


def relaxed_signal(world: sundog.World) -> None:
    _run(world, exchange, BARRIER=True, SIGNAL="relaxed", POLL="acquire")


def relaxed_poll(world: sundog.World) -> None:
    _run(world, exchange, BARRIER=True, SIGNAL="release", POLL="relaxed")
