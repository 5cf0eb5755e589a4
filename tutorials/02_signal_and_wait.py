"""# 2. Signal and wait

In the first tutorial the hosts made the ranks wait for each other. That costs tens of microseconds
and stops all kernels. A kernel can do better: the sender sets a **flag** in the receiver's memory,
and the receiver waits for that flag *inside* its kernel.

You learn

- how to send a tile and then a signal, so that the tile arrives first;
- how to wait for a signal, and what the wait guarantees;
- why every wait in sundog ends.

```
python tutorials/02_signal_and_wait.py
```
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal

# %%
# ## Order is not automatic
#
# A tile store is made by all the warps of a program. A flag is set by one thread. Neither the
# compiler nor the GPU promises that the tile arrives before the flag. `signal.signal` does:
#
# 1. It runs a barrier inside the program, so that the stores of *all* warps come before the flag.
# 2. It sets the flag by an atomic with `release` semantics at system scope, so that *another GPU*
#    that sees the flag also sees the stores.
#
# `signal.wait` is the other half: a loop around an atomic with `acquire` semantics. Everything that
# the sender did before its signal is visible after the wait. [The memory
# model](../memory_model.md) states these rules in full, and the checker enforces them.
#
# ## The kernel
#
# `flag` is a symmetric tensor too, made by `world.signals`. A flag is stored on the rank that
# *waits* for it, so polling stays local; the sender writes it across the link.


@triton.jit
def send_kernel(x, inbox, out, flag, ctx, n, BLOCK: tl.constexpr):
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n

    memory.store(inbox + offsets, tl.load(x + offsets, mask=mask), right, ctx, mask=mask)
    # Orders the store above before the flag. The right neighbour waits for this flag.
    signal.signal(flag, right, 1, ctx)

    # Orders the left neighbour's store before the load below.
    signal.wait(flag, left, 1, ctx)
    received = tl.load(inbox + offsets, mask=mask)
    tl.store(out + offsets, 2 * received, mask=mask)


# %%
# `signal.put_signal(dst, src, flag, peer, epoch, ctx)` does the copy and the signal in one call.
#
# ## Every wait ends
#
# If the left neighbour never signals, this kernel does not hang. A wait polls a bounded number of
# times (`SUNDOG_TIMEOUT`, 60 seconds by default). If it expires, the kernel leaves a record, and
# the next call on the host raises `WaitTimeout` with the flag, the expected value, the value seen,
# and the rank that owes the signal. On the simulator nothing is timed: when no program can run any
# more, you get a `Deadlock` with a report of who waits for whom.


def main(world: sundog.World, n: int = 1000) -> torch.Tensor:
    torch.manual_seed(world.rank)
    x = torch.randn(n, device=world.device)
    inbox = world.empty((n,), name="inbox")
    flag = world.signals(1, "flag")  # one int64 word, zero at first
    out = torch.empty(n, device=world.device)
    world.barrier()  # every rank has its inbox and its flag

    send_kernel[(1,)](x, inbox, out, flag, world.ctx, n, BLOCK=triton.next_power_of_2(n))

    # %%
    # ## Comparison with torch
    #
    # There is no barrier after the launch. `out` belongs to this rank alone, and this rank's
    # kernel ended only after it had received everything. `out.cpu()` waits for that kernel.

    left = world.exchange(x.cpu())[world.rank - 1]
    assert torch.equal(out.cpu(), 2 * left), f"rank {world.rank}: out is wrong"
    if world.rank == 0:
        print(f"{world.size} ranks: each doubled the left neighbour's {n} floats as they arrived")
    return out


# %%
# ## What is missing
#
# This kernel works once. Launch it a second time and the flag is 1 already, so the wait returns
# at once and the kernel may read old data. The next tutorial repairs this with epochs.

if __name__ == "__main__":
    sundog.run(main, world_size=4)
