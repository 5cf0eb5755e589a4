"""`sundog trace OP`: run an op with its trace points on, write the file, print who waited."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ... import target
from ...launch import run as run_ranks
from ...ops.load import running
from ...ops.select import choose, config_for
from ...report.page import write_report
from ...report.sections import read_sections
from ...world.world import World
from .._console import (
    FINE,
    command,
    ensure_compiler_cache,
    write_json,
)
from .._options import TraceOptions
from .._subject import Algorithm, algorithms_of, problem_of, room
from ..timing import machine
from .record import Raw, record_call
from .timeline import Timeline, draw, summarise, write


@dataclass(frozen=True)
class TracedOp:
    """An op, or one of its algorithms, on one problem, as a call would run it.

    `name`: all_gather, all_gather.push or a module's path. `problem`: m=4096,... or "".
    """

    name: str
    problem: str = ""

    def call(self, world: World) -> tuple[str, Callable[[], Any]]:
        """Plan it. Return a title, and one call on random inputs. A collective on the host."""
        algorithms = algorithms_of(self.name)
        problem = self._problem(algorithms[0], world.size)
        algorithm, config = _choose(world, algorithms, problem)
        module = algorithm.module
        plan = module.plan(world, problem, config)
        inputs = module.inputs(world, problem, 0)
        out = room(world, module, problem, inputs)
        world.barrier()
        return f"{algorithm.name} {_text(problem)}", lambda: plan(*inputs, out)

    def _problem(self, algorithm: Algorithm, size: int) -> Any:
        """Return the requested problem, or the largest of the op's cases."""
        module = algorithm.module
        if self.problem:
            return problem_of(module, self.problem, size)
        return max(module.cases(size), key=lambda each: module.cost(each).hbm_bytes)


def _choose(world: World, algorithms: tuple[Algorithm, ...], problem: Any) -> tuple[Algorithm, Any]:
    """Return the only algorithm, or the one that a call would choose here, and its config."""
    kind = target.key_of(world.device)
    first = algorithms[0]
    if len(algorithms) == 1:
        return first, config_for(first.name, first.module, problem, kind, world.num_sms)
    op = first.name.partition(".")[0]
    choice = choose(op, problem, kind, world.num_sms, backend=world.backend)
    return next(each for each in algorithms if each.algo == choice.algo), choice.config


def _text(problem: Any) -> str:
    """Return its fields as text, without the world's size and default values."""
    shown = [
        f"{field.name}={getattr(problem, field.name)}".replace("torch.", "")
        for field in dataclasses.fields(problem)
        if field.name != "size" and getattr(problem, field.name) != field.default
    ]
    return ",".join(shown)


@command("trace")
def run(options: TraceOptions) -> int:
    if target.has_gpu():
        ensure_compiler_cache()
    timeline = trace_op(options)
    write(timeline, options.out)
    if options.plot:
        # The slowest rank, or over a link rank 0, the only one measured.
        slowest = max(summarise(timeline), key=lambda each: each.length).rank
        draw(timeline, options.plot, 0 if options.link else slowest)
    _print(timeline, options.out)
    if options.json:
        write_json(options.json, _summary_json(timeline))
    if options.html:
        write_report(options.html, read_sections(options.out))
    return FINE


def trace_op(options: TraceOptions) -> Timeline:
    """Record the timeline of one call."""
    op = TracedOp(options.op, options.problem)

    def main(world: World) -> tuple[str, Raw]:
        title, call = op.call(world)
        over = f" over {options.link}" if options.link else ""
        where = f"{world.size} ranks on {world.backend}{over}"
        return f"{title}, {where}", record_call(world, call, options.programs, options.events)

    with running("the traced call"):
        found = run_ranks(main, options.world, options.backend, link=options.link)
    return Timeline.of([raw for _, raw in found], found[0][0])


def _print(timeline: Timeline, path: str) -> None:
    console = Console(emoji=False)
    table = Table("rank", f"length, {timeline.unit}", "waited", "most for", "hidden")
    for each in summarise(timeline):
        table.add_row(*each.cells())
    console.print(table)
    console.print(
        f"{len(timeline.spans)} spans and {len(timeline.arrows)} arrows in {path}; {timeline.clock}"
    )
    if timeline.dropped:
        console.print(
            f"{timeline.dropped} events found no room and are missing: raise --events or --programs"
        )


def _summary_json(timeline: Timeline) -> dict[str, Any]:
    """Return what docs/measured.md shows."""
    return {
        "kind": "trace", "title": timeline.title, "machine": machine(),
        "unit": timeline.unit, "clock": timeline.clock, "dropped": timeline.dropped,
        "spans": len(timeline.spans), "arrows": len(timeline.arrows),
        "ranks": [dataclasses.asdict(each) for each in summarise(timeline)],
    }  # fmt: skip
