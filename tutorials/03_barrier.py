"""# 3. A barrier, and flags that are never reset

A kernel runs more than once. To reset its flags between calls, the host would have to wait for all
ranks, reset the flags, and wait again. sundog never resets a flag. A flag holds an **epoch**, a
number that only grows: call 1 waits for 1, call 2 waits for 2.

You learn

- how epochs make a kernel repeatable without work on the host;
- how a barrier of all ranks is built from signals and waits;
- why a buffer that is used again needs synchronisation at both ends.

```
python tutorials/03_barrier.py
```
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal

# %%
# ## A barrier by hand
#
# In a barrier, each rank sends one signal to every rank and waits for one signal from every rank.
# `flags` has one word per rank; rank r sets word r. All words are compared with the same epoch.


@triton.jit
def barrier_by_hand(flags, epoch, ctx):
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    for peer in range(size):
        # What this program did so far comes before the flag. The peer waits for it below.
        signal.signal(flags + rank, peer, epoch, ctx)
    for peer in range(size):
        # Everything that the peer did before its signal comes before what follows.
        signal.wait(flags + peer, peer, epoch, ctx)


# %%
# `signal.barrier_ranks` does the same with one tensor atomic instead of a loop, one lane per
# peer. On an H200 it was 3.6 times as fast as the loop. Use it; the loop above only shows the idea.
#
# ## The kernel
#
# Each rank writes its value into its slot on every rank, and then adds up the slots: a small
# all-reduce. The epoch is stored in device memory, and the kernel itself advances it. The host
# passes no number, so the same launch can be repeated, or captured in a CUDA graph.
#
# There are two barriers, and both are needed:
#
# - after the second one, all values have arrived and may be read;
# - after the first one, every rank has *finished reading* the previous call's values, which may
#   then be overwritten.


@triton.jit
def sum_kernel(x, slots, out, flags, epochs, ctx, n, BLOCK: tl.constexpr, LANES: tl.constexpr):
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    epoch = tl.load(epochs) + 1  # the number of this call

    # All ranks have read the slots of the previous call: the slots may be overwritten.
    barrier_by_hand(flags, epoch, ctx)
    tile = tl.load(x + offsets, mask=mask)
    for peer in range(size):
        memory.store(slots + rank * n + offsets, tile, peer, ctx, mask=mask)
    # All ranks' stores come before the loads below. This barrier has a row of flags of its own.
    signal.barrier_ranks(flags + size, epoch, ctx, LANES)

    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(size):  # in rank order, so every rank gets the same bits
        total += tl.load(slots + peer * n + offsets, mask=mask)
    tl.store(out + offsets, total, mask=mask)
    tl.store(epochs, epoch)  # the next launch on this stream reads it


def main(world: sundog.World, n: int = 500, calls: int = 3) -> torch.Tensor:
    torch.manual_seed(world.rank)
    x = torch.randn(calls, n, device=world.device)
    slots = world.empty((world.size, n), name="slots")
    flags = world.signals((2, world.size), "flags")
    epochs = world.signals(1, "epochs")
    out = torch.empty(calls, n, device=world.device)
    world.barrier()  # every rank's flags are zero

    for call in range(calls):  # one after the other; the host waits for nothing in between
        sum_kernel[(1,)](
            x[call],
            slots,
            out[call],
            flags,
            epochs,
            world.ctx,
            n,
            BLOCK=triton.next_power_of_2(n),
            LANES=triton.next_power_of_2(world.size),
        )

    # %%
    # ## Comparison with torch
    #
    # Floating-point addition is not associative, so the bits of a sum depend on the order. The
    # kernel adds in rank order, and so does Python's `sum`: the bits are equal.

    everyone = world.exchange(x.cpu())
    expected = sum(everyone, torch.zeros(calls, n))
    assert torch.equal(out.cpu(), expected), f"rank {world.rank}: wrong sum"
    if world.rank == 0:
        print(f"{world.size} ranks: {calls} sums of {n} floats, equal to torch bit by bit")
    return out


# %%
# ## Try this
#
# Remove `barrier_by_hand` from `sum_kernel` and run
#
# ```
# sundog check tutorials/03_barrier.py --world 3 --schedules 20
# ```
#
# With `--mutate` the checker does this for you. It removes or weakens every synchronisation of the
# kernel, one at a time, and lists those whose loss changes nothing. Here it lists one: the barrier
# between warps inside `signal.signal`. This kernel stores nothing before its first barrier of
# ranks, so that barrier has nothing to publish. `signal.signal` needs it in kernels that store
# first.

if __name__ == "__main__":
    sundog.run(main, world_size=4)
