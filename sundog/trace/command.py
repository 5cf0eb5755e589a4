"""`sundog trace OP`: run an op with its trace points on, write the file, print who waited."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import SundogError
from ..exercise import room
from ..launch import run as run_ranks
from ..op import find
from ..world import World
from . import perfetto, picture
from .record import Raw, record_call
from .timeline import Summary, Timeline, summarise

__all__ = ["run", "trace_op"]


def run(
    name: str, path: str, size: int, backend: str, plot: str, programs: int, events: int
) -> int:
    """Exit status: 0 written, 2 it could not be traced."""
    try:
        timeline = trace_op(find(name), size, backend, programs, events)
        perfetto.write(timeline, path, name)
        if plot:
            picture.draw(timeline, plot, name)
    except (SundogError, ValueError) as error:
        print(f"sundog trace {name}: {error}", file=sys.stderr)
        return 2
    _print(timeline, summarise(timeline), path)
    return 0


def trace_op(
    op: ModuleType, size: int, backend: str | None, programs: int = 256, events: int = 1024,
    problem: Any = None,
) -> Timeline:  # fmt: skip
    """The timeline of one call. `problem`: the largest of the op's cases if none is given."""
    chosen = problem or max(op.cases(size), key=lambda each: op.cost(each).hbm_bytes)

    def main(world: World) -> Raw:
        plan = op.plan(world, chosen, op.default(chosen, world.num_sms))
        inputs = op.inputs(world, chosen, 0)
        out = room(world, op, chosen, inputs)
        world.barrier()
        return record_call(world, lambda: plan(*inputs, out), programs, events)

    return Timeline.of(run_ranks(main, size, backend))


def _print(timeline: Timeline, summaries: list[Summary], path: str) -> None:
    console = Console()
    unit = timeline.unit
    table = Table("rank", f"length, {unit}", "waited", "most for", "hidden")
    for each in summaries:
        waited = f"{100 * each.waited / max(each.busy, 1):.0f} % of program time"
        others = {p: t for p, t in each.waited_for.items() if p != each.rank}
        most = max(others, key=lambda p: others[p], default=None)
        text = "" if most is None else f"rank {most}, {others[most]} {unit}"
        hidden = "" if each.hidden is None else f"{100 * each.hidden:.0f} %"
        table.add_row(str(each.rank), str(each.length), waited, text, hidden)
    console.print(table)
    console.print(
        f"{len(timeline.spans)} spans and {len(timeline.arrows)} arrows in {path}; {timeline.clock}"
    )
    if timeline.dropped:
        console.print(
            f"{timeline.dropped} events found no room and are missing: raise --events or --programs"
        )
