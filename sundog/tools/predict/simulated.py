"""`sundog predict TARGET.py:fn`: simulate a function, and print the parts of its time.

A timeline is for ui.perfetto.dev: ranks are processes, programs are tracks.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ... import knobs
from ...backends.sim import simulate
from ...collectives import _reduce
from ...hardware.description import Hardware, read
from ...ops.load import changed, parse
from ...predict.clock import BOUNDS, Track
from ...predict.parts import Ranks
from ...world.world import World
from .._console import write_json
from .._options import PredictOptions
from .._subject import function_of, resolve, room
from .timed_machine import TimedMachine


class Launched(NamedTuple):
    """One launch on all ranks that made it, in seconds from the start of the first."""

    name: str
    begin: float
    end: float


class Step(NamedTuple):
    """A piece of the critical path: a program that works, or a flag in flight."""

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
    """The times of a run on the described machine."""

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
        """The parts of the critical path."""
        found = dict.fromkeys(BOUNDS, 0.0)
        for step in self.path:
            for bound, seconds in step.bounds.items():
                found[bound] += seconds
        return found


def simulated(subject: Simulation) -> Simulated:
    """Run a rank's function on all ranks. Raises what a rank or a kernel raises."""
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
        world.barrier()  # all ranks have planned, so they start at the same time
        plan(*given, out)
        world.synchronize()
        plan.free()

    return run


def _kernels(machine: TimedMachine, start: float) -> list[Launched]:
    """Return launches in the order of time. Those of one kernel on several ranks are one."""
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
    """Go back from the last end, each time to what wrote the flag or freed the SM waited for."""
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


_HEAP = 1 << 30
_MICRO = 1e6
_STEPS = 24  # of the critical path, the longest ones


def report(options: PredictOptions) -> None:
    """Simulate on each machine, print tables, write files."""
    console, rows = Console(emoji=False), []
    subjects = _subjects(options)
    if options.timeline and len(subjects) > 1:
        raise ValueError(
            f"--timeline: a file has one simulation, and these are {len(subjects)}: "
            "name one machine, and one algorithm of an op"
        )
    for what, name, subject in subjects:
        made = simulated(subject)
        _print(console, f"{what}, {options.world} ranks on {name}", made, options)
        rows.append({"target": what, "machine": name, **_plain(made)})
        if options.timeline:
            about = {"target": what, "machine": name, "time": "expected, not measured"}
            write_timeline(made.tracks, options.timeline, about)
    if options.json:
        write_json(options.json, rows)


def _subjects(options: PredictOptions) -> list[tuple[str, str, Simulation]]:
    """Return what to simulate on each machine: the target's name, the machine's, and how."""
    found = []
    for name in options.machine.split(","):
        hardware = read(name)
        num_sms, most = Ranks.on(hardware, options.world, options.sms).num_sms, hardware.gpu.num_sms
        if num_sms > most:
            raise ValueError(
                f"--sms {num_sms}: {num_sms} SMs per rank, and a GPU of {name} has {most}"
            )
        for what, function in _functions(options, num_sms).items():
            subject = Simulation(
                function, hardware, options.world, knobs.heap_size.get() or _HEAP, num_sms,
                {options.world - 1: options.late * 1e-6}, _with_data(options),
            )  # fmt: skip
            found.append((what, name, subject))
    return found


def _with_data(options: PredictOptions) -> bool:
    return not resolve(options.op).algorithms if options.data is None else options.data


def check_reduction(op: str, problem: Any) -> None:
    """Raise ValueError, as the op would, for a dtype that it does not reduce.

    Complex numbers are reduced as two.
    """
    if hasattr(problem, "op") and not problem.dtype.is_complex:
        _reduce.check(op, problem.op, problem.dtype)


def told_fields(first: Any, text: str) -> dict[str, Any]:
    """Return the fields of a problem that `text` tells; bfloat16 where the op takes it."""
    fields = parse(text)
    is_fp8 = getattr(first, "dtype", None) in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if hasattr(first, "dtype") and not is_fp8:
        fields.setdefault("dtype", torch.bfloat16)
    return fields


