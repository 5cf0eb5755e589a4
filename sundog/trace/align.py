"""Ranks' clocks on one scale. Ranks on one GPU, or in one simulator, read the same clock.

Otherwise all ranks meet in device barriers and look at their clocks behind each: nobody leaves a
barrier before everybody has come, so the clocks' differences there are their shift, give or take
the time that a signal travels. The median of several meetings is taken out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import signal
from ..device.trace import now
from ..world import World

__all__ = ["shift"]

_MEETINGS = 32


def shift(world: World) -> tuple[int, str]:
    """What to subtract from this rank's times, and in words how they were aligned."""
    place = world.backend
    if world.device.type == "cuda":
        place = str(torch.cuda.get_device_properties(world.device).uuid)
    if world.backend != "shm" and len(set(world.exchange(place, "clocks"))) == 1:
        return 0, "all ranks read one clock"
    everyone = torch.tensor(world.exchange(_meet(world), "clocks"))
    difference = everyone[world.rank] - everyone[0]
    spread = int(difference.max() - difference.min())
    text = f"shifted by the median of {_MEETINGS} device barriers; those of rank {world.rank} "
    return int(difference.median()), f"{text}differ by up to {spread}"


@triton.jit
def _meet_kernel(
    flags, times, ctx, MEETINGS: tl.constexpr, LANES: tl.constexpr, TRACE: tl.constexpr
):
    for epoch in range(1, MEETINGS + 1):
        signal.barrier_ranks(flags, epoch, ctx, LANES)  # orders nothing but the clocks' readings
        tl.store(times + epoch - 1, now(TRACE))


def _meet(world: World) -> list[int]:
    flags = world.signals(world.size, "trace.meet")
    times = torch.zeros(_MEETINGS, dtype=torch.int64, device=world.device)
    world.barrier()  # everybody's flags are zero
    lanes = triton.next_power_of_2(world.size)
    _meet_kernel[(1,)](flags, times, world.ctx, MEETINGS=_MEETINGS, LANES=lanes, TRACE=world.trace)
    world.barrier()
    world.free(flags)
    return list(times.tolist())
