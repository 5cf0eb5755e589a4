"""Stand-ins: one program plays the side of a rank whose part of an op is not measured.

With link="pcie" (docs/gpu.md) rank 0 does an op's whole work and the other ranks are passive. Where
an op needs nothing of a peer but to read its data, one kernel can play every peer of every op: it
signals `ready`, and waits until rank 0 signals `done`. So the ops that pull have stand-ins. In an
op that pushes, the peers move the data, which is the work itself: on one GPU, the same GPU would
read across the same link, only in a peer's program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..device import context, trace
from ..device.signal import _wait_tile, translate

if TYPE_CHECKING:
    import torch

    from ..world.world import World


def stand_in(world: World, ready: torch.Tensor, done: torch.Tensor, epochs: torch.Tensor) -> None:
    """Launch it, on a passive rank, instead of an op's kernel.

    `ready` and `done` have rows with a word per rank: rank r sets word r of each of rank p's rows,
    once a call. `done` has only rows that rank 0 signals. `epochs` counts the calls.
    """
    num_ready, num_done = ready.numel() // world.size, done.numel() // world.size
    lanes = triton.next_power_of_2(max(num_ready, num_done))
    _stand_in_kernel[(1,)](
        ready, done, epochs, world.ctx, num_ready, num_done, SIZE=world.size, LANES=lanes,
        TRACE=world.kernel_mode,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_ready", "num_done"])
def _stand_in_kernel(
    ready, done, epochs, ctx, num_ready, num_done,
    SIZE: tl.constexpr, LANES: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(epochs) + 1
    rank = tl.load(ctx + context.RANK)
    lane = tl.arange(0, LANES)
    zero = (lane * 0).to(tl.int64)
    if TRACE % 4:
        for row in range(num_ready):
            flag = ready + row * SIZE + rank
            trace.begin(trace.SIGNAL, flag, epoch, 0, ctx, TRACE)
    # My data is complete: it was written before this kernel on the stream. Rank 0 reads it after
    # these flags.
    mine = translate(ready + lane * SIZE + rank, 0, ctx)
    tl.atomic_xchg(mine, zero + epoch, mask=lane < num_ready, sem="release", scope="sys")
    # I have read all that I will of rank 0's data, which is nothing, so this orders nothing.
    mine = translate(done + lane * SIZE + rank, 0, ctx)
    tl.atomic_xchg(mine, zero + epoch, mask=lane < num_done, sem="relaxed", scope="sys")
    # Rank 0 has read mine, so whatever follows this kernel here may overwrite it. All rows are
    # polled at once: a hundred polls, one after the other, would come between two calls.
    trace.begin(trace.WAIT, done, epoch, 0, ctx, TRACE)
    _wait_tile(done + lane * SIZE, lane < num_done, lane * 0, epoch, ctx)
    trace.end(trace.WAIT, done, epoch, 0, ctx, TRACE)
    tl.store(epochs, epoch)  # read by the next call on the stream
