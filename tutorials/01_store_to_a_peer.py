"""# 1. Store to a peer

A Triton kernel that runs on one GPU reads and writes that GPU's memory. With symmetric memory it
can also write the memory of another GPU, with an ordinary store to an ordinary pointer. In this
tutorial every rank stores its tensor into the memory of its right neighbour.

You learn

- what a *rank*, a *world* and a *symmetric tensor* are;
- how a kernel turns a pointer into the same pointer on a peer;
- why a rank must wait before it reads the data.

Nothing here needs a GPU. Run it with

```
python tutorials/01_store_to_a_peer.py
```
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory

# %%
# ## Ranks and worlds
#
# A multi-GPU program is one function that runs once per GPU. Each running copy is a **rank**. The
# function receives a **world**, which has its rank (`world.rank`) and the number of ranks
# (`world.size`), and which allocates memory that the other ranks can reach.
#
# ## The kernel
#
# `inbox` is a symmetric tensor: every rank allocated it with the same call, so it has the same
# offset in every rank's heap. A kernel can therefore reach a peer's copy by adding one number to
# its own pointer. `memory.store` does this. Its arguments are always in the same order: where,
# what, which peer, and the context.
#
# The **context** (`world.ctx`) is a small table in device memory. It holds this rank's number,
# the number of ranks, and the distance to each peer's heap.


@triton.jit
def store_kernel(x, inbox, ctx, n, BLOCK: tl.constexpr):
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    right = (rank + 1) % size
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tile = tl.load(x + offsets, mask=mask)
    memory.store(inbox + offsets, tile, right, ctx, mask=mask)


# %%
# ## The rank's function
#
# `world.empty` allocates a symmetric tensor. It does not communicate: ranks that make the same
# allocations get the same offsets. But a kernel may touch a peer's memory only after that peer has
# allocated it, so there is a `world.barrier()` before the launch.
#
# The second barrier is the point of this tutorial. The kernel of the *left* neighbour writes my
# `inbox`. I know when my own kernel has finished, but not when my neighbour's has.
# `world.barrier()` waits for the kernels that this rank launched, and then for all other ranks.
# After it, every inbox is complete.


def main(world: sundog.World, n: int = 1000) -> torch.Tensor:
    torch.manual_seed(world.rank)
    x = torch.randn(n, device=world.device)  # an ordinary tensor: only this rank reads it
    inbox = world.empty((n,), name="inbox")  # a symmetric tensor: the left neighbour writes it
    world.barrier()  # every rank has allocated its inbox

    grid = (triton.cdiv(n, 256),)
    store_kernel[grid](x, inbox, world.ctx, n, BLOCK=256)

    world.barrier()  # every rank's kernel has finished, so my inbox is complete

    # %%
    # ## Comparison with torch
    #
    # `world.exchange` collects one Python object from each rank on the host. From these we build
    # the expected inbox: row r of the rolled stack is the tensor of rank r - 1.

    everyone = torch.stack(world.exchange(x.cpu()))
    expected = torch.roll(everyone, 1, dims=0)[world.rank]
    assert torch.equal(inbox.cpu(), expected), f"rank {world.rank}: the inbox is wrong"
    if world.rank == 0:
        print(f"{world.size} ranks: each inbox holds the left neighbour's {n} floats")
    return inbox


# %%
# ## Running it
#
# `sundog.run` starts the ranks. With a GPU in the machine all ranks share it
# (`backend="virtual"`); without one they run on the simulator (`backend="sim"`). Under
# `torchrun`, where each process is a rank already, use `with sundog.init() as world: main(world)`
# instead.
#
# Try this: delete the second `world.barrier()` and run `sundog check
# tutorials/01_store_to_a_peer.py`. The checker reports a race between your neighbour's store and
# your read of the inbox, even if the values happen to be right.

if __name__ == "__main__":
    sundog.run(main, world_size=4)
