"""Read a base: rows and runs as pandas frames, graphs as networkx graphs.

    data = read("runs/matmul")
    data.runs[["kernel_name", "session", "best_perf_ms"]]
    data.select("3f2a")                 # the rows of one session, by run_id or session or prefix
    data.graph(data.graphs.ir_id[0])    # networkx.MultiDiGraph
    data.damage                         # what could not be read, with file and line

Every line is checked before it is used: one of a wrong type or with an impossible value is left out
and named in `damage`. A run that was repeated has one `run_id` and several sessions, which are
never mixed unasked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .files import Damage, Line, read_records
from .graph_file import IR_LINE_VERSIONS, GraphReader, Place, why_no_graph
from .ir_graph import IrGraphRecord, canonical_json, to_networkx
from .rows import empty_rows, load_rows
from .schema import META_SCHEMA_VERSIONS, META_START_FIELDS, file_names, why_no_event

if TYPE_CHECKING:
    import networkx
    import pandas

__all__ = ["Damage", "Dataset", "read"]

# The `runs` frame: the start record's fields, then what other records add for convenience.
_ENVELOPE = ("schema_version", "event", "chain")
RUN_COLUMNS = tuple(f.name for f in META_START_FIELDS if f.name not in _ENVELOPE)
_END_COLUMNS = (
    *("ended_at", "seconds", "num_configs", "counts", "best", "error", "unwritten"),
    *("num_rows", "rows_hash", "span_hash", "rows_end"),
)
_DRAWN_COLUMNS = (
    *("hardware_name", "capability", "ended", "best_perf_ms", "best_sample_id"),
    *("line", "end_line"),
)
_BOOKKEEPING = ("line", "end_line", "num_rows", "rows_hash", "span_hash", "rows_end")
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
    graph_reader: GraphReader
    gaps: list[Damage] = field(default_factory=list)  # records that do not follow the previous line

    @property
    def ir_lines(self) -> dict[str, Place]:
        """Return where each graph's line is in the IR file, by ir_id."""
        return self.graph_reader.places

    def record(self, ir_id: str) -> IrGraphRecord:
        """Return an IR graph record as it was added. ValueError if it is missing or damaged."""
        if ir_id not in self.ir_lines:
            raise ValueError(f"{self.base}.ir.jsonl has no graph {ir_id!r}")
        return self.graph_reader.record(ir_id)

    def graph(self, ir_id: str) -> networkx.MultiDiGraph:
        return to_networkx(self.record(ir_id))

    def session_of(self, run: str) -> str:
        """Find the session that `run` names: a run_id or session, or the start of either."""
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
        """Return the rows of one session; ValueError if `run` was repeated and names several."""
        return self.rows[self.rows.session == self.session_of(run)]

    def join(self) -> pandas.DataFrame:
        """Return one table: every attempt that ended or that a crash left open, with its run.

        Nested fields of the run are JSON text, so that any table format takes them.
        """
        ended = self.rows[self.rows.status != "started"]
        started = self.rows[self.rows.status == "started"]
        keys = ["session", "config_index"]
        left_open = ~started.set_index(keys).index.isin(ended.set_index(keys).index)
        lines = ended.index.append(started.index[left_open]).sort_values()
        runs = self.runs.drop(columns=["kernel_id", "world", *_BOOKKEEPING])
        runs = runs.rename(columns={"ir_id": "run_ir_id", "error": "run_error"})
        for column in _NESTED:
            # A category, so that a kernel's source is kept once, not with each of its million rows.
            runs[column] = runs[column].map(_json_text).astype("category")
        rows = self.rows.loc[lines].reset_index()
        rows = rows.astype({"run_id": "string", "session": "string"})
        return rows.merge(runs, on=["run_id", "session"], how="left")


