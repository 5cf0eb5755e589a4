"""Small kernels with waits in them, for the tests of the GPU backends."""

from __future__ import annotations

import triton
import triton.language as tl

from sundog.device import context, memory, signal

_RANK = context.RANK


@triton.jit
def all_gather(
    x, out, flags, epochs, ctx, n, SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr
):
    """Push x to every rank's out[rank], then a barrier of all ranks. Any grid."""
    pid = tl.program_id(0)
    rank = tl.load(ctx + _RANK).to(tl.int32)
    epoch = tl.load(epochs + pid) + 1
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < n
        value = tl.load(x + offs, mask=mask)
        for i in range(SIZE):
            memory.store(out + rank * n + offs, value, (rank + i) % SIZE, ctx, mask=mask)
    signal.barrier_ranks(flags + pid * SIZE, epoch, ctx, LANES)
    tl.store(epochs + pid, epoch)


@triton.jit(do_not_specialize=["epoch"])
def barrier(flags, epoch, ctx, LANES: tl.constexpr):
    signal.barrier_ranks(flags, epoch, ctx, LANES)


@triton.jit(do_not_specialize=["epoch", "peer"])
def wait_for(flag, peer, epoch, ctx):
    """One program that waits for one flag."""
    signal.wait(flag, peer, epoch, ctx)


@triton.jit
def specialised(flags, ctx, rank, LANES: tl.constexpr):
    """`rank` is specialised: 0, 1 and the others are three different kernels."""
    signal.barrier_ranks(flags, tl.full((), 1, tl.int64) + rank * 0, ctx, LANES)


@triton.jit
def gather_programs(values, counter, out, ctx, PROGRAMS: tl.constexpr):
    """Every program writes a value, and after a barrier of the programs reads all of them."""
    pid = tl.program_id(0)
    tl.store(values + pid, pid * 3 + tl.load(ctx + _RANK).to(tl.int32))
    signal.barrier_programs(counter, ctx)
    every = tl.arange(0, PROGRAMS)
    tl.store(out + pid * PROGRAMS + every, tl.load(values + every))


@triton.jit(do_not_specialize=["rounds"])
def delay(junk, rounds):
    for _ in range(rounds):
        tl.atomic_add(junk, 1, sem="relaxed", scope="gpu")


@triton.jit
def heavy_wait(flags, out, ctx, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Waits, and keeps a large tile in registers meanwhile."""
    offs = tl.arange(0, BLOCK)
    tile = tl.load(out + offs)
    signal.barrier_ranks(flags + tl.program_id(0) * LANES, tl.full((), 1, tl.int64), ctx, LANES)
    tl.store(out + offs, tile + 1)
