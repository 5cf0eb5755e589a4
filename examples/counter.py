"""A shared ticket counter on rank 0: every program of every rank draws tickets from it.

Shows atomics on a peer's memory, and a barrier between the programs of a rank.

    python examples/counter.py
    torchrun --nproc-per-node 4 examples/counter.py
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import memory, signal


@triton.jit
def draw_kernel(counter, tickets, total, arrived, ctx, TICKETS: tl.constexpr):
    program = tl.program_id(0)
    at = tl.arange(0, TICKETS)
    # One lane per ticket. Relaxed is enough: a ticket is only a number and publishes nothing.
    drawn = memory.atomic_add(counter + at * 0, at * 0 + 1, 0, ctx, sem="relaxed")
    tl.store(tickets + program * TICKETS + at, drawn)
    # Orders the tickets of all programs of this rank before program 0's sum below.
    signal.barrier_programs(arrived, ctx)
    if program == 0:
        everything = tl.full((), 0, tl.int64)
        for other in range(tl.num_programs(0)):
            everything += tl.sum(tl.load(tickets + other * TICKETS + at), 0)
        tl.store(total, everything)


def main(world: sundog.World) -> torch.Tensor:
    programs, each = min(3, world.num_sms), 4  # they wait for each other: all must be resident
    counter = world.zeros(1, torch.int64, "counter")
    arrived = world.signals(1, "arrived")
    tickets = torch.empty((programs, each), dtype=torch.int64, device=world.device)
    total = torch.empty((1,), dtype=torch.int64, device=world.device)
    world.barrier()  # rank 0's counter is there
    draw_kernel[(programs,)](counter, tickets, total, arrived, world.ctx, TICKETS=each)
    drawn = torch.cat([t.flatten() for t in world.exchange(tickets.cpu())])
    assert drawn.sort().values.tolist() == list(range(world.size * programs * each))
    assert total.item() == tickets.sum().item()
    world.barrier()  # all have drawn: rank 0 may look
    assert counter.item() == (0 if world.rank else drawn.numel())
    if world.rank == 0:
        print(f"{world.size} ranks drew {drawn.numel()} tickets: each number once")
    return tickets


if __name__ == "__main__":
    if "RANK" in os.environ:
        with sundog.init() as world:
            main(world)
    else:
        sundog.run(main, world_size=8)
