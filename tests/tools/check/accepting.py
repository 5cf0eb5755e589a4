"""A kernel with one barrier that is not needed, and a list that accepts the mutant without it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sundog import World
from sundog.device import context, memory, signal

ACCEPT = {"send: tl.debug_barrier(): dropped #2": "the kernel ends here: nothing is left to order"}


@triton.jit
def send(x, inbox, out, flag, ctx, BLOCK: tl.constexpr):
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    at = tl.arange(0, BLOCK)
    right = (rank + 1) % size
    memory.store(inbox + at, tl.load(x + at), right, ctx)
    tl.debug_barrier()  # my tile, before the signal that my neighbour waits for
    tl.atomic_xchg(memory.translate(flag, right, ctx), 1, sem="release", scope="sys")
    signal.wait(flag, (rank + size - 1) % size, 1, ctx)  # my neighbour's tile
    tl.store(out + at, tl.load(inbox + at))
    tl.debug_barrier()  # orders nothing


def main(world: World) -> None:
    x, inbox = world.empty((64,), name="x"), world.empty((64,), name="inbox")
    out = torch.empty(64)
    flag = world.signals(1, "flag")
    x.fill_(world.rank)
    world.barrier()
    send[(1,)](x, inbox, out, flag, world.ctx, BLOCK=64)
    assert (out == (world.rank - 1) % world.size).all()
