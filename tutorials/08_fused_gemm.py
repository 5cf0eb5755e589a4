"""# 8. A fused all-gather and GEMM

In tensor parallelism, a matrix A is divided among the ranks, and every rank multiplies all of A by
its own B. The usual way is an all-gather and then a GEMM: while data moves, the tensor cores are
idle, and while they work, the links are idle. A fused kernel does both at once: it multiplies a
block of A as soon as that block is there.

You learn

- how to hide communication inside the main loop of a GEMM;
- how to wait for one peer at a time, starting with this rank's own data;
- how to call the fused op that sundog ships.

```
python tutorials/08_fused_gemm.py
```
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal

# %%
# ## The kernel
#
# Rank r has columns `[r K/W, (r+1) K/W)` of A. Every program computes one tile of C. Its K loop
# runs over the ranks, and within a rank over that rank's columns:
#
# 1. wait until the peer's part of A is ready;
# 2. multiply the peer's tiles by the matching rows of B, reading A straight from the peer's
#    memory.
#
# The loop starts with this rank's own part, which needs no link. By the time that it reaches a
# peer, the peer has usually signalled. The price is the order of the sum: each rank adds the parts
# in a different order, so ranks may differ in the last bits. (With `order = range(size)` they would
# not.)
#
# A program must not touch a peer's A before the peer has signalled *ready*, and the peer must not
# change its A before all ranks have signalled *done*.


@triton.jit
def all_gather_matmul_kernel(
    a, b, c, ready, done, epochs, ctx, m, n, k_part,
    LANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    epoch = tl.load(epochs + program) + 1
    # My part of A was written before this kernel on my stream. Every rank reads it.
    signal.signal_all(ready + program * size, epoch, ctx, LANES)

    tiles_n = tl.cdiv(n, BLOCK_N)
    rows = (program // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (program % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(size):
        peer = (rank + step) % size
        # The peer's part of A comes before the loads below.
        signal.wait(ready + program * size + peer, peer, epoch, ctx)
        a_peer = memory.translate(a, peer, ctx)
        for start in range(0, k_part, BLOCK_K):
            k = start + inner
            a_mask = (rows[:, None] < m) & (k[None, :] < k_part)
            b_mask = (k[:, None] < k_part) & (cols[None, :] < n)
            a_tile = tl.load(a_peer + rows[:, None] * k_part + k[None, :], mask=a_mask, other=0.0)
            b_rows = peer * k_part + k
            b_tile = tl.load(b + b_rows[:, None] * n + cols[None, :], mask=b_mask, other=0.0)
            total = tl.dot(a_tile, b_tile, total)
    c_mask = (rows[:, None] < m) & (cols[None, :] < n)
    tl.store(c + rows[:, None] * n + cols[None, :], total.to(c.dtype.element_ty), mask=c_mask)

    # My loads of the peers' A come before the flags. After this barrier A may be overwritten.
    signal.barrier_ranks(done + program * size, epoch, ctx, LANES)
    tl.store(epochs + program, epoch)  # the next launch on this stream reads it


# %%
# ## The host
#
# All programs of all ranks wait for each other, so all of them must be resident: at most one per
# SM here. A production kernel uses a fixed number of programs that walk over the tiles.


def fused(world: sundog.World, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (m, k_part), n = a.shape, b.shape[1]
    block_m, block_n, block_k = 32, 32, 32
    programs = triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    if programs > world.num_sms:
        raise ValueError(f"{programs} programs on {world.num_sms} SMs could wait forever")
    shape = (programs, world.size)
    ready, done = world.signals(shape, "ready"), world.signals(shape, "done")
    epochs = world.signals(programs, "epochs")
    c = torch.empty((m, n), dtype=a.dtype, device=world.device)
    world.barrier()  # every rank's flags are zero before the first signal
    all_gather_matmul_kernel[(programs,)](
        a, b, c, ready, done, epochs, world.ctx, m, n, k_part,
        LANES=triton.next_power_of_2(world.size),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )  # fmt: skip
    return c


# %%
# ## Comparison with torch
#
# Small whole numbers make every product and sum exact, so the fused result must equal torch's bit
# by bit, in any order of the sum, and so must `world.all_gather_matmul`. Its algorithms gather
# first, fetch into a buffer while multiplying, or read from the peers directly. It uses TMA if the
# GPU has it, supports bias and activation, and picks the fastest algorithm from measurements.


def main(world: sundog.World, m: int = 60, n: int = 90, k_part: int = 48) -> torch.Tensor:
    torch.manual_seed(world.rank)
    a = world.empty((m, k_part), torch.float16, "a")
    a.copy_(torch.randint(-4, 5, (m, k_part)))
    torch.manual_seed(99)
    b = torch.randint(-4, 5, (world.size * k_part, n)).to(world.device, torch.float16)
    world.barrier()

    c = fused(world, a, b)

    whole = torch.cat(world.exchange(a.cpu()), dim=1).float()
    expected = (whole @ b.cpu().float()).half()
    assert torch.equal(c.cpu(), expected), f"rank {world.rank}: our product is wrong"
    assert torch.equal(world.all_gather_matmul(a, b).cpu(), expected)
    if world.rank == 0:
        print(f"{world.size} ranks: A gathered and multiplied in one kernel, equal to torch")
    return c


# %%
# [GEMM + communication](../fused.md) compares the algorithms and says when to use each.

if __name__ == "__main__":
    sundog.run(main, world_size=4)
