"""`sundog predict OP`: print and draw how long its algorithms should take, on several machines.

A function of a file, or an op with --simulate, is simulated instead (simulated.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ...hardware.description import Hardware, known, read
from ...ops.load import algorithms, changed, value
from ...ops.op import BY_REQUEST
from ...predict.expected import MODELS, time
from ...predict.parts import Ranks, Time
from ...report.page import write_page
from .._console import FINE, command, picture, write_json
from .._options import PredictOptions
from .simulated import check_reduction, report, told_fields


@command("predict")
def run(options: PredictOptions) -> int:
    if options.world < 1 or not 0 <= options.late < float("inf"):
        raise ValueError("--world must be at least 1, and --late at least 0")
    if options.sms < 0:
        raise ValueError(f"--sms must be at least 0 (all that a rank can have), got {options.sms}")
    if not options.machine:
        raise ValueError(f"--machine is missing: give one of {', '.join(known())}, or a file.json")
    if _is_simulated(options):
        if options.plot or options.compare or options.axis:
            raise ValueError("--plot, --compare and --axis are for models, not for a simulation")
        report(options)
        return FINE
    if options.timeline or options.sms or options.data is not None:
        raise ValueError("--timeline, --sms and --data are for a simulation: add --simulate")
    first = next(iter(algorithms(options.op).values())).cases(options.world)[0]
    fields = told_fields(first, options.problem)
    axis = parse_axis(options.axis or usual_axis(first))
    asked = Asked(options.op, options.world, fields, axis, options.late * 1e-6)
    found = [points(asked, read(name)) for name in options.machine.split(",")]
    console = Console(emoji=False)
    for each in found:
        console.print(_table(asked, each))
        console.print(f"last row: {each[-1].problem}", highlight=False, markup=False)
        for line in crossings(each):
            console.print(line, highlight=False)
    if options.compare:
        console.print(_parts_table(asked, [each[-1] for each in found]))
    content = [_plain(point) for each in found for point in each]
    if options.json:
        write_json(options.json, content)
    write_page(options.html, content, options.op)
    if options.plot:
        _draw(options.plot, asked, found)
    return FINE


def _is_simulated(options: PredictOptions) -> bool:
    """Return whether the target is simulated: a function has no model."""
    return options.simulate or ":" in options.op or options.op.endswith(".py")


def _table(asked: Asked, found: Sequence[Point]) -> Table:
    """Print a row per value, a column per algorithm; the fastest is marked."""
    names = list(dict.fromkeys(algo for point in found for algo in point.times))
    title = f"{asked.op}, {asked.size} ranks on {found[0].hardware.name}: {found[0].hardware.title}"
    table = Table(asked.axis[0], *names, title=title, caption="us, and what bounds it; * fastest")
    for point in found:
        cells = []
        for name in names:
            made = point.times.get(name)
            mark = "*" if name == point.best else ""
            cells.append("" if made is None else f"{1e6 * made.seconds:.1f}{mark} {made.bound}")
        table.add_row(str(point.at), *cells)
    return table


def _parts_table(asked: Asked, found: Sequence[Point]) -> Table:
    """Show why one machine is faster: the parts of the fastest algorithm's time on each."""
    title = f"{asked.op}, {asked.axis[0]}={found[0].at}: of what the fastest one's time is made, us"
    heads = [f"{point.hardware.name}: {point.best}" for point in found]
    table = Table("part", *heads, title=title)
    sums: list[dict[str, float]] = []
    for point in found:
        parts: dict[str, float] = {}
        for part in point.times[point.best].parts:
            name = f"{part.name} ({part.bound})"
            parts[name] = parts.get(name, 0.0) + part.seconds
        sums.append(parts)
    for name in dict.fromkeys(name for parts in sums for name in parts):
        table.add_row(
            name, *(f"{1e6 * parts[name]:.1f}" if name in parts else "" for parts in sums)
        )
    table.add_row("all", *(f"{1e6 * point.times[point.best].seconds:.1f}" for point in found))
    return table


def _plain(point: Point) -> dict[str, object]:
    return {
        "machine": point.hardware.name,
        "problem": str(point.problem),
        "best": point.best,
        "times": {
            algo: {"seconds": made.seconds, "bound": made.bound, "parts": [*map(list, made.parts)]}
            for algo, made in point.times.items()
        },
    }