def read(
    base: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> Dataset:
    """Read all that is whole in `<base>.csv`, `.meta.jsonl` and `.ir.jsonl`; see `damage`.

    Raises ValueError if there is no such base, or its CSV has other columns. `progress` is called
    with (bytes done, bytes in all).
    """
    _require_pandas()
    base = os.fspath(base)
    sizes = {name: _size(name) for name in file_names(base) if os.path.lexists(name)}
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
    gaps: list[Damage] = []
    rows = load_rows(csv_path, damage) if csv_path in sizes else empty_rows()
    advance(sizes.get(csv_path, 0))
    found = [
        read_records(path, versions, damage, gaps, advance) if path in sizes else []
        for path, versions in ((meta_path, META_SCHEMA_VERSIONS), (ir_path, IR_LINE_VERSIONS))
    ]
    runs = _load_runs(meta_path, found[0], damage)
    graphs, reader = _load_graphs(ir_path, found[1], damage)
    return Dataset(base, rows, runs, graphs, damage, reader, gaps)


def _size(path: str) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return status.st_size


def _require_pandas() -> None:
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        text = f"reading a dataset needs {error.name}: pip install pandas pyarrow"
        raise ImportError(text) from error


def _load_runs(path: str, lines: Iterable[Line], damage: list[Damage]) -> pandas.DataFrame:
    starts: dict[str, dict[str, Any]] = {}
    for line in lines:
        wrong = why_no_event(line.record) or _add_event(starts, line)
        if wrong is not None:
            damage.append(Damage(path, line.number, wrong))
    return _runs_frame(list(starts.values()))


def _add_event(starts: dict[str, dict[str, Any]], line: Line) -> str | None:
    """Add a record to its run, or return why it belongs to none."""
    record, session = line.record, line.record["session"]
    known = starts.get(session)
    if record["event"] == "end":
        if known is None or known["run_id"] != record["run_id"]:
            return f"session {session} ends but did not start"
        if known["ended"]:
            return f"session {session} ended on line {known['end_line']} already"
        known.update({name: record.get(name) for name in _END_COLUMNS})
        best = record["best"] or {}
        known.update(best_perf_ms=best.get("perf_ms"), best_sample_id=best.get("sample_id"))
        known.update(ended=True, end_line=line.number)
        return None
    if known is not None:
        return f"session {session} started on line {known['line']} already"
    hardware = record["hardware"] or {}
    starts[session] = {
        **{name: record[name] for name in RUN_COLUMNS},
        "hardware_name": _text(hardware.get("name")),
        "capability": _text(hardware.get("capability")),
        "ended": False,
        "line": line.number,
    }
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _runs_frame(records: list[dict[str, Any]]) -> pandas.DataFrame:
    import pandas as pd

    columns = (*RUN_COLUMNS, *_END_COLUMNS, *_DRAWN_COLUMNS)
    known = [{column: _shown(record.get(column)) for column in columns} for record in records]
    frame = pd.DataFrame(known, columns=list(columns))
    texts = ["run_id", "kernel_id", "session", "kernel_name", "backend", "ir_id", "error"]
    strings = dict.fromkeys([*texts, "rows_hash", "span_hash"], "string")
    numbers = {"seconds": "float64", "best_perf_ms": "float64", "num_configs": "Int64"}
    counts = dict.fromkeys(("unwritten", "num_rows", "rows_end", "end_line"), "Int64")
    return frame.astype({**strings, **numbers, **counts, "ended": bool})


def _load_graphs(
    path: str, lines: Iterable[Line], damage: list[Damage]
) -> tuple[pandas.DataFrame, GraphReader]:
    """Return a summary of each graph, and the reader of the graphs themselves."""
    import pandas as pd

    reader = GraphReader(path)
    summaries = []
    for line in lines:
        wrong = why_no_graph(line.record)
        if wrong is None and line.record["ir_id"] in reader.places:
            wrong = f"ir_id {line.record['ir_id']!r} is missing or repeated"
        if wrong is None:
            reader.places[line.record["ir_id"]] = Place(line.offset, line.length)
            summaries.append((*_summary(line.record), line.number))
        else:
            damage.append(Damage(path, line.number, wrong))
    return pd.DataFrame(summaries, columns=list(GRAPH_COLUMNS)), reader


def _summary(record: dict[str, Any]) -> tuple[Any, ...]:
    whole = record["schema_version"] == 1
    names = record["graph"] if whole else record
    shown = [_shown(_text(names.get(key))) for key in ("frontend", "kernel_name")]
    parts = ("nodes", "links")
    counts = [len(record[part]) if whole else record[f"num_{part}"] for part in parts]
    return (record["ir_id"], *shown, _shown(record.get("run_id")), *counts)


def _shown(value: Any) -> Any:
    """Escape lone surrogates (of a file's name that is not UTF-8), which pandas refuses."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _json_text(value: Any) -> str | None:
    return canonical_json(value) if isinstance(value, (dict, list)) else None
