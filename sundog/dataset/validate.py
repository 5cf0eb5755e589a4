"""Check a base: types, joins, ids, counts and hashes.

Damage must not occur; notes are worth knowing (a run that was killed, an attempt that never ended).
The end record of a run has the number and the hash of its rows, and each record of the other files
has the hash of the line before it: a line that was removed, repeated, moved or changed is found by
these.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .files import Damage, lines_of, whole_size
from .identity import kernel_id_of, run_id_of, sample_id_of
from .ir_graph import ir_id_of
from .reader import Dataset
from .schema import STATUSES, file_names

if TYPE_CHECKING:
    import pandas

_FAILURES = ("error", "timeout", "accuracy_error")
_MOVED = "this row is older than the one before it: rows were moved"


@dataclass(frozen=True)
class Validation:
    damage: list[Damage]
    notes: list[Damage]


def validate(data: Dataset, progress: Callable[[int, int], None] | None = None) -> Validation:
    """Return what is wrong with a dataset, in order of file and line."""
    csv_path, meta_path, ir_path = file_names(data.base)
    damage = data.damage + data.gaps
    for path, found in (
        (csv_path, _check_rows(data)),
        (csv_path, _check_attempts(data.rows)),
        (csv_path, _check_row_graphs(data)),
        (csv_path, _check_sessions(data, csv_path)),
        (meta_path, _check_runs(data)),
        (ir_path, _check_graphs(data, progress)),
    ):
        damage += [Damage(path, line, text) for line, text in found]
    damage.sort(key=lambda item: (file_names(data.base).index(item.file), item.line))
    return Validation(damage, list(_notes(data)))


Found = Iterator[tuple[int, str]]


def _check_rows(data: Dataset) -> Found:
    """Check that each row has its run, a known status, JSON, and the sample_id of its config."""
    rows, runs = data.rows, data.runs
    known = set(zip(runs.run_id, runs.session, strict=True))
    kernels = dict(zip(runs.session, runs.kernel_id, strict=True))
    keys = ["run_id", "session", "kernel_id"]
    for line, run_id, session, kernel_id in _firsts(rows, keys):
        if run_id and (run_id, session) not in known:
            yield line, f"no run {run_id[:12]} session {session} in the metadata"
        elif run_id and kernels[session] != kernel_id:
            yield line, f"kernel_id {kernel_id[:12]} is not its run's {kernels[session][:12]}"
    for line, status in _firsts(rows, ["status"]):
        if status not in STATUSES:
            yield line, f"status {status!r} is not one of {', '.join(STATUSES)}"
    for line, run_id, sample_id, config in _firsts(rows, ["run_id", "sample_id", "config"]):
        if not _is_json(config):
            yield line, f"config is not JSON: {config[:60]!r}"
        elif sample_id_of(run_id, config) != sample_id:
            yield line, f"sample_id {sample_id[:12]} is not the hash of run_id and config"
    for line, metrics in _firsts(rows, ["metrics"]):
        if metrics and not _is_json(metrics):
            yield line, f"metrics is not JSON: {metrics[:60]!r}"


def _firsts(frame: pandas.DataFrame, columns: list[str]) -> Iterator[Any]:
    """(line, values...) of the first row of each distinct combination: a million rows are few."""
    yield from frame[columns].drop_duplicates().itertuples(name=None)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _check_attempts(rows: pandas.DataFrame) -> Found:
    """Check for a `started` row, then one per repeat; `ok` has a time, a failure a reason."""
    started = rows[rows.status == "started"]
    ended = rows[rows.status != "started"]
    for line in started.index[started.duplicated(["session", "config_index"])]:
        yield line, f"configuration {rows.config_index[line]} of its session started before"
    for line in ended.index[ended.duplicated(["session", "config_index", "repeat"])]:
        yield line, f"repeat {rows.repeat[line]} of a configuration that has this repeat already"
    keys = ["session", "config_index", "sample_id"]
    known = ended.set_index(keys).index.isin(started.set_index(keys).index)
    for line in ended.index[~known]:
        yield line, "ends a configuration that never started"
    for line in ended.index[(ended.status == "ok") & ended.perf_ms.isna()]:
        yield line, "status ok without perf_ms"
    for line in ended.index[ended.status.isin(_FAILURES) & (ended.error == "")]:
        yield line, f"status {rows.status[line]} without a reason in error"


def _check_row_graphs(data: Dataset) -> Found:
    for line, ids in _firsts(data.rows, ["ir_id"]):
        for ir_id in ids.split():
            if ir_id not in data.ir_lines:
                yield line, f"no graph {ir_id[:12]} in the IR file"


@dataclass
class _Session:
    """What the CSV has of one session."""

    digest: Any = field(default_factory=hashlib.sha256)
    counts: Counter[str] = field(default_factory=Counter)
    first: int = 0  # line
    last: int = 1
    end: int = 0  # of the last line, in bytes
    time: float = 0.0
    backwards: int = 0  # the first line that is older than the one before it


def _check_sessions(data: Dataset, path: str) -> Found:
    """Compare the rows of each run with the counts and hashes in its end record.

    A run that was killed has no end record: its rows must only be in the order of their times.
    """
    if not os.path.exists(path):
        return  # `_notes` reports a missing CSV
    ended = data.runs[data.runs.rows_hash.notna()]
    found = _sessions(data, path)
    for name in found.keys() - {*ended.session}:
        if found[name].backwards:
            yield found[name].backwards, f"session {name}: {_MOVED}"
    spans = _spans([found[s] for s in ended.session if s in found], path)
    is_shifted = False
    for run in ended.itertuples():
        rows = found.get(str(run.session), _Session())
        wrong = _why_other_rows(run, rows)
        if wrong is None and rows.end != run.rows_end and not is_shifted:
            is_shifted = True  # and all that follow
            wrong = f"its last row ends at byte {rows.end}, was written up to byte {run.rows_end}"
            wrong += ": a line before it was removed, repeated, moved or changed"
        if wrong is None and rows.first and spans[rows.first, rows.last] != run.span_hash:
            wrong = "a row of another run, between its own, was removed, repeated, moved or changed"
        if wrong is not None:
            yield rows.backwards or rows.last, f"session {run.session}: {wrong}"


def _why_other_rows(run: Any, rows: _Session) -> str | None:
    count, written = rows.counts.total(), dict(run.counts)
    if count != run.num_rows:
        pairs = {s: (rows.counts[s], written.get(s, 0)) for s in {*rows.counts, *written}}
        names = [f"{s} {a} instead of {b}" for s, (a, b) in sorted(pairs.items()) if a != b]
        return f"{count} rows, but its end record counts {run.num_rows} ({', '.join(names)})"
    if rows.digest.hexdigest() == run.rows_hash:
        return None
    if rows.backwards:
        return _MOVED
    return "its rows are not those that were written, or not in that order"


def _sessions(data: Dataset, path: str) -> dict[str, _Session]:
    cells = zip(*(data.rows[name] for name in ("session", "status", "timestamp_s")), strict=True)
    known = dict(zip(data.rows.index, cells, strict=True))
    found: dict[str, _Session] = {}
    for line in lines_of(path, whole_size(path)[0]) if known else ():
        if line.number not in known or line.data is None:
            continue
        name, status, time = known[line.number]
        session = found.setdefault(name, _Session(first=line.number))
        session.digest.update(line.data + b"\n")
        session.counts[status] += 1
        if time < session.time and not session.backwards:
            session.backwards = line.number
        session.last, session.end = line.number, line.offset + line.length
        session.time = time
    return found


def _spans(sessions: list[_Session], path: str) -> dict[tuple[int, int], str]:
    """Return the hash of all lines from the first to the last of each session."""
    waiting = sorted({(s.first, s.last) for s in sessions}, reverse=True)
    opened: dict[tuple[int, int], Any] = {}
    found: dict[tuple[int, int], str] = {}
    for line in lines_of(path, whole_size(path)[0]) if waiting else ():
        while waiting and waiting[-1][0] == line.number:
            opened[waiting.pop()] = hashlib.sha256()
        for span, digest in list(opened.items()):
            digest.update((line.data or b"") + b"\n")
            if span[1] == line.number:
                found[span] = opened.pop(span).hexdigest()
    return found


def _check_runs(data: Dataset) -> Found:
    """Check that ids are the hashes of what the record says, and that its graph is there."""
    for run in data.runs.to_dict("records"):
        line, ir_id = int(run["line"]), run["ir_id"]
        try:
            ids = kernel_id_of(run), run_id_of(run)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            yield line, f"the record cannot be hashed ({type(error).__name__}: {error})"
            continue
        if ids != (run["kernel_id"], run["run_id"]):
            yield line, "kernel_id or run_id is not the hash of what the record says"
        if isinstance(ir_id, str) and ir_id not in data.ir_lines:
            yield line, f"no graph {ir_id[:12]} in the IR file"


def _check_graphs(data: Dataset, progress: Callable[[int, int], None] | None) -> Found:
    """Check that each graph has a run, matches its id, and has links between its nodes."""
    named = {i for ids in data.rows.ir_id.unique() for i in ids.split()} | set(data.runs.ir_id)
    sessions = set(data.runs.run_id)
    sizes: dict[str, list[int]] = {}  # of the first line with each id: `record` reads that one
    columns = ["ir_id", "run_id", "line", "num_nodes", "num_links"]
    graphs = data.graphs[columns].itertuples(index=False, name=None)
    for done, (ir_id, run_id, line, *size) in enumerate(graphs):
        if ir_id not in named and run_id not in sessions:
            yield line, f"graph {ir_id[:12]} belongs to no run"
        said = sizes.setdefault(ir_id, size)
        yield from ((line, text) for text in _check_graph(data, ir_id, said))
        if progress is not None:
            progress(done + 1, len(data.graphs))


def _check_graph(data: Dataset, ir_id: str, said: list[int]) -> Iterator[str]:
    try:
        record = data.record(ir_id)
        if ir_id_of(record) != ir_id:
            yield f"ir_id {ir_id[:12]} is not the hash of the graph"
        nodes = {node.get("id") for node in record["nodes"]}
        loose = [k for k in record["links"] if not {k.get("source"), k.get("target")} <= nodes]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        yield f"graph {ir_id[:12]} cannot be read: {error}"
        return
    if loose or len(nodes) != len(record["nodes"]):
        yield f"{len(loose)} links end at no node, or two nodes have one id"
    if said != [len(record["nodes"]), len(record["links"])]:
        yield f"graph {ir_id[:12]} has other numbers of nodes and links than its line says"


def _notes(data: Dataset) -> Iterator[Damage]:
    csv_path, meta_path, _ = file_names(data.base)
    rows = data.rows
    with_graph = set(rows.session[rows.ir_id != ""])
    for run in data.runs.itertuples():
        name = f"{run.kernel_name}, session {run.session}"
        if not run.ended:
            yield Damage(meta_path, int(run.line), f"{name}: no end record (killed, or running)")
        if not isinstance(run.ir_id, str) and run.session not in with_graph:
            yield Damage(meta_path, int(run.line), f"{name}: no IR graph was recorded")
    missing = data.runs.num_rows.sum()
    if missing and not os.path.exists(csv_path):
        yield Damage(csv_path, 1, f"not there; the end records count {missing} rows")
    keys = ["session", "config_index"]
    started = rows[rows.status == "started"]
    ended = rows[rows.status != "started"].set_index(keys).index
    for line in started.index[~started.set_index(keys).index.isin(ended)]:
        yield Damage(
            csv_path, int(line), f"{rows.decorator[line] or rows.config[line]} never ended"
        )
    if (rows.run_id == "").any():
        line = int(rows.index[rows.run_id == ""][0])
        yield Damage(csv_path, line, "rows without metadata: they join nothing")
