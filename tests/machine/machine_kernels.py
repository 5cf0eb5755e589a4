"""Kernels that the tests of the machine share: some wait, some never stop waiting."""

from __future__ import annotations

import triton
import triton.language as tl

from sundog.device import memory, signal


@triton.jit
def slow_then_signal(x, flag, ctx, TIMES: tl.constexpr):
    """Rank 0 works for a while and signals rank 1, which has been waiting all the time."""
    if tl.load(ctx) == 0:
        for _ in range(TIMES):
            tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
        signal.signal(flag, 1, 1, ctx)
    else:
        signal.wait(flag, 0, 1, ctx)


@triton.jit
def slow_then_store(x, flag, ctx, TIMES: tl.constexpr):
    """The same with a volatile poll, and a plain one (races both, but they must not spin)."""
    if tl.load(ctx) == 0:
        for _ in range(TIMES):
            tl.atomic_add(x, 1, sem="relaxed", scope="gpu")
        memory.store(flag, 1, 1, ctx)
    elif tl.program_id(0) == 0:
        while tl.load(flag, volatile=True) == 0:
            pass
    else:
        while tl.load(flag) == 0:
            pass


@triton.jit
def circle(flags, ctx, epoch):
    """Everybody waits for the rank below before it signals the rank above."""
    rank, size = tl.load(ctx), tl.load(ctx + 1)
    down = (rank + size - 1) % size
    signal.wait(flags + 2, down, epoch, ctx)  # circular wait
    signal.signal(flags + 2, (rank + 1) % size, epoch, ctx)


@triton.jit
def meet(flags, ctx, LANES: tl.constexpr):
    signal.barrier_ranks(flags, 1, ctx, LANES)


@triton.jit
def gather(out, flags, place, epoch, ctx, LANES: tl.constexpr):
    one = tl.full((), 1, tl.int64)
    for peer in range(tl.load(ctx + 1)):
        memory.atomic_add(out + place, one, peer, ctx)
    signal.barrier_ranks(flags, epoch, ctx, LANES)
