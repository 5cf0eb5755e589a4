"""# 7. Capture and replay

Launching a kernel from Python takes microseconds, often more than the kernel itself. A **CUDA
graph** records launches once and replays them without Python. This tutorial captures a kernel that
talks to other ranks, replays it with new data, and shows the mistake that breaks most attempts.

You learn

- how to capture and replay with `world.capture()`;
- what is frozen in a graph, and what is not;
- how `sundog probe` finds out whether a function may be captured.

```
python tutorials/07_capture_and_replay.py
```
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, signal

# %%
# ## What a graph freezes
#
# A graph keeps the kernels, their grids, and their arguments: pointers and numbers. A replay
# launches exactly these again. *Memory* is not frozen: a kernel that reads a tensor reads what
# the tensor holds at the time of the replay.
#
# So everything that changes from call to call must be in memory. The usual mistake is the epoch of
# a flag. Here `epoch` comes either from device memory, which is correct, or from the host as an
# argument, which is not.


@triton.jit
def exchange(x, inbox, out, ready, done, epoch, ctx, n, BLOCK: tl.constexpr):
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    # The right neighbour has read the tile of the previous call: its inbox may be overwritten.
    signal.wait(done, right, epoch - 1, ctx)
    # The tile comes before the flag. The right neighbour waits for it in the next line.
    signal.put_signal(inbox + offsets, x + offsets, ready, right, epoch, ctx, mask=mask)
    # The left neighbour's tile comes before the load below.
    signal.wait(ready, left, epoch, ctx)
    tl.store(out + offsets, tl.load(inbox + offsets, mask=mask), mask=mask)
    # My load comes before the left neighbour's next store into my inbox.
    signal.signal(done, left, epoch, ctx)


@triton.jit
def right_kernel(x, inbox, out, ready, done, epochs, ctx, n, BLOCK: tl.constexpr):
    epoch = tl.load(epochs) + 1  # every replay loads it again
    exchange(x, inbox, out, ready, done, epoch, ctx, n, BLOCK)
    tl.store(epochs, epoch)  # the next launch on this stream reads it


@triton.jit
def frozen_kernel(x, inbox, out, ready, done, epoch, ctx, n, BLOCK: tl.constexpr):
    exchange(x, inbox, out, ready, done, epoch, ctx, n, BLOCK)


# %%
# ## Two versions
#
# Both classes allocate in the constructor and only launch when they are called. Without a graph
# both are correct.


class Shift:
    """Give `x` to the right neighbour and return what the left neighbour gave."""

    def __init__(self, world: sundog.World, n: int) -> None:
        self.world, self.n = world, n
        self.inbox = world.empty((n,), name="inbox")
        self.out = torch.empty(n, device=world.device)
        self.ready, self.done = world.signals(1, "ready"), world.signals(1, "done")
        self.epochs = world.signals(1, "epochs")
        self.calls = 0
        world.barrier()  # every rank has its inbox, and flags that are zero

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        block = triton.next_power_of_2(self.n)
        right_kernel[(1,)](
            x, self.inbox, self.out, self.ready, self.done, self.epochs,
            self.world.ctx, self.n, BLOCK=block,
        )  # fmt: skip
        return self.out


class FrozenShift(Shift):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # a number of the host: the graph keeps the one it was captured with
        block = triton.next_power_of_2(self.n)
        frozen_kernel[(1,)](
            x, self.inbox, self.out, self.ready, self.done, self.calls,
            self.world.ctx, self.n, BLOCK=block,
        )  # fmt: skip
        return self.out


# %%
# ## Capture, replay, compare with torch
#
# Call the function once before the capture, so that its kernels are compiled and loaded. Nothing
# runs inside the `with` block. Every rank captures its own graph, and replays it in the same
# order as the other ranks.


def main(world: sundog.World, n: int = 200, replays: int = 5) -> torch.Tensor:
    shift = Shift(world, n)
    x = torch.zeros(n, device=world.device)
    shift(x)  # compiles and loads the kernel
    with world.capture() as graph:
        out = shift(x)
    for replay in range(replays):
        x.copy_(torch.randn(n, generator=torch.Generator().manual_seed(10 * replay + world.rank)))
        graph.replay()
        left = world.exchange(x.cpu())[world.rank - 1]
        assert torch.equal(out.cpu(), left), f"rank {world.rank}, replay {replay}: stale data"
    graph.free()
    if world.rank == 0:
        print(f"{world.size} ranks: {replays} replays with new data, each equal to torch")
    return out


# %%
# ## Let the probe judge
#
# `sundog.probe` captures a function and replays it in six situations: many replays in a row, two
# graphs in changing order, eager calls in between, a second stream, memory that others used, and
# late ranks. It needs a function that makes inputs and one that computes the expected result.


def make_inputs(world: sundog.World, seed: int) -> tuple[torch.Tensor]:
    generator = torch.Generator(world.device).manual_seed(100 * seed + world.rank)
    return (torch.randn(200, generator=generator, device=world.device),)


def reference(rank: int, x: list[torch.Tensor]) -> torch.Tensor:
    return x[rank - 1]


# %%
# The probe opens a fresh world for each situation and calls the function twice before it
# captures, so the first call of a world may allocate.


def verdict(kind: type[Shift]) -> str:
    shifts: dict[sundog.World, Shift] = {}

    def probed(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        if world not in shifts:
            shifts[world] = kind(world, 200)
        return shifts[world](x)

    row = sundog.probe(probed, make_inputs=make_inputs, reference=reference, world=2, replays=4)
    return row.verdict


if __name__ == "__main__":
    sundog.run(main, world_size=4)
    print("epoch in device memory:", verdict(Shift))
    print("epoch from the host:   ", verdict(FrozenShift))

# %%
# The frozen version is `WRONG`. The flags have already reached the epoch of its first replay, so
# this replay waits for nothing and reads whatever is in the inbox. [Graph capture](../capture.md)
# shows the other three ways in which a capture fails: the host takes part, a replay does not see
# new data, or nobody answers a wait.
