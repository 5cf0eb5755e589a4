"""Every rank sends its tensor to its right neighbour, again and again, through one small buffer.

Shows the three patterns of docs/memory_model.md in one kernel: produce then signal, wait then
consume, and reuse of a buffer (a done flag travels back, so the next call may overwrite it).

    python examples/ring.py                              # 8 ranks, on the simulator
    torchrun --nproc-per-node 4 examples/ring.py         # 4 processes
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, signal


@triton.jit
def ring_kernel(x, inbox, out, ready, done, epochs, ctx, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    epoch = tl.load(epochs + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    # The right neighbour has read what it got with the last epoch: its inbox may be overwritten.
    signal.wait(done + program, right, epoch - 1, ctx)
    # Orders the tile before the flag, for which the right neighbour waits.
    signal.put_signal(inbox + at, x + at, ready + program, right, epoch, ctx, mask=at < n)
    # The left neighbour's tile is in my inbox.
    signal.wait(ready + program, left, epoch, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)
    # Orders my load before the left neighbour's next store.
    signal.signal(done + program, left, epoch, ctx)
    tl.store(epochs + program, epoch)  # read by the next launch on this stream


def main(world: sundog.World, n: int = 1000, calls: int = 3) -> torch.Tensor:
    programs = 4
    torch.manual_seed(42 + world.rank)
    x = world.randn((calls, n), name="x")
    inbox = world.empty((n,), name="inbox")
    out = torch.empty((calls, n), device=world.device)
    ready, done, epochs = (world.signals(programs, name) for name in ("ready", "done", "epochs"))
    world.barrier()  # all have allocated: peers may be touched
    for call in range(calls):  # back to back, nothing in between
        ring_kernel[(programs,)](
            x[call], inbox, out[call], ready, done, epochs, world.ctx, n,
            BLOCK=triton.next_power_of_2(triton.cdiv(n, programs)),
        )  # fmt: skip
    left = world.exchange(x.cpu())[world.rank - 1]
    assert torch.equal(out.cpu(), left), f"rank {world.rank} got something else than its left sent"
    if world.rank == 0:
        print(f"{world.size} ranks passed {n} floats to the right, {calls} times: all arrived")
    return out


if __name__ == "__main__":
    if "RANK" in os.environ:
        with sundog.init() as world:
            main(world)
    else:
        sundog.run(main, world_size=8)
