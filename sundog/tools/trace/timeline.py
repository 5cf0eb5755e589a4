"""From raw events to spans, arrows and a summary. Numpy throughout: a million events in seconds.

A timeline is written for ui.perfetto.dev, where ranks are processes and programs are tracks, and
drawn for one rank, with its waits in the colour of the rank waited for.

A wait is ended by the latest of the signals that it needs. The rank of that signal was waited for,
and the arrow goes from the signal to the wait's end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...device.trace import BARRIER, COMPUTE, FETCH, KINDS, SIGNAL, WAIT
from .._console import picture
from .record import Raw

_ENDS = np.dtype([("rank", "i4"), ("program", "i4"), ("time", "i8")])
SPAN = np.dtype([
    ("rank", "i4"), ("program", "i4"), ("kind", "i4"), ("begin", "i8"), ("end", "i8"),
    ("what", "i8"), ("value", "i8"), ("peer", "i4"), ("ended_by", "i4"),
])  # fmt: skip
_FIELDS = SPAN.names or ()
ARROW = np.dtype([("source", _ENDS), ("target", _ENDS)])


@dataclass(frozen=True)
class Timeline:
    """All ranks' spans and the arrows between them. Times count from the first event."""

    spans: np.ndarray  # of SPAN; a signal's begin is its end
    arrows: np.ndarray  # of ARROW
    dropped: int
    unit: str
    clock: str
    title: str = ""

    @staticmethod
    def of(raws: list[Raw], title: str = "") -> Timeline:
        raws = sorted(raws, key=lambda raw: raw.rank)
        start = min((int(raw.words[:, 0].min()) for raw in raws if len(raw.words)), default=0)
        spans = np.concatenate([_spans(raw, start) for raw in raws])
        arrows = _connect(spans, len(raws))
        dropped = sum(raw.dropped for raw in raws)
        return Timeline(spans, arrows, dropped, raws[0].unit, raws[0].clock, title)


@dataclass(frozen=True)
class Summary:
    """One rank's times, in the timeline's unit, over all its programs."""

    rank: int
    length: int  # from the rank's first event to its last
    busy: int  # program time: from each program's first event to its last, added up
    waited: int
    waited_for: dict[int, int]  # by the rank whose signal ended the wait; itself if it came last
    hidden: float | None  # the part of its fetching time in which it also computed

    def cells(self) -> list[str]:
        """Return a table's cells: rank, length, part of program time waited, for whom, hidden."""
        most = max(self.waited_for, key=lambda peer: self.waited_for[peer], default=None)
        peer = "itself" if most == self.rank else "nobody seen" if most == -1 else f"rank {most}"
        text = "" if most is None else f"{peer}, {self._part(self.waited_for[most])}"
        hidden = "" if self.hidden is None else f"{100 * self.hidden:.0f} %"
        return [str(self.rank), str(self.length), self._part(self.waited), text, hidden]

    def _part(self, time: int) -> str:
        return f"{100 * time / max(self.busy, 1):.0f} %"


def summarise(timeline: Timeline) -> list[Summary]:
    found = []
    for rank in np.unique(timeline.spans["rank"]).tolist():
        spans = timeline.spans[timeline.spans["rank"] == rank]
        waits = spans[np.isin(spans["kind"], (WAIT.value, BARRIER.value))]
        lengths = waits["end"] - waits["begin"]
        by_peer = {
            int(peer): int(lengths[waits["ended_by"] == peer].sum())
            for peer in np.unique(waits["ended_by"])
        }
        programs = np.unique(spans["program"])
        busy = sum(_extent(spans[spans["program"] == program]) for program in programs)
        found.append(
            Summary(rank, _extent(spans), busy, int(lengths.sum()), by_peer, _hidden(spans))
        )
    return found


def _spans(raw: Raw, start: int) -> np.ndarray:
    """Pair begins with ends, which alternate for one program and kind. The rest never ended."""
    time, tag, what, value = (raw.words[:, k] for k in range(4))
    kind, is_end, peer = tag % 8, tag // 8 % 2 == 1, tag // 16 - 1
    order = np.lexsort((np.arange(len(tag)), kind, raw.programs))  # stable, by program and kind
    follows = np.zeros(len(order), bool)
    first, second = order[:-1], order[1:]
    follows[:-1] = (
        (raw.programs[first] == raw.programs[second])
        & (kind[first] == kind[second])
        & ~is_end[first]
        & is_end[second]
    )
    begins, ends = order[follows], order[np.flatnonzero(follows) + 1]
    instants = np.flatnonzero(kind == SIGNAL.value)
    begins, ends = np.concatenate([begins, instants]), np.concatenate([ends, instants])
    spans = np.zeros(len(begins), SPAN)
    spans["rank"], spans["program"] = raw.rank, raw.programs[begins]
    spans["kind"], spans["peer"] = kind[begins], peer[begins]
    spans["begin"], spans["end"] = time[begins] - start, time[ends] - start
    is_flag = np.isin(spans["kind"], (WAIT.value, SIGNAL.value, BARRIER.value))
    spans["what"] = what[begins] - np.where(is_flag, raw.base, 0)
    spans["value"], spans["ended_by"] = value[begins], -1
    return spans[np.lexsort((-spans["end"], spans["begin"], spans["program"]))]


