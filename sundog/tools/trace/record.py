"""Put ranks' clocks on one scale. Ranks on one GPU, or in one simulator, read the same clock.

Otherwise all ranks meet in device barriers and read their clocks after each. No rank leaves a
barrier before all have come, so the clocks' differences there are their shift, up to the time that
a signal travels. The median over several barriers is subtracted.

One rank's side of a trace: the buffer that its kernels write, and reading it back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ...device import context, signal
from ...device import trace as points
from ...device.trace import now
from ...errors import SundogError
from ...world.world import World
from ..timing import Gate

_MEETINGS = 32


def shift(world: World) -> tuple[int, str]:
    """Return what to subtract from this rank's times, and a text on how they were aligned."""
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
        signal.barrier_ranks(flags, epoch, ctx, LANES)  # only orders the readings of the clocks
        tl.store(times + epoch - 1, now(TRACE))


def _meet(world: World) -> list[int]:
    flags = world.signals(world.size, "trace.meet")
    times = torch.zeros(_MEETINGS, dtype=torch.int64, device=world.device)
    world.barrier()  # every rank's flags are zero
    lanes = triton.next_power_of_2(world.size)
    _meet_kernel[(1,)](
        flags, times, world.ctx, MEETINGS=_MEETINGS, LANES=lanes, TRACE=world.kernel_mode
    )
    world.barrier()
    world.free(flags)
    return list(times.tolist())


_WARM_CALLS = 3


@dataclass(frozen=True)
class Raw:
    """What one rank recorded. `words` has a row of EVENT_WORDS per event."""

    rank: int
    base: int  # an address that has the same place among the flags of every rank
    programs: np.ndarray  # of each event
    words: np.ndarray
    dropped: int  # events for which there was no room
    unit: str  # of time
    clock: str  # how ranks' clocks compare


class TraceRecording:
    """While it is open, ops of this world are compiled with their trace points."""

    def __init__(self, world: World, programs: int = 256, events: int = 1024) -> None:
        if not 1 <= programs <= points.MOST_PROGRAMS.value or events < 2:
            raise ValueError(
                f"a trace of {events} events for each of {programs} programs: at least 2 events, "
                f"and from 1 to {points.MOST_PROGRAMS.value} programs"
            )
        self._world, self._programs, self._events = world, programs, events
        slots = programs * events * points.EVENT_WORDS.value
        # Where flags are: on the device, even if this rank's data is not.
        self._buffer = world.signals(points.MOST_PROGRAMS.value + slots, "trace")
        distance = (self._buffer.data_ptr() - world.ctx.data_ptr()) // 8
        for word, value in (
            (context.TRACE_BUFFER, distance),
            (context.TRACE_PROGRAMS, programs),
            (context.TRACE_EVENTS, events),
        ):
            world.ctx[word.value] = value
        is_hip = world.device.type == "cuda" and torch.version.hip is not None
        self._world.kernel_mode |= (points.MEMREALTIME if is_hip else points.GLOBALTIMER).value
        self._shift, self._clock = shift(world)

    def reset(self) -> None:
        """Discard what was recorded so far."""
        self._buffer.zero_()

    def read(self) -> Raw:
        """Wait for the latest launch, and return what each program recorded."""
        world = self._world
        world.synchronize()
        words = self._buffer.cpu().numpy()
        most = points.MOST_PROGRAMS.value
        recorded, slots = words[:most], words[most:]
        counts = np.minimum(recorded[: self._programs], self._events)
        used = np.arange(self._events) < counts[:, None]
        events = slots.reshape(self._programs, self._events, -1)[used]
        programs = np.repeat(np.arange(self._programs), counts)
        events[:, 0] -= self._shift
        if world.kernel_mode & points.CLOCKS == points.MEMREALTIME.value:
            events[:, 0] *= 10
        dropped = int(recorded.sum() - counts.sum())
        unit = "ns" if world.device.type == "cuda" else "accesses"
        return Raw(
            world.rank, int(world.ctx.data_ptr()), programs, events, dropped, unit, self._clock
        )

    def close(self) -> None:
        self._world.kernel_mode &= ~points.CLOCKS
        self._world.free(self._buffer)


def record_call(world: World, launch: Callable[[], Any], programs: int, events: int) -> Raw:
    """Record one call, after others that compile and warm up. A collective on the host."""
    recording = TraceRecording(world, programs, events)
    start, done = _together(world)
    try:
        launch()  # compiles and loads, which must not follow a gate, where a kernel spins
        world.barrier()
        for _ in range(_WARM_CALLS if world.device.type == "cuda" else 0):
            start(launch)
        recording.reset()
        world.barrier()  # no rank records before all have reset
        start(launch)
        raw = recording.read()
        world.barrier()
    finally:
        done()
        recording.close()
    # Not on every rank, since one that plays a peer's part has its own kernel.
    if not any(world.exchange(len(raw.words) + raw.dropped, "events")):
        raise SundogError(
            "this op has no trace points: its kernels record nothing. sundog.device.trace says "
            "how to add them."
        )
    return raw


def _together(world: World) -> tuple[Callable[[Callable[[], Any]], Any], Callable[[], None]]:
    """Return a function that starts a launch on all ranks at once, and one that cleans up.

    On a GPU a rank's first kernel would otherwise wait for as long as the other hosts take to
    launch theirs (580 of 584 us of an all-gather); the simulator's time does not pass meanwhile.
    """
    if world.device.type != "cuda":
        return lambda launch: launch(), lambda: None
    gate = Gate(world)
    return gate.time, gate.free
