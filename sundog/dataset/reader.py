"""Reads a base: rows and runs as pandas frames, graphs as networkx graphs.

    data = read("runs/matmul")
    data.runs[["kernel_name", "session", "best_perf_ms"]]
    data.select("3f2a")                 # the rows of one session, by run_id or session or prefix
    data.graph(data.graphs.ir_id[0])    # networkx.MultiDiGraph
    data.damage                         # what could not be read, with file and line

A run that was repeated has one `run_id` and several sessions: they are never mixed unasked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .files import Damage, Line, read_records
from .ir_graph import IR_SCHEMA_VERSION, IrGraphRecord, canonical_json, to_networkx
from .rows import empty_rows, load_rows
from .schema import META_END_FIELDS, META_SCHEMA_VERSION, META_START_FIELDS, file_names

if TYPE_CHECKING:
    import networkx
    import pandas

__all__ = ["Damage", "Dataset", "read"]

# The `runs` frame: the start record's fields, then what is drawn from records for convenience.
RUN_COLUMNS = tuple(f.name for f in META_START_FIELDS if f.name not in ("schema_version", "event"))
_END_COLUMNS = ("ended_at", "seconds", "num_configs", "counts", "best", "error", "unwritten")
_DRAWN_COLUMNS = ("hardware_name", "capability", "ended", "best_perf_ms", "best_sample_id", "line")
_NESTED = (
    *("kernel_source", "codegen_settings", "arguments", "settings", "hardware", "versions"),
    *("counts", "best"),
)
GRAPH_COLUMNS = ("ir_id", "frontend", "kernel_name", "run_id", "num_nodes", "num_links", "line")


@dataclass
class Dataset:
    """What `read` found. `rows` and `runs` are joined by (run_id, session)."""

    base: str
    rows: pandas.DataFrame  # index: line of the CSV
    runs: pandas.DataFrame  # one per session, in order of start
    graphs: pandas.DataFrame  # one per ir_id
    damage: list[Damage]
    ir_lines: dict[str, tuple[int, int]]  # ir_id -> offset and length in the IR file

    def record(self, ir_id: str) -> IrGraphRecord:
        """The IR graph record as it was written."""
        if ir_id not in self.ir_lines:
            raise ValueError(f"{self.base}.ir.jsonl has no graph {ir_id!r}")
        offset, length = self.ir_lines[ir_id]
        with open(file_names(self.base)[2], "rb") as file:
            file.seek(offset)
            return cast(IrGraphRecord, json.loads(file.read(length)))

    def graph(self, ir_id: str) -> networkx.MultiDiGraph:
        return to_networkx(self.record(ir_id))

    def session_of(self, run: str) -> str:
        """The session that `run` names: a run_id or session, or the start of either."""
        pairs = [self.rows[["session", "run_id"]].drop_duplicates(), self.runs]
        ids = {s: r for frame in pairs for s, r in zip(frame.session, frame.run_id, strict=True)}
        matches = [s for s, r in ids.items() if s.startswith(run) or r.startswith(run)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise ValueError(f"{self.base} has no run or session {run!r}")
        names = ", ".join(matches[:10])
        raise ValueError(f"{run!r} is {len(matches)} sessions: name one of {names}")

    def select(self, run: str) -> pandas.DataFrame:
        """The rows of one session; ValueError if `run` was repeated and names several."""
        return self.rows[self.rows.session == self.session_of(run)]

    def join(self) -> pandas.DataFrame:
        """One table: every ended attempt, and those that a crash left unended, with their run.

        Nested fields of the run are JSON text, so that any table format takes them.
        """
        ended = self.rows[self.rows.status != "started"]
        started = self.rows[self.rows.status == "started"]
        keys = ["session", "config_index"]
        left_open = ~started.set_index(keys).index.isin(ended.set_index(keys).index)
        lines = ended.index.append(started.index[left_open]).sort_values()
        runs = self.runs.drop(columns=["kernel_id", "world", "line"])
        runs = runs.rename(columns={"ir_id": "run_ir_id", "error": "run_error"})
        for column in _NESTED:
            # A category: a kernel's source is kept once, not with each of its million rows.
            runs[column] = runs[column].map(_json_text).astype("category")
        rows = self.rows.loc[lines].reset_index()
        rows = rows.astype({"run_id": "string", "session": "string"})
        return rows.merge(runs, on=["run_id", "session"], how="left")


def read(
    base: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> Dataset:
    """Everything readable of `<base>.csv`, `.meta.jsonl` and `.ir.jsonl`; see `damage`.

    Raises ValueError if there is no such base, or its CSV has other columns. `progress` is called
    with (bytes done, bytes in all).
    """
    _require_pandas()
    base = os.fspath(base)
    sizes = {name: os.path.getsize(name) for name in file_names(base) if os.path.exists(name)}
    if not sizes:
        raise ValueError(f"there is no {' or '.join(file_names(base))}")
    done, total = 0, sum(sizes.values())

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    csv_path, meta_path, ir_path = file_names(base)
    damage: list[Damage] = []
    rows = load_rows(csv_path, damage) if csv_path in sizes else empty_rows()
    advance(sizes.get(csv_path, 0))
    runs = _load_runs(meta_path, damage, advance) if meta_path in sizes else _runs_frame([])
    lines = read_records(ir_path, IR_SCHEMA_VERSION, damage, advance) if ir_path in sizes else []
    graphs, ir_lines = _load_graphs(ir_path, lines, damage)
    return Dataset(base, rows, runs, graphs, damage, ir_lines)


def _require_pandas() -> None:
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"reading a dataset needs {error.name}: pip install 'sundog[data]'"
        ) from error


def _load_runs(path: str, damage: list[Damage], advance: Callable[[int], None]) -> pandas.DataFrame:
    starts: dict[str, dict[str, Any]] = {}
    for line in read_records(path, META_SCHEMA_VERSION, damage, advance):
        wrong = _add_event(starts, line)
        if wrong is not None:
            damage.append(Damage(path, line.number, wrong))
    return _runs_frame(list(starts.values()))


def _add_event(starts: dict[str, dict[str, Any]], line: Line) -> str | None:
    """Adds a record to its run; or why it is none."""
    record = line.record
    event, session = record.get("event"), record.get("session")
    fields = META_START_FIELDS if event == "start" else META_END_FIELDS
    missing = [field.name for field in fields if field.name not in record]
    if event not in ("start", "end") or missing:
        return f"a {event!r} record without {', '.join(missing[:5]) or 'a known event'}"
    known = starts.get(str(session))
    if event == "end":
        if known is None or known["run_id"] != record["run_id"]:
            return f"session {session} ends but did not start"
        known.update({name: record[name] for name in _END_COLUMNS}, ended=True)
        best = record["best"] or {}
        known.update(best_perf_ms=best.get("perf_ms"), best_sample_id=best.get("sample_id"))
        return None
    if known is not None:
        return f"session {session} started on line {known['line']} already"
    hardware = record["hardware"] or {}
    starts[str(session)] = {
        **{name: record[name] for name in RUN_COLUMNS},
        "hardware_name": hardware.get("name"),
        "capability": hardware.get("capability"),
        "ended": False,
        "line": line.number,
    }
    return None


def _runs_frame(records: list[dict[str, Any]]) -> pandas.DataFrame:
    import pandas as pd

    columns = (*RUN_COLUMNS, *_END_COLUMNS, *_DRAWN_COLUMNS)
    known = [{column: _shown(record.get(column)) for column in columns} for record in records]
    frame = pd.DataFrame(known, columns=list(columns))
    texts = ("run_id", "kernel_id", "session", "kernel_name", "backend", "ir_id", "error")
    frame = frame.astype(dict.fromkeys(texts, "string"))
    numbers = {"seconds": "float64", "best_perf_ms": "float64", "num_configs": "Int64"}
    return frame.astype({**numbers, "unwritten": "Int64", "ended": bool})


def _load_graphs(
    path: str, lines: Iterable[Line], damage: list[Damage]
) -> tuple[pandas.DataFrame, dict[str, tuple[int, int]]]:
    """A summary of each graph and where it stands; the graphs themselves are read when asked."""
    import pandas as pd

    found: dict[str, tuple[int, int]] = {}
    summaries = []
    for line in lines:
        record, graph = line.record, line.record.get("graph")
        ir_id, nodes, links = (record.get(key) for key in ("ir_id", "nodes", "links"))
        if not (isinstance(graph, dict) and isinstance(nodes, list) and isinstance(links, list)):
            damage.append(Damage(path, line.number, "an IR record without graph, nodes or links"))
        elif not isinstance(ir_id, str) or ir_id in found:
            damage.append(Damage(path, line.number, f"ir_id {ir_id!r} is missing or repeated"))
        else:
            found[ir_id] = (line.offset, line.length)
            names = [_shown(graph.get(key)) for key in ("frontend", "kernel_name")]
            counts = [len(nodes), len(links), line.number]
            summaries.append((ir_id, *names, record.get("run_id"), *counts))
    return pd.DataFrame(summaries, columns=list(GRAPH_COLUMNS)), found


def _shown(value: Any) -> Any:
    """A lone surrogate (of a file's name that is no UTF-8) as its escape: pandas takes no other."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _json_text(value: Any) -> str | None:
    return canonical_json(value) if isinstance(value, (dict, list)) else None