def _connect(spans: np.ndarray, size: int) -> np.ndarray:
    """Find the signal that ended each wait. Return the arrows between different programs."""
    rank, program, kind, begin, end, flag, value, peer, _ = (spans[n].tolist() for n in _FIELDS)
    sent = _Sent()
    signals = np.flatnonzero(np.isin(kind, (SIGNAL.value, BARRIER.value)))
    # In the order of time: of programs that count together, the last one completes the value.
    for at in signals[np.argsort(spans["begin"][signals], kind="stable")].tolist():
        sent.add(at, rank[at], flag[at], value[at], peer[at])
    arrows = []
    ended_by = np.full(len(spans), -1)
    for at in np.flatnonzero(np.isin(kind, (WAIT.value, BARRIER.value))).tolist():
        needed = sent.needed(size, rank[at], flag[at], value[at], peer[at])
        if not needed:
            continue
        last = max(needed, key=begin.__getitem__)
        ended_by[at] = rank[last]
        if (rank[last], program[last]) != (rank[at], program[at]):  # a barrier hears itself too
            source = (rank[last], program[last], begin[last])
            arrows.append((source, (rank[at], program[at], end[at])))
    spans["ended_by"] = ended_by
    return np.array(arrows, ARROW)


class _Sent:
    """Which span set a flag to a value. A signal to all ranks is kept once, not per rank."""

    def __init__(self) -> None:
        self._one: dict[tuple[int, int, int], int] = {}  # rank, flag, value
        self._all: dict[tuple[int, int], dict[int, int]] = {}  # first flag, value: by sender

    def add(self, at: int, rank: int, flag: int, value: int, peer: int) -> None:
        if peer < 0:
            self._all.setdefault((flag, value), {})[rank] = at
        else:
            self._one[peer, flag, value] = at

    def needed(self, size: int, rank: int, flag: int, value: int, peer: int) -> list[int]:
        """List the recorded spans that must come before this rank's wait ends."""
        if peer >= 0:  # this flag, which may be the peer's in a row that it sets at all ranks
            found = self._one.get((rank, flag, value))
            row = self._all.get((flag - 8 * peer, value), {})
            return [at for at in (found, row.get(peer)) if at is not None][:1]
        row = self._all.get((flag, value), {})
        missing = [each for each in range(size) if each not in row] if len(row) < size else []
        keys = [(rank, flag + 8 * each, value) for each in missing]
        return [*row.values(), *(self._one[key] for key in keys if key in self._one)]


def _extent(spans: np.ndarray) -> int:
    return int(spans["end"].max() - spans["begin"].min()) if len(spans) else 0


def _hidden(spans: np.ndarray) -> float | None:
    """Compute the part of the fetching time in which something was also computed."""
    fetched = _union(spans[spans["kind"] == FETCH.value])
    computed = _union(spans[spans["kind"] == COMPUTE.value])
    if not len(fetched) or not len(computed):
        return None
    total = (fetched[:, 1] - fetched[:, 0]).sum()
    return float(_overlap(fetched, computed) / total) if total else None


def _union(spans: np.ndarray) -> np.ndarray:
    """Return disjoint intervals, in order, that cover the same time."""
    merged: list[list[int]] = []
    for begin, end in sorted(zip(spans["begin"].tolist(), spans["end"].tolist(), strict=True)):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged, np.int64).reshape(-1, 2)


def _overlap(a: np.ndarray, b: np.ndarray) -> int:
    """Return how long two lists of disjoint intervals overlap."""
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    middles = (edges[:-1] + edges[1:]) / 2
    in_a, in_b = (
        np.searchsorted(x[:, 0], middles) > np.searchsorted(x[:, 1], middles) for x in (a, b)
    )
    return int(np.diff(edges)[in_a & in_b].sum())


def write(timeline: Timeline, path: str) -> None:
    """Write one slice per span, and a flow from each signal to the wait that it ended."""
    about = {
        "op": timeline.title,
        "time": timeline.unit,
        "clocks": timeline.clock,
        "dropped": timeline.dropped,
    }
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
    spans = timeline.spans[timeline.spans["rank"] == rank]
    rows = 1 + int(spans["program"].max(initial=0))
    scale = 1000 if timeline.unit == "ns" else 1
    height = 1.5 + 0.12 * min(max(rows, 8), 48)
    with picture(path, figsize=(10, height)) as (_, [[axes]]):
        for kind, (name, colour) in _PLAIN.items():
            _bars(axes, spans[spans["kind"] == kind], name, colour, scale)
        waits = spans[np.isin(spans["kind"], (WAIT.value, BARRIER.value))]
        for peer in np.unique(waits["ended_by"]).tolist():
            own = waits[waits["ended_by"] == peer]
            _bars(axes, own, _waited_for(peer, rank), f"C{peer % 10 if peer >= 0 else 7}", scale)
        unit = "us" if timeline.unit == "ns" else timeline.unit
        [summary] = [each for each in summarise(timeline) if each.rank == rank]
        axes.set(
            xlabel=f"time [{unit}]",
            ylabel="program",
            ylim=(rows - 0.5, -0.5),
            title=f"{timeline.title}\nrank {rank}: {summary.cells()[2]} of program time waited",
        )
        axes.title.set_fontsize(9)
        axes.autoscale_view(scaley=False)
        axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(1, 0))


def _waited_for(peer: int, rank: int) -> str:
    if peer < 0:
        return "waited, ended by nobody seen"
    return "waited for itself" if peer == rank else f"waited for rank {peer}"


def _bars(axes: Any, spans: np.ndarray, name: str, colour: Any, scale: int) -> None:
    """Draw one collection per colour: single bars take minutes for a large kernel."""
    from matplotlib.collections import PolyCollection

    left, right = spans["begin"] / scale, spans["end"] / scale
    low, high = spans["program"] - 0.45, spans["program"] + 0.45
    corners = ((left, low), (left, high), (right, high), (right, low))
    boxes = np.stack([np.stack(corner, -1) for corner in corners], 1)
    if len(boxes):
        axes.add_collection(PolyCollection(list(boxes), facecolor=colour, linewidth=0, label=name))
