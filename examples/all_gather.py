"""All-gather and sum in one kernel: store a tensor to every rank, wait for all ranks, add up.

The barrier is inside the kernel, between the peers' stores and this rank's loads.

    python examples/all_gather.py
    torchrun --nproc-per-node 4 examples/all_gather.py
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal


@triton.jit
def gather_kernel(x, out, total, flags, epochs, ctx, n, BLOCK: tl.constexpr, LANES: tl.constexpr):
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    epoch = tl.load(epochs + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + at, mask=at < n)
    for step in range(size):
        peer = (rank + step) % size  # each rank starts with another peer
        memory.store(out + rank * n + at, tile, peer, ctx, mask=at < n)
    # Orders my tiles before the flags, and all ranks' tiles before my loads below. After it, the
    # columns of `out` that programs with this number write are complete on this rank.
    signal.barrier_ranks(flags + program * size, epoch, ctx, LANES)
    sum_of_ranks = tl.zeros((BLOCK,), tl.float32)
    for peer in range(size):
        sum_of_ranks += tl.load(out + peer * n + at, mask=at < n, other=0.0)
    tl.store(total + at, sum_of_ranks, mask=at < n)
    tl.store(epochs + program, epoch)  # read by the next launch on this stream


def main(world: sundog.World, n: int = 999) -> torch.Tensor:
    programs = 2
    torch.manual_seed(42 + world.rank)
    x = world.randn((n,), name="x")
    out = world.empty((world.size * n,), name="out")
    total = torch.empty((n,), device=world.device)
    flags = world.signals((programs, world.size), "flags")
    epochs = world.signals(programs, "epochs")
    world.barrier()  # all have allocated: peers may be touched
    gather_kernel[(programs,)](
        x, out, total, flags, epochs, world.ctx, n,
        BLOCK=triton.next_power_of_2(triton.cdiv(n, programs)),
        LANES=triton.next_power_of_2(world.size),
    )  # fmt: skip
    parts = world.exchange(x.cpu())
    assert torch.equal(out.cpu(), torch.cat(parts)), f"rank {world.rank} gathered something else"
    assert torch.equal(total.cpu(), sum(parts, torch.zeros(n))), f"rank {world.rank}: wrong sum"
    if world.rank == 0:
        print(f"{world.size} ranks gathered and added {n} floats of each: all equal")
    return out


if __name__ == "__main__":
    if "RANK" in os.environ:
        with sundog.init() as world:
            main(world)
    else:
        sundog.run(main, world_size=8)