def _functions(options: PredictOptions, num_sms: int) -> dict[str, Callable[[World], Any]]:
    """Return a function itself, or a call of each algorithm of an op with its default config."""
    resolved = resolve(options.op)
    if not resolved.algorithms:
        return {options.op: function_of(options.op, options.world)}
    found: dict[str, Callable[[World], Any]] = {}
    for algorithm in resolved.algorithms:
        first = algorithm.module.cases(options.world)[0]
        problem = changed(first, told_fields(first, options.problem))
        check_reduction(algorithm.name, problem)
        config = algorithm.module.default(problem, num_sms)
        if algorithm.module.valid(problem, config) is None:
            found[f"{algorithm.name} {problem}"] = call_of(algorithm.module, problem, config)
    if not found:
        raise ValueError(f"{options.op}: no algorithm takes {options.problem!r}")
    return found


def _print(console: Console, title: str, made: Simulated, options: PredictOptions) -> None:
    how = "with" if _with_data(options) else "without"
    console.print(
        escape(
            f"{title}: {1e6 * made.seconds:.1f} us expected. Simulated {how} the data of tiles of "
            f"floats, in {made.wall_s:.0f} s; nothing is extrapolated. What torch computes or "
            "copies, such as the product of an algorithm with cuBLAS, takes no time here."
        ),
        highlight=False,
        soft_wrap=True,
    )
    kernels = Table("kernel", "begins, us", "ends, us")
    for kernel in made.kernels:
        kernels.add_row(kernel.name, f"{1e6 * kernel.begin:.1f}", f"{1e6 * kernel.end:.1f}")
    console.print(kernels)
    console.print(_path_table(made), _waits_table(made))


def _path_table(made: Simulated) -> Table:
    """Print the longest steps, in the order of time."""
    longest = sorted(made.path, key=lambda step: step.begin - step.end)[:_STEPS]
    left = len(made.path) - len(longest)
    sums = ", ".join(f"{b} {1e6 * s:.1f}" for b, s in made.bounds.items() if s > 0)
    table = Table("from, us", "takes, us", "what", "of which", title="critical path")
    for step in sorted(longest, key=lambda each: each.begin):
        parts = ", ".join(f"{b} {1e6 * s:.1f}" for b, s in step.bounds.items() if s >= 5e-8)
        takes = f"{1e6 * (step.end - step.begin):.1f}"
        table.add_row(f"{1e6 * step.begin:.1f}", takes, step.what, parts)
    table.caption = f"all: {sums} us" + (f"; {left} shorter steps are not shown" if left else "")
    return table


def _waits_table(made: Simulated) -> Table:
    """Print the part of its programs' time that each rank waited, and for whom most."""
    table = Table("rank", "waited", "most of it for", title="waits, of program time")
    for rank, busy in sorted(made.busy.items()):
        waited = made.waited.get(rank, {})
        most = max(waited, key=lambda peer: waited[peer], default=None)
        for_whom = "" if most is None else "itself" if most == rank else f"rank {most}"
        table.add_row(str(rank), f"{100 * sum(waited.values()) / busy:.0f} %", for_whom)
    return table


def _plain(made: Simulated) -> dict[str, Any]:
    return {
        "seconds": made.seconds, "bounds": made.bounds,
        "kernels": [kernel._asdict() for kernel in made.kernels],
        "path": [step._asdict() for step in made.path],
        "waited": made.waited, "busy": made.busy, "simulation_s": made.wall_s,
        "num_sms": made.ranks.num_sms, "hardware": dataclasses.asdict(made.ranks.hardware)["name"],
    }  # fmt: skip


def write_timeline(tracks: Sequence[Track], path: str, about: dict[str, Any]) -> None:
    """Write a slice per span, and a flow from each write to the wait that it ended."""
    with Path(path).open("w") as file:
        file.write('{"otherData": ' + json.dumps(about) + ', "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in _events(tracks)))
        file.write("\n]}\n")


def _events(tracks: Sequence[Track]) -> Iterator[dict[str, Any]]:
    for rank in sorted({track.rank for track in tracks}):
        name = {"name": f"rank {rank}"}
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": name}
    flow = 0
    for track in tracks:
        at = {"pid": track.rank, "tid": track.program}
        for span in track.spans:
            yield {
                "ph": "X", "name": span.name, **at, "ts": span.begin * _MICRO,
                "dur": (span.end - span.begin) * _MICRO,
                "args": {"kernel": track.kernel, "what": span.detail},
            }  # fmt: skip
        for wait in track.waits:
            flow += 1
            both = {"id": flow, "cat": "signal", "name": "signal"}
            source = {"pid": wait.cause.rank, "tid": wait.cause.program}
            yield {"ph": "s", **both, **source, "ts": wait.written * _MICRO}
            yield {"ph": "f", "bp": "e", **both, **at, "ts": wait.end * _MICRO}