def _draw(path: str, asked: Asked, found: Sequence[Sequence[Point]]) -> None:
    name, values = asked.axis
    are_sizes = all(isinstance(at, int) and at > 0 for at in values)  # or dtypes, or with a 0
    algos = sorted({algo for each in found for point in each for algo in point.times})
    with picture(path, figsize=(7, 4.8)) as (_, [[axes]]):
        for each, style in zip(found, ("-", "--", ":", "-.") * len(found), strict=False):
            for color, algo in enumerate(algos):  # an algorithm has its color on all machines
                there = [point for point in each if algo in point.times]
                micros = [1e6 * point.times[algo].seconds for point in there]
                label = f"{algo}, {each[0].hardware.name}" if there else None
                at = [point.at if are_sizes else values.index(point.at) for point in there]
                axes.plot(at, micros, style, marker=".", color=f"C{color}", label=label)
        axes.set(yscale="log", xlabel=name, ylabel="expected, us")
        if are_sizes:
            axes.set(xscale="log")
        else:
            axes.set_xticks(range(len(values)), [str(at) for at in values])
        axes.set_title(f"{asked.op}, {asked.size} ranks")
        axes.legend(fontsize=7)


# the algorithms' expected times, over one axis of the problem


@dataclass(frozen=True)
class Asked:
    """An op, and the machines and problems that it is predicted for."""

    op: str
    size: int  # ranks
    problem: dict[str, Any]  # fields that differ from the op's first case
    axis: tuple[str, list[Any]]  # a field of the problem and its values
    late_s: float = 0.0


@dataclass(frozen=True)
class Point:
    """All algorithms of an op on one machine and problem, the fastest first."""

    hardware: Hardware
    problem: Any
    at: Any  # of the axis
    times: dict[str, Time]

    @property
    def best(self) -> str:
        return next(iter(self.times))


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """'numel=1024,65536' as a name and values; '1024..1048576' is every power of two between."""
    name, equals, words = text.partition("=")
    if not (name and equals and words):
        raise ValueError(f"--axis {text!r}: expected NAME=v1,v2,... or NAME=first..last")
    first, dots, last = words.partition("..")
    if not dots:
        return name, [value(word) for word in words.split(",")]
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError(f"--axis {text!r}: expected two numbers, the smaller one first")
    values = []
    at = int(first)
    while at <= int(last):
        values.append(at)
        at *= 2
    return name, values


def usual_axis(first: Any) -> str:
    """Return the default axis: sizes of the tensors that all ranks can share."""
    size = first.size
    usual = {
        "numel": "1024..16777216",
        "m": f"{8 * size}..{2048 * size}",
        "tokens": "1..8192",
        "max_tokens": "1..4096",
    }
    for name, values in usual.items():
        if hasattr(first, name):
            return f"{name}={values}"
    raise ValueError(f"--axis is missing: give a field of {first} and its values")


def points(asked: Asked, hardware: Hardware) -> list[Point]:
    """Return one point per value of the axis."""
    modules = algorithms(asked.op)
    name = asked.op.partition(".")[0]
    known = {a: m for a, m in modules.items() if f"{name}.{a}" in MODELS}
    if not known:
        raise ValueError(f"{asked.op} has no time model; those that have: {', '.join(MODELS)}")
    if len(known) > 1:
        known = {a: m for a, m in known.items() if f"{name}.{a}" not in BY_REQUEST}
    ranks = Ranks.on(hardware, asked.size)
    found = []
    for at in asked.axis[1]:
        times, refused = {}, {}
        for algo, module in known.items():
            fields = {**asked.problem, asked.axis[0]: at}
            problem = changed(module.cases(asked.size)[0], fields)
            check_reduction(name, problem)
            config = module.default(problem, ranks.num_sms)
            refused[algo] = module.valid(problem, config)
            if refused[algo] is None:
                op = f"{name}.{algo}"
                times[algo] = time(op, problem, config, hardware, ranks.num_sms, asked.late_s)
        if not times:
            why = "; ".join(f"{algo}: {reason}" for algo, reason in refused.items())
            raise ValueError(f"{asked.op}: no algorithm takes {asked.axis[0]}={at}: {why}")
        ordered = dict(sorted(times.items(), key=lambda item: item[1].seconds))
        found.append(Point(hardware, problem, at, ordered))
    return found


def crossings(found: Sequence[Point]) -> list[str]:
    """Return sentences that say where another algorithm becomes the fastest."""
    lines = []
    for before, after in itertools.pairwise(found):
        if before.best != after.best:
            lines.append(
                f"{after.hardware.name}: {before.best} is the fastest up to {before.at}, "
                f"{after.best} from {after.at} on"
            )
    return lines
