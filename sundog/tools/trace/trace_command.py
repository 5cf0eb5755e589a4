"""`sundog trace OP`: run an op with its trace points on, write the file, print who waited."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ...errors import SundogError
from ...launch import run as run_ranks
from ...ops.load import running
from ...world.world import World
from .._console import check_writable
from ..bench import results
from . import draw
from .record import Raw, record_call
from .timeline import Timeline, summarise
from .trace_subject import Subject

__all__ = ["Place", "run", "trace_op"]


@dataclass(frozen=True)
class Place:
    """Where the ranks are."""

    size: int
    backend: str = ""
    link: str = ""


def run(
    subject: Subject, place: Place, path: str, plot: str, json: str, programs: int, events: int
) -> int:
    """Exit status: 0 written, 2 it could not be traced."""
    try:
        check_writable(path, plot, json)
        timeline = trace_op(subject, place, programs, events)
        draw.write(timeline, path)
        if plot:
            draw.draw(timeline, plot, _shown(timeline, place))
    except (SundogError, ValueError) as error:
        print(f"sundog trace {subject.name}: {error}", file=sys.stderr)
        return 2
    _print(timeline, path)
    if json:
        results.write(json, _summary_json(timeline))
    return 0


def trace_op(subject: Subject, place: Place, programs: int = 256, events: int = 1024) -> Timeline:
    """The timeline of one call."""

    def main(world: World) -> tuple[str, Raw]:
        title, call = subject.call(world)
        over = f" over {place.link}" if place.link else ""
        where = f"{world.size} ranks on {world.backend}{over}"
        return f"{title}, {where}", record_call(world, call, programs, events)

    with running("the traced call"):
        found = run_ranks(main, place.size, place.backend, link=place.link)
    return Timeline.of([raw for _, raw in found], found[0][0])


def _shown(timeline: Timeline, place: Place) -> int:
    """The rank to draw: the slowest. Over a link only rank 0 is measured."""
    if place.link:
        return 0
    return max(summarise(timeline), key=lambda each: each.length).rank


def _print(timeline: Timeline, path: str) -> None:
    console = Console()
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
    """For docs/measured.md."""
    return {
        "kind": "trace", "title": timeline.title, "machine": results.machine(),
        "unit": timeline.unit, "clock": timeline.clock, "dropped": timeline.dropped,
        "spans": len(timeline.spans), "arrows": len(timeline.arrows),
        "ranks": [dataclasses.asdict(each) for each in summarise(timeline)],
    }  # fmt: skip
