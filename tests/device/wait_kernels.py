"""A product whose tiles arrive one by one, with a wait of every kind before each of them.

One side stores tile after tile of A and announces each, late. The other waits for a tile, loads it
and multiplies. What it reads too early is a tile of the epoch before, and the product is wrong.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sundog.device import context, local, memory, proxy, signal

# Between two ranks, rank 0 produces and rank 1 consumes; within a rank, programs 1 and 0 do.
BETWEEN_RANKS = ("signal.wait", "signal.wait_all", "signal.barrier_ranks")
WITHIN_A_RANK = ("local.wait", "signal.barrier_programs")
WAITS = (*BETWEEN_RANKS, *WITHIN_A_RANK)
BARE = "bare"  # between ranks: an acquire, and no CTA barrier after it
LANES = tl.constexpr(2)  # ranks


@triton.jit(do_not_specialize=["epoch", "late"])
def arriving_product(
    a, a_tiles, b, flags, done, counter, wrong, junk, ctx, epoch, steps, late,
    WAIT: tl.constexpr, FENCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`a_tiles`: a descriptor of `a`, or None. `late`: how long each tile takes."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    if WAIT == "local.wait" or WAIT == "signal.barrier_programs":
        produces, peer = tl.program_id(0) == 1, rank
    else:
        produces, peer = rank == 0, 1 - rank
    if produces:
        _produce(a, flags, done, counter, junk, ctx, peer, epoch, steps, late, WAIT, BLOCK)
    else:
        if WAIT == "signal.wait_all":
            for k in range(steps):  # of the flags that it waits for one is its own
                signal.signal_all(flags + k * LANES, epoch, ctx, LANES)
        total = _consume(
            a, a_tiles, b, flags, counter, ctx, peer, epoch, steps, WAIT, FENCED, BLOCK
        )
        expected = (steps * (epoch % 5 + 1) + steps * (steps - 1) // 2) * BLOCK
        differ = tl.sum(tl.sum((total != expected.to(tl.float32)).to(tl.int32), 1), 0)
        tl.atomic_add(wrong, (differ > 0).to(tl.int32), sem="relaxed", scope="gpu")
        # My loads of these tiles before the producer's stores of the next epoch.
        signal.signal(done, peer, epoch, ctx)


@triton.jit
def _produce(
    a, flags, done, counter, junk, ctx, peer, epoch, steps, late,
    WAIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    # The consumer has read the tiles of the last epoch: they may be overwritten.
    signal.wait(done, peer, epoch - 1, ctx)
    for k in range(steps):
        for _ in range(late):
            tl.atomic_add(junk, 1, sem="relaxed", scope="gpu")
        tile = tl.zeros((BLOCK, BLOCK), tl.float32) + (epoch % 5 + 1 + k).to(tl.float32)
        place = a + at[:, None] * (steps * BLOCK) + (k * BLOCK + at)[None, :]
        memory.store(place, tile.to(tl.float16), peer, ctx)
        # The tile, stored by all warps, before the flag that the consumer waits for.
        if WAIT == "signal.wait" or WAIT == "bare":
            signal.signal(flags + k, peer, epoch, ctx)
        elif WAIT == "signal.wait_all":
            signal.signal_all(flags + k * LANES, epoch, ctx, LANES)
        elif WAIT == "signal.barrier_ranks":
            signal.barrier_ranks(flags + k * LANES, epoch, ctx, LANES)
        elif WAIT == "local.wait":
            local.signal(flags + k, epoch, ctx)
        else:
            signal.barrier_programs(counter, ctx)


@triton.jit
def _consume(
    a, a_tiles, b, flags, counter, ctx, peer, epoch, steps,
    WAIT: tl.constexpr, FENCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(steps):
        _wait(flags, counter, ctx, peer, epoch, k, WAIT)  # for the tile that is loaded next
        if FENCED:
            proxy.fence()  # the tile before its load by descriptor
        if a_tiles is None:
            x = tl.load(a + at[:, None] * (steps * BLOCK) + (k * BLOCK + at)[None, :])
        else:
            x = a_tiles.load([0, k * BLOCK])
        y = tl.load(b + (k * BLOCK + at)[:, None] * BLOCK + at[None, :])
        total = tl.dot(x, y, total)
    return total


@triton.jit
def _wait(flags, counter, ctx, peer, epoch, k, WAIT: tl.constexpr):
    if WAIT == "signal.wait":
        signal.wait(flags + k, peer, epoch, ctx)
    elif WAIT == "signal.wait_all":
        signal.wait_all(flags + k * LANES, epoch, ctx, LANES)
    elif WAIT == "signal.barrier_ranks":
        signal.barrier_ranks(flags + k * LANES, epoch, ctx, LANES)
    elif WAIT == "local.wait":
        local.wait(flags + k, epoch, ctx)
    elif WAIT == "signal.barrier_programs":
        signal.barrier_programs(counter, ctx)
    else:
        _wait_bare(flags + k, epoch)


@triton.jit
def _wait_bare(flag, epoch):
    """What a user may write: right in the memory model, but for the pipeliner. Bounded."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen < epoch:
        polls = 0
        while (seen < epoch) & (polls < 1_000_000):
            polls += 1
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
