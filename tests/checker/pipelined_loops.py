"""Loops that load what an acquire in them orders: some are pipelined, so that they load too early.

HOISTED says which, as Triton 3.6 to 3.9 compile them. Rank 1 produces, a flag per tile; rank 0 runs
the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import memory, signal

STEPS = 4
SIDE = tl.constexpr(32)


@triton.jit
def acquire(flag, epoch):
    """A look, and a poll where it came too early: what `signal.wait` does, without its barrier."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen < epoch:
        while seen < epoch:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def poll(flag, epoch):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < epoch:
        pass


@triton.jit
def tile(x, k):
    at = tl.arange(0, SIDE)
    return tl.load(x + k * SIDE * SIDE + at[:, None] * SIDE + at[None, :])


@triton.jit
def dot(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k, epoch)
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def dot_and_barrier(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k, epoch)
        tl.debug_barrier()
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def barrier_at_the_end(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k, epoch)
        total = tl.dot(tile(a, k), tile(b, k), total)
        tl.debug_barrier()
    return total


@triton.jit
def sum_of_tiles(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k, epoch)
        total += tile(a, k).to(tl.float32)
    return total


@triton.jit
def staged_sum(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in tl.range(steps, num_stages=3):
        acquire(flags + k, epoch)
        total += tile(a, k).to(tl.float32)
    return total


@triton.jit
def one_stage(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in tl.range(steps, num_stages=1):
        acquire(flags + k, epoch)
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def poll_in_the_loop(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        poll(flags + k, epoch)
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def poll_in_a_branch(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        if k % 2 == 0:
            poll(flags + k, epoch)
            poll(flags + k + 1, epoch)
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def unrolled(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in tl.static_range(4):
        acquire(flags + k, epoch)
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def inner_loop(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for half in range(steps // 2):
        acquire(flags + 2 * half, epoch)
        acquire(flags + 2 * half + 1, epoch)
        for k in range(2 * half, 2 * half + 2):
            total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def before_the_loop(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for k in range(steps):
        acquire(flags + k, epoch)
    for k in range(steps):
        total = tl.dot(tile(a, k), tile(b, k), total)
    return total


@triton.jit
def one_ahead(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    acquire(flags, epoch)
    for k in range(steps):
        total = tl.dot(tile(a, k), tile(b, k), total)
        acquire(flags + tl.minimum(k + 1, steps - 1), epoch)
    return total


@triton.jit
def beside_the_dot(a, b, flags, epoch, steps):
    total = tl.zeros((SIDE, SIDE), tl.float32)
    ones = tl.full((SIDE, SIDE), 1.0, tl.float16)
    for k in range(steps):
        acquire(flags + k, epoch)
        total += tile(a, k).to(tl.float32)
        total = tl.dot(ones, ones, total)
    return total


HOISTED: dict[Any, bool] = {
    dot: True,
    dot_and_barrier: False,
    barrier_at_the_end: False,
    sum_of_tiles: False,
    staged_sum: True,
    one_stage: False,
    poll_in_the_loop: False,
    poll_in_a_branch: True,
    unrolled: False,
    inner_loop: False,
    before_the_loop: False,
    one_ahead: True,
    beside_the_dot: False,
}


@triton.jit
def produce(a, flags, ctx, steps):
    at = tl.arange(0, SIDE)
    ones = tl.full((SIDE, SIDE), 1.0, tl.float16)
    for k in range(steps):
        memory.store(a + k * SIDE * SIDE + at[:, None] * SIDE + at[None, :], ones, 0, ctx)
        signal.signal(flags + k, 0, 1, ctx)


@triton.jit
def consume(a, b, out, flags, epoch, steps, LOOP: tl.constexpr):
    at = tl.arange(0, SIDE)
    total = LOOP(a, b, flags, epoch, steps)
    tl.store(out + at[:, None] * SIDE + at[None, :], total)


def host(loop: Any, **options: Any) -> Callable[[sundog.World], None]:
    def main(world: sundog.World) -> None:
        shape = STEPS, SIDE.value, SIDE.value
        a, b = world.empty(shape, torch.float16, "a"), torch.ones(shape, dtype=torch.float16)
        flags = world.signals(STEPS, "flags")
        out = torch.empty(SIDE.value, SIDE.value)
        world.barrier()
        if world.rank == 1:
            produce[(1,)](a, flags, world.ctx, STEPS)
        else:
            consume[(1,)](a, b, out, flags, 1, STEPS, LOOP=loop, **options)

    return main


run_dot, run_dot_and_barrier = host(dot), host(dot_and_barrier)  # for `sundog isa`
