"""A timeline as a file for ui.perfetto.dev: ranks are processes, programs are tracks.

The timeline of one rank as a picture: waits in the colour of the rank waited for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ...device.trace import BARRIER, COMPUTE, FETCH, KINDS, SIGNAL, WAIT
from .timeline import Timeline, summarise

__all__ = ["draw", "write"]


def write(timeline: Timeline, path: str) -> None:
    """One slice per span, a flow from each signal to the wait that it ended."""
    about = {
        "op": timeline.title, "time": timeline.unit, "clocks": timeline.clock,
        "dropped": timeline.dropped,
    }  # fmt: skip
    try:
        with Path(path).open("w") as file:
            file.write('{"otherData": ' + json.dumps(about) + ', "traceEvents": [\n')
            file.write(",\n".join(_lines(timeline)))
            file.write("\n]}\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _lines(timeline: Timeline) -> Iterator[str]:
    for rank in np.unique(timeline.spans["rank"]).tolist():
        name = json.dumps({"name": f"rank {rank}"})
        yield f'{{"ph": "M", "name": "process_name", "pid": {rank}, "args": {name}}}'
    spans = timeline.spans
    columns = (spans[n].tolist() for n in spans.dtype.names or ())
    scale = 1000 if timeline.unit == "ns" else 1  # the file's times are microseconds
    for rank, program, kind, begin, end, what, value, peer, ended_by in zip(*columns, strict=True):
        last = max(end - begin, 1 if kind == SIGNAL.value else 0) / scale
        yield (
            f'{{"ph": "X", "name": "{KINDS[kind]}", "pid": {rank}, "tid": {program}, '
            f'"ts": {begin / scale}, "dur": {last}, "args": {{"what": {what}, "value": {value}, '
            f'"peer": {peer}, "ended_by": {ended_by}}}}}'
        )
    for number, (source, target) in enumerate(timeline.arrows.tolist()):
        for phase, (rank, program, time) in (("s", source), ("f", target)):
            bind = ', "bp": "e"' if phase == "f" else ""  # to the wait, not to what follows it
            yield (
                f'{{"ph": "{phase}", "id": {number}, "cat": "signal", "name": "signal", '
                f'"pid": {rank}, "tid": {program}, "ts": {time / scale}{bind}}}'
            )


_PLAIN = {FETCH.value: ("fetch", "#c8d8e8"), COMPUTE.value: ("compute", "#d8e8c8")}


def draw(timeline: Timeline, path: str, rank: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    spans = timeline.spans[timeline.spans["rank"] == rank]
    rows = 1 + int(spans["program"].max(initial=0))
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.12 * min(max(rows, 8), 48)))
    colours = plt.get_cmap("tab10")
    scale = 1000 if timeline.unit == "ns" else 1
    for kind, (name, colour) in _PLAIN.items():
        _bars(axes, spans[spans["kind"] == kind], name, colour, scale)
    waits = spans[np.isin(spans["kind"], (WAIT.value, BARRIER.value))]
    for peer in np.unique(waits["ended_by"]).tolist():
        own = waits[waits["ended_by"] == peer]
        _bars(axes, own, _waited_for(peer, rank), colours(peer % 10 if peer >= 0 else 7), scale)
    unit = "us" if timeline.unit == "ns" else timeline.unit
    [summary] = [each for each in summarise(timeline) if each.rank == rank]
    axes.set(
        xlabel=f"time [{unit}]", ylabel="program", ylim=(rows - 0.5, -0.5),
        title=f"{timeline.title}\nrank {rank}: {summary.cells()[2]} of program time waited",
    )  # fmt: skip
    axes.title.set_fontsize(9)
    axes.autoscale_view(scaley=False)
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(1, 0))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _waited_for(peer: int, rank: int) -> str:
    if peer < 0:
        return "waited, ended by nobody seen"
    return "waited for itself" if peer == rank else f"waited for rank {peer}"


def _bars(axes: Any, spans: np.ndarray, name: str, colour: Any, scale: int) -> None:
    """One collection per colour: a bar each takes minutes for a large kernel."""
    from matplotlib.collections import PolyCollection

    left, right = spans["begin"] / scale, spans["end"] / scale
    low, high = spans["program"] - 0.45, spans["program"] + 0.45
    corners = ((left, low), (left, high), (right, high), (right, low))
    boxes = np.stack([np.stack(corner, -1) for corner in corners], 1)
    if len(boxes):
        axes.add_collection(PolyCollection(list(boxes), facecolor=colour, linewidth=0, label=name))
