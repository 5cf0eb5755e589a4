"""# 4. All-gather

Now a real collective: after an all-gather, every rank has the tensors of all ranks, one after the
other. This tutorial builds it for tensors of any size, with many programs per rank, and compares
it with `torch.cat` and with `world.all_gather`.

You learn

- how several programs share the work, each with its own flags;
- why ranks should start with different peers;
- how to call the collective that sundog ships.

```
python tutorials/04_all_gather.py
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
# A fixed number of programs walks over the tiles. Program p of every rank handles the same tiles,
# so program p needs to wait only for program p of the other ranks. It therefore gets its own row
# of flags and its own epoch. No program waits for a slow program that does unrelated work.
#
# The inner loop starts with the rank itself and goes round the ranks. In each step every rank
# writes to a *different* peer, so no link carries the traffic of all ranks at once.


@triton.jit
def gather_kernel(x, out, ready, arrived, epochs, ctx, n, BLOCK: tl.constexpr, LANES: tl.constexpr):
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    epoch = tl.load(epochs + program) + 1

    # My output may be overwritten: its last reader came before this kernel on my stream. Peers
    # store into it only after this barrier.
    signal.barrier_ranks(ready + program * size, epoch, ctx, LANES)
    for start in range(program * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n
        tile = tl.load(x + offsets, mask=mask)
        for step in range(size):
            peer = (rank + step) % size
            memory.store(out + rank * n + offsets, tile, peer, ctx, mask=mask)
    # My stores come before the flags. All peers' stores come before whatever follows this kernel on
    # my stream.
    signal.barrier_ranks(arrived + program * size, epoch, ctx, LANES)
    tl.store(epochs + program, epoch)  # the next launch on this stream reads it


# %%
# ## How many programs?
#
# All programs that wait for each other must run at the same time. A GPU starts a program when
# there is room on an SM. If the running programs wait for one that has not started, they wait for
# ever. One program per SM (`world.num_sms`) is always safe. On the `virtual` backend sundog
# refuses a launch that cannot be resident, with the numbers, instead of letting it hang.


def main(world: sundog.World, n: int = 5000, programs: int = 4) -> torch.Tensor:
    torch.manual_seed(world.rank)
    x = torch.randn(n, device=world.device)
    out = world.empty((world.size * n,), name="out")
    ready = world.signals((programs, world.size), "ready")
    arrived = world.signals((programs, world.size), "arrived")
    epochs = world.signals(programs, "epochs")
    world.barrier()  # every rank has its output, and flags that are zero

    for _ in range(2):  # twice, since only the second call shows that a flag is missing
        gather_kernel[(programs,)](
            x,
            out,
            ready,
            arrived,
            epochs,
            world.ctx,
            n,
            BLOCK=1024,
            LANES=triton.next_power_of_2(world.size),
        )

    # %%
    # ## Comparison with torch and with `world.all_gather`
    #
    # `world.all_gather` has the semantics of `torch.distributed.all_gather_into_tensor`. It accepts
    # any tensor, chooses an algorithm and a config, and can be captured in a CUDA graph.

    expected = torch.cat(world.exchange(x.cpu()))
    assert torch.equal(out.cpu(), expected), f"rank {world.rank}: our all-gather is wrong"
    assert torch.equal(world.all_gather(x).cpu(), expected)
    if world.rank == 0:
        print(f"{world.size} ranks gathered {n} floats of each: equal to torch.cat")
    return out


# %%
# The shipped algorithms are in `sundog/collectives/`, one file each. `all_gather_push.py` is this
# tutorial with 16-byte stores for every dtype; `all_gather_pull.py` reads from the peers instead.

if __name__ == "__main__":
    sundog.run(main, world_size=4)
