"""`sundog predict TARGET.py:fn`: simulate a function, and print what its time is made of.

A timeline is for ui.perfetto.dev: ranks are processes, programs are tracks.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ... import knobs
from ...hardware.description import read
from ...predict.clock import Track
from ...predict.parts import Ranks
from ...world.world import World
from .._console import write_json
from .._subject import function_of, problem_of, resolve
from .simulated import Simulated, Simulation, call_of, simulated

__all__ = ["SimulationOptions", "report", "write_timeline"]

_HEAP = 1 << 30
_MICRO = 1e6
_STEPS = 24  # of the critical path, the longest ones


@dataclass(frozen=True)
class SimulationOptions:
    target: str
    machine: str  # names or files, with commas
    problem: str = ""
    world: int = 8
    late: float = 0.0  # us, of the last rank
    sms: int = 0
    data: bool | None = None  # default: for a function, which may check its results
    json: str = ""
    timeline: str = ""


def report(options: SimulationOptions) -> None:
    """Simulate on each machine, print tables, write files."""
    console, rows = Console(), []
    for name in options.machine.split(","):
        hardware = read(name)
        num_sms = Ranks.on(hardware, options.world, options.sms).num_sms
        for what, function in _functions(options, num_sms).items():
            subject = Simulation(
                function, hardware, options.world, knobs.heap_size.get() or _HEAP, num_sms,
                {options.world - 1: options.late * 1e-6}, _with_data(options),
            )  # fmt: skip
            made = simulated(subject)
            _print(console, f"{what}, {options.world} ranks on {name}", made, options)
            rows.append({"target": what, "machine": name, **_plain(made)})
            if options.timeline:
                about = {"target": what, "machine": name, "time": "expected, not measured"}
                write_timeline(made.tracks, options.timeline, about)
    if options.json:
        write_json(options.json, rows)


def _with_data(options: SimulationOptions) -> bool:
    return not resolve(options.target).algorithms if options.data is None else options.data


def _functions(options: SimulationOptions, num_sms: int) -> dict[str, Callable[[World], Any]]:
    """A function as it is; of an op, one call of each algorithm with its default config."""
    resolved = resolve(options.target)
    if not resolved.algorithms:
        return {options.target: function_of(options.target, options.world)}
    found: dict[str, Callable[[World], Any]] = {}
    for algorithm in resolved.algorithms:
        problem = problem_of(algorithm.module, options.problem, options.world)
        config = algorithm.module.default(problem, num_sms)
        if algorithm.module.valid(problem, config) is None:
            found[f"{algorithm.name} {problem}"] = call_of(algorithm.module, problem, config)
    if not found:
        raise ValueError(f"{options.target}: no algorithm takes {options.problem!r}")
    return found


def _print(console: Console, title: str, made: Simulated, options: SimulationOptions) -> None:
    how = "with" if _with_data(options) else "without"
    console.print(
        escape(
            f"{title}: {1e6 * made.seconds:.1f} us expected. Simulated {how} the data of tiles of "
            f"floats, in {made.wall_s:.0f} s; nothing is extrapolated."
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
    """The longest steps, in the order of time."""
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
    """What part of its programs' time each rank waited, and for whom most."""
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
