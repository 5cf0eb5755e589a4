"""A timeline as a file for ui.perfetto.dev: ranks are processes, programs are tracks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..device.trace import KINDS, SIGNAL
from .timeline import Timeline

__all__ = ["write"]


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
