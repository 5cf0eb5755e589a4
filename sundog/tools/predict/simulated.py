"""The time of any kernel on a machine that is described, by running it on the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from ...backends.sim import simulate
from ...hardware.description import Hardware
from ...predict.clock import BOUNDS, Track
from ...predict.parts import Ranks
from ...world.world import World
from .._subject import room
from .timed_machine import TimedMachine

__all__ = ["Launched", "Simulated", "Simulation", "Step", "call_of", "simulated"]


class Launched(NamedTuple):
    """One launch on all ranks that made it, in seconds from the start of the first."""

    name: str
    begin: float
    end: float


class Step(NamedTuple):
    """A piece of the critical path: a program that worked, or a flag on its way."""

    what: str
    begin: float
    end: float
    bounds: dict[str, float]


@dataclass(frozen=True)
class Simulation:
    """What is simulated, and how."""

    function: Callable[[World], Any]
    hardware: Hardware
    size: int
    heap_size: int
    num_sms: int = 0
    late: dict[int, float] | None = None  # seconds, by rank
    with_data: bool = False


@dataclass(frozen=True)
class Simulated:
    """What a run took on the machine that was described."""

    ranks: Ranks
    seconds: float
    kernels: list[Launched]
    path: list[Step]  # from the first start to the last end
    waited: dict[int, dict[int, float]]  # program time, by rank and by the rank waited for
    busy: dict[int, float]  # program time, by rank
    tracks: list[Track]
    wall_s: float  # of the simulation

    @property
    def bounds(self) -> dict[str, float]:
        """What the critical path consists of."""
        found = dict.fromkeys(BOUNDS, 0.0)
        for step in self.path:
            for bound, seconds in step.bounds.items():
                found[bound] += seconds
        return found


def simulated(subject: Simulation) -> Simulated:
    """Run a rank's function on all ranks; raises what a rank or a kernel raises."""
    ranks = Ranks.on(subject.hardware, subject.size, subject.num_sms)
    machine = TimedMachine(ranks, subject.late or {}, subject.with_data)
    began = time.monotonic()
    simulate(machine, subject.function, subject.size, subject.heap_size)
    if machine.failure is not None:
        raise machine.failure
    tracks = list(machine.tracks.values())
    if not tracks:
        raise ValueError("the function launched no kernel: there is nothing to predict")
    start = min(begin.asked for begin in machine.launches.values())
    last = max(tracks, key=lambda track: track.now)
    return Simulated(
        ranks, last.now - start, _kernels(machine, start), _path(last, start), _waited(tracks),
        _busy(tracks), tracks, time.monotonic() - began,
    )  # fmt: skip


def call_of(module: ModuleType, problem: Any, config: Any) -> Callable[[World], None]:
    """Return a rank's function that calls an op's algorithm once, all ranks starting together."""

    def run(world: World) -> None:
        plan = module.plan(world, problem, config or module.default(problem, world.num_sms))
        given = module.inputs(world, problem, 0)
        out = room(world, module, problem, given)
        world.barrier()  # all ranks have planned: they start at the same time
        plan(*given, out)
        world.synchronize()
        plan.free()

    return run


def _kernels(machine: TimedMachine, start: float) -> list[Launched]:
    """Launches in the order of time; the same kernel's of several ranks are one."""
    ends: dict[Any, float] = {}
    for program, track in machine.tracks.items():
        ends[program.launch] = max(ends.get(program.launch, 0.0), track.now)
    turns: dict[tuple[str, int], Launched] = {}
    counts: dict[tuple[str, int], int] = {}
    for launch, begin in machine.launches.items():
        turn = counts.get((launch.name, launch.rank), 0)
        counts[launch.name, launch.rank] = turn + 1
        first, last = begin.asked - start, ends[launch] - start
        known = turns.get((launch.name, turn), Launched(launch.name, first, last))
        turns[launch.name, turn] = Launched(
            launch.name, min(known.begin, first), max(known.end, last)
        )
    return sorted(turns.values(), key=lambda kernel: kernel.begin)


def _path(last: Track, start: float) -> list[Step]:
    """Go back from the last end: to who wrote the flag, or freed the SM, that was waited for."""
    steps: list[Step] = []
    track: Track | None = last
    at, sums = last.now, tuple(last.sums)
    while track is not None:
        wait = next((w for w in reversed(track.waits) if w.end <= at), None)
        begin = track.began if wait is None else wait.end
        before = (0.0,) * len(BOUNDS) if wait is None else wait.sums
        parts = {b: x - y for b, x, y in zip(BOUNDS, sums, before, strict=True) if x > y}
        name = f"rank {track.rank} program {track.program} of {track.kernel}"
        steps.append(Step(name, begin - start, at - start, parts))
        if wait is not None:
            way = {"latency": wait.end - wait.written}
            text = f"flag from rank {wait.cause.rank} to rank {track.rank}"
            steps.append(Step(text, wait.written - start, wait.end - start, way))
            track, at, sums = wait.cause, wait.written, wait.cause_sums
            continue
        free = start if track.before is None else track.before.now
        steps.append(
            Step("start", free - start, track.began - start, {"latency": track.began - free})
        )
        track = track.before
        at, sums = (0.0, ()) if track is None else (track.now, tuple(track.sums))
    return [step for step in reversed(steps) if step.end > step.begin]


def _waited(tracks: list[Track]) -> dict[int, dict[int, float]]:
    found: dict[int, dict[int, float]] = {}
    for track in tracks:
        own = found.setdefault(track.rank, {})
        for wait in track.waits:
            own[wait.cause.rank] = own.get(wait.cause.rank, 0.0) + wait.end - wait.begin
    return found


def _busy(tracks: list[Track]) -> dict[int, float]:
    found: dict[int, float] = {}
    for track in tracks:
        found[track.rank] = found.get(track.rank, 0.0) + track.now - track.began
    return found
