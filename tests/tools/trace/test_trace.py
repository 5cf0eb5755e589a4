"""Trace points on the simulator: structure of the file, who was waited for, what was lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.device import trace as points
from sundog.tools._options import TraceOptions
from sundog.tools.trace.record import Raw
from sundog.tools.trace.timeline import Timeline, summarise, write
from sundog.tools.trace.trace_command import trace_op

from . import late_op

LATE = "tools.trace.late_op"

pytestmark = [pytest.mark.sim_only, pytest.mark.compat]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return trace_op(TraceOptions(LATE, world=4, backend="sim", out=""))


def kinds(timeline: Timeline, name: str) -> np.ndarray:
    return timeline.spans[timeline.spans["kind"] == points.KINDS.index(name)]


def test_every_point_is_there(timeline: Timeline) -> None:
    ranks, programs, rounds = 4, 2, 3
    assert timeline.dropped == 0
    for kind in ("wait", "signal", "fetch", "compute"):
        assert len(kinds(timeline, kind)) == ranks * programs * rounds
    assert len(kinds(timeline, "barrier")) == ranks * programs
    assert (timeline.spans["end"] >= timeline.spans["begin"]).all()


def test_a_wait_is_ended_by_the_rank_that_owes_it(timeline: Timeline) -> None:
    waits = kinds(timeline, "wait")
    assert (waits["ended_by"] == (waits["rank"] - 1) % 4).all()
    assert (waits["peer"] == waits["ended_by"]).all()
    for (_, _, sent), (_, _, seen) in timeline.arrows.tolist():
        assert sent <= seen


def test_summary_names_the_late_rank(timeline: Timeline) -> None:
    """Its neighbour waits for it most."""
    late = late_op.LATE_RANK
    summaries = {s.rank: s for s in summarise(timeline)}
    right = summaries[(late + 1) % 4].waited_for
    assert max(right, key=lambda rank: right[rank]) == late
    assert right[late] > late_op.DELAY


def test_hidden_is_the_part_of_the_fetches_under_computation(timeline: Timeline) -> None:
    assert {s.hidden for s in summarise(timeline)} == {1.0}  # each fetch is inside a computation


def test_hidden_counts_overlap_once() -> None:
    def raw(events: list[tuple[int, int, int]]) -> Raw:
        words = np.array([(t, kind + 8 * end, 0, 0) for t, kind, end in events], np.int64)
        return Raw(0, 0, np.array([0, 0, 1, 1, 2, 2]), words, 0, "ns", "")

    fetch, compute = points.FETCH.value, points.COMPUTE.value
    events = [(0, fetch, 0), (100, fetch, 1), (50, compute, 0), (70, compute, 1)]
    [summary] = summarise(Timeline.of([raw([*events, (60, compute, 0), (90, compute, 1)])]))
    assert summary.hidden == 0.4


def test_the_last_arrival_releases_the_barrier() -> None:
    """Both add to one counter, and the other rank waits for what it holds after both."""
    everyone = 16 * (points.ALL.value + 1)

    def raw(rank: int, programs: list[int], events: list[tuple[int, int]]) -> Raw:
        words = np.array([(t, tag + everyone, 0, 2) for t, tag in events], np.int64)
        return Raw(rank, 0, np.array(programs), words, 0, "ns", "")

    wait, signal = points.WAIT.value, points.SIGNAL.value
    waiting = raw(0, [0, 0], [(0, wait), (60, wait + 8)])
    made = Timeline.of([waiting, raw(1, [0, 1], [(50, signal), (20, signal)])])
    assert [arrow[0] for arrow in made.arrows.tolist()] == [(1, 0, 50)]


def test_file_nests_and_every_arrow_has_two_ends(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(timeline, str(path))
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    assert content["otherData"]["dropped"] == 0
    slices = [e for e in events if e["ph"] == "X"]
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for each in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        stack = tracks.setdefault((each["pid"], each["tid"]), [])
        begin, end = each["ts"], each["ts"] + each["dur"]
        while stack and stack[-1][1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1][1], each
        stack.append((begin, end))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(timeline.arrows) > 0
    places = {(e["pid"], e["tid"], e["ts"]) for e in slices}
    places |= {(e["pid"], e["tid"], e["ts"] + e["dur"]) for e in slices}
    for each in (*starts.values(), *ends.values()):
        assert (each["pid"], each["tid"], each["ts"]) in places


def test_clocks_of_processes_are_aligned() -> None:
    """Each process counts its own accesses, from 0: the late one's clock runs far ahead."""
    made = trace_op(TraceOptions(LATE, world=2, backend="shm", out=""))
    assert "shifted" in made.clock
    waits = kinds(made, "wait")
    assert len(waits) == 2 * 2 * 3
    assert (waits["ended_by"] == 1 - waits["rank"]).all()


def test_full_buffer_counts_what_it_drops(timeline: Timeline) -> None:
    small = trace_op(TraceOptions(LATE, world=4, backend="sim", events=5, out=""))
    per_program = 2 * 3 * 3 + 3 + 2  # three kinds of spans and the signals, three rounds, a barrier
    assert small.dropped == 4 * 2 * (per_program - 5)
    few = trace_op(TraceOptions(LATE, world=4, backend="sim", programs=1, out=""))
    assert few.dropped == 4 * per_program
    assert set(few.spans["program"].tolist()) == {0}


def test_many_events(tmp_path: Path) -> None:
    ranks, programs, count = 4, 16, 400
    kind = np.tile([points.BARRIER.value, points.BARRIER.value + 8], count // 2)
    value = np.repeat(np.arange(count // 2), 2)
    raws = []
    for rank in range(ranks):
        times = np.sort(np.random.default_rng(rank).integers(0, 10**9, (programs, count)), axis=1)
        flags = np.repeat(np.arange(programs) * 8 * ranks, count)
        words = np.stack(
            [times.ravel(), np.tile(kind, programs), flags, np.tile(value, programs)], 1
        )
        raws.append(Raw(rank, 0, np.repeat(np.arange(programs), count), words, 0, "ns", ""))
    made = Timeline.of(raws)
    write(made, str(tmp_path / "big.json"))
    assert len(made.spans) == ranks * programs * count // 2
    latest = np.stack([raw.words[::2, 0] for raw in raws]).argmax(0)  # who came last to a barrier
    for rank in range(ranks):
        own = made.spans[made.spans["rank"] == rank]
        assert (own["ended_by"] == latest).all()
    assert len(made.arrows) == (latest[None, :] != np.arange(ranks)[:, None]).sum()


def test_command_writes_file_and_picture(tmp_path: Path) -> None:
    words = ["trace", "tools.trace.late_op", "--world", "3", "--backend", "sim"]
    file, plot = tmp_path / "t.json", tmp_path / "t.png"
    result = CliRunner().invoke(app, [*words, "--out", str(file), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert "arrows" in result.output
    assert json.loads(file.read_text())["traceEvents"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    lost = CliRunner().invoke(app, [*words, "--out", str(file), "--events", "4"])
    assert "missing" in lost.output
    made = tmp_path / "new" / "t.json"
    for option in ("--out", "--plot", "--json"):
        given = ["--out", str(made), option, str(tmp_path)]
        nowhere = CliRunner().invoke(app, [*words, *given])
        assert nowhere.exit_code == 2
        assert "cannot be written: Is a directory" in nowhere.output
        assert not made.exists(), "refused before it is traced"
    none = CliRunner().invoke(app, [*words, "--out", str(file), "--events", "0"])
    assert none.exit_code == 2
