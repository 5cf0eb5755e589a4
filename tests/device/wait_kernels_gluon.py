"""As wait_kernels, in Gluon: a sum of tiles that arrive one by one. Rank or program 0 sums."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sundog.device import context
from sundog.device import gluon as device

BETWEEN_RANKS = ("gluon.wait", "gluon.wait_all", "gluon.barrier_ranks")
WITHIN_A_RANK = ("gluon.barrier_programs",)
WAITS = (*BETWEEN_RANKS, *WITHIN_A_RANK)
LANES = gl.constexpr(2)  # ranks


@gluon.jit(do_not_specialize=["epoch", "late"])
def arriving_sum(
    a, flags, done, counter, wrong, junk, ctx, epoch, steps, late,
    WAIT: gl.constexpr, BLOCK: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """`late`: how long each tile takes. THREADS: of a warp."""
    rank = gl.load(ctx + context.RANK).to(gl.int32)
    if WAIT == "gluon.barrier_programs":
        produces, peer = gl.program_id(0) == 1, rank
    else:
        produces, peer = rank == 1, 1 - rank
    layout: gl.constexpr = gl.BlockedLayout([8], [THREADS], [gl.num_warps()], [0])
    at = gl.arange(0, BLOCK, layout)
    if produces:
        # The consumer has read the tiles of the last epoch: they may be overwritten.
        device.wait(done, peer, epoch - 1, ctx)
        for k in range(steps):
            for _ in range(late):
                gl.atomic_add(junk, 1, sem="relaxed", scope="gpu")
            tile = gl.full((BLOCK,), 0, gl.float32, layout) + (epoch % 5 + 1 + k).to(gl.float32)
            device.store(a + k * BLOCK + at, tile, peer, ctx)
            _announce(flags, counter, ctx, peer, epoch, k, WAIT)
    else:
        if WAIT == "gluon.wait_all":
            for k in range(steps):  # of the flags that it waits for one is its own
                device.signal_all(flags + k * LANES, epoch, ctx, LANES)
        total = gl.full((BLOCK,), 0, gl.float32, layout)
        for k in range(steps):
            _wait(flags, counter, ctx, peer, epoch, k, WAIT)
            total += gl.load(a + k * BLOCK + at)
        expected = steps * (epoch % 5 + 1) + steps * (steps - 1) // 2
        differ = gl.sum((total != expected.to(gl.float32)).to(gl.int32), 0)
        gl.atomic_add(wrong, (differ > 0).to(gl.int32), sem="relaxed", scope="gpu")
        # My loads of these tiles before the producer's stores of the next epoch.
        device.signal(done, peer, epoch, ctx)


@gluon.jit
def _announce(flags, counter, ctx, peer, epoch, k, WAIT: gl.constexpr):
    """The tile, stored by all warps, before what the consumer waits for."""
    if WAIT == "gluon.wait":
        device.signal(flags + k, peer, epoch, ctx)
    elif WAIT == "gluon.wait_all":
        device.signal_all(flags + k * LANES, epoch, ctx, LANES)
    else:
        _wait(flags, counter, ctx, peer, epoch, k, WAIT)


@gluon.jit
def _wait(flags, counter, ctx, peer, epoch, k, WAIT: gl.constexpr):
    if WAIT == "gluon.wait":
        device.wait(flags + k, peer, epoch, ctx)
    elif WAIT == "gluon.wait_all":
        device.wait_all(flags + k * LANES, epoch, ctx, LANES)
    elif WAIT == "gluon.barrier_ranks":
        device.barrier_ranks(flags + k * LANES, epoch, ctx, LANES)
    else:
        device.barrier_programs(counter, ctx)
