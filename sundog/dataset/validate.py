"""Checks a base: schema, joins and ids. Damage is what must not be; notes are what one may want
to know (a run that was killed, an attempt that never ended).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .files import Damage
from .identity import kernel_id_of, run_id_of, sample_id_of
from .ir_graph import ir_id_of
from .reader import Dataset
from .schema import STATUSES, file_names

if TYPE_CHECKING:
    import pandas

__all__ = ["Validation", "validate"]

_FAILURES = ("error", "timeout", "accuracy_error")


@dataclass(frozen=True)
class Validation:
    damage: list[Damage]
    notes: list[Damage]


def validate(data: Dataset, progress: Callable[[int, int], None] | None = None) -> Validation:
    """What is wrong with a dataset, in order of file and line."""
    csv_path, meta_path, ir_path = file_names(data.base)
    damage = list(data.damage)
    for path, found in (
        (csv_path, _check_rows(data)),
        (csv_path, _check_attempts(data.rows)),
        (csv_path, _check_row_graphs(data)),
        (meta_path, _check_runs(data)),
        (ir_path, _check_graphs(data, progress)),
    ):
        damage += [Damage(path, line, text) for line, text in found]
    damage.sort(key=lambda item: (file_names(data.base).index(item.file), item.line))
    return Validation(damage, list(_notes(data)))


Found = Iterator[tuple[int, str]]


def _check_rows(data: Dataset) -> Found:
    """Each row has its run, a known status, JSON, and the sample_id of its config."""
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
    except ValueError:
        return False
    return True


def _check_attempts(rows: pandas.DataFrame) -> Found:
    """A `started` row first, then one row per repeat; `ok` has a time, a failure a reason."""
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


def _check_runs(data: Dataset) -> Found:
    """The ids are the hashes of what the record says, and the graph that it names is there."""
    for run in data.runs.to_dict("records"):
        line, ir_id = int(run["line"]), run["ir_id"]
        try:
            ids = kernel_id_of(run), run_id_of(run)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            yield line, f"the record cannot be hashed ({type(error).__name__}: {error})"
            continue
        if ids != (run["kernel_id"], run["run_id"]):
            yield line, "kernel_id or run_id is not the hash of what the record says"
        if isinstance(ir_id, str) and ir_id not in data.ir_lines:
            yield line, f"no graph {ir_id[:12]} in the IR file"


def _check_graphs(data: Dataset, progress: Callable[[int, int], None] | None) -> Found:
    """Each graph is somebody's, is what its id says, and its links end at its nodes."""
    named = {i for ids in data.rows.ir_id.unique() for i in ids.split()} | set(data.runs.ir_id)
    sessions = set(data.runs.run_id)
    graphs = data.graphs[["ir_id", "run_id", "line"]].itertuples(index=False, name=None)
    for done, (ir_id, run_id, line) in enumerate(graphs):
        record = data.record(ir_id)
        if ir_id not in named and run_id not in sessions:
            yield line, f"graph {ir_id[:12]} belongs to no run"
        if ir_id_of(record) != ir_id:
            yield line, f"ir_id {ir_id[:12]} is not the hash of the graph"
        nodes = {node.get("id") for node in record["nodes"]}
        loose = [k for k in record["links"] if not {k.get("source"), k.get("target")} <= nodes]
        if loose or len(nodes) != len(record["nodes"]):
            yield line, f"{len(loose)} links end at no node, or two nodes have one id"
        if progress is not None:
            progress(done + 1, len(data.graphs))


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
