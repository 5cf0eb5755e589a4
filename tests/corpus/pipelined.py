"""An acquire in a loop that the compiler pipelines: the tiles are loaded before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.pipelined import BARRIER_IN_LOOP
from sundog.device import memory, signal

from .pair import Kernel, Pair

__all__ = ["PAIRS"]

STEPS = 2
SIDE = tl.constexpr(16)
FAMILY = "acquire in a pipelined loop"


@triton.jit
def acquire(flag):
    if tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass


@triton.jit
def place(x, k):
    at = tl.arange(0, SIDE)
    return x + k * SIDE * SIDE + at[:, None] * SIDE + at[None, :]


@triton.jit
def send(x, inbox, flags, peer, steps, ctx):
    for k in range(steps):
        memory.put(place(inbox, k), place(x, k), peer, ctx)
        signal.signal(flags + k, peer, 1, ctx)


@triton.jit
def product_wrong(x, inbox, b, out, flags, peer, steps, ctx):
    send(x, inbox, flags, peer, steps, ctx)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k)
        # wrong: the pipelined loop has loaded the tile by now
        total = tl.dot(tl.load(place(inbox, k)), tl.load(place(b, k)), total)
    tl.store(place(out, 0), total)


@triton.jit
def product_fixed(x, inbox, b, out, flags, peer, steps, ctx):
    send(x, inbox, flags, peer, steps, ctx)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k)
        tl.debug_barrier()
        total = tl.dot(tl.load(place(inbox, k)), tl.load(place(b, k)), total)
    tl.store(place(out, 0), total)


@triton.jit
def product_outside(x, inbox, b, out, flags, peer, steps, ctx):
    send(x, inbox, flags, peer, steps, ctx)
    for k in range(steps):
        signal.wait(flags + k, peer, 1, ctx)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        total = tl.dot(tl.load(place(inbox, k)), tl.load(place(b, k)), total)
    tl.store(place(out, 0), total)


def multiply(kernel: Kernel, world: sundog.World) -> None:
    shape, peer = (STEPS, SIDE.value, SIDE.value), 1 - world.rank
    x, b = (torch.full(shape, n + 1.0, dtype=torch.float16) for n in (world.rank, 2))
    out = torch.empty(shape[1:])
    inbox, flags = world.empty(shape, torch.float16, "inbox"), world.signals(STEPS, "flags")
    world.barrier()
    kernel[(1,)](x, inbox, b, out, flags, peer, STEPS, world.ctx)
    assert torch.equal(out, torch.full_like(out, STEPS * SIDE.value * (peer + 1) * 3))


@triton.jit
def sum_wrong(x, inbox, b, out, flags, peer, steps, ctx):
    send(x, inbox, flags, peer, steps, ctx)
    total = tl.load(place(b, 0)).to(tl.float32)
    for k in tl.range(steps, num_stages=3):
        acquire(flags + k)
        # wrong: with num_stages, a loop without tl.dot is pipelined too
        total += tl.load(place(inbox, k))
    tl.store(place(out, 0), total)


@triton.jit
def sum_fixed(x, inbox, b, out, flags, peer, steps, ctx):
    send(x, inbox, flags, peer, steps, ctx)
    total = tl.load(place(b, 0)).to(tl.float32)
    for k in tl.range(steps, num_stages=3):
        signal.wait(flags + k, peer, 1, ctx)
        total += tl.load(place(inbox, k))
    tl.store(place(out, 0), total)


def add(kernel: Kernel, world: sundog.World) -> None:
    shape, peer = (STEPS, SIDE.value, SIDE.value), 1 - world.rank
    x, b = (torch.full(shape, n + 1.0, dtype=torch.float16) for n in (world.rank, 2))
    out = torch.empty(shape[1:])
    inbox, flags = world.empty(shape, torch.float16, "inbox"), world.signals(STEPS, "flags")
    world.barrier()
    kernel[(1,)](x, inbox, b, out, flags, peer, STEPS, world.ctx)
    assert torch.equal(out, torch.full_like(out, STEPS * (peer + 1) + 3))


def _pair(name: str, host: Callable[..., None], wrong: Kernel, fixed: Kernel) -> Pair:
    return Pair(FAMILY, name, partial(host, wrong), partial(host, fixed), 2, BARRIER_IN_LOOP)


PAIRS = [
    _pair("a product tile by tile", multiply, product_wrong, product_fixed),
    _pair("a product, waited for outside", multiply, product_wrong, product_outside),
    _pair("a sum in stages", add, sum_wrong, sum_fixed),
]
