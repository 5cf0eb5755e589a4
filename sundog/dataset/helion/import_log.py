"""Import the log that Helion writes by itself: `sundog data import helion BASE`.

With `HELION_AUTOTUNE_LOG=BASE` and `HELION_AUTOTUNE_LOG_DETAILS=1`, Helion 1.5.1 appends to
`BASE.csv`, a row per result, and to `BASE.meta.jsonl`, a record per search: source, settings,
configs, and the device IR as `ir_graph`. Helion has no sessions: a search starts where time goes
backwards. docs/helion.md says what this log lacks. Importing this does not import helion.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..files import Damage, lines_of, open_regular, parse_record, whole_size
from ..identity import RunInfo
from ..ir_graph import IrGraphRecord, ir_id_of
from ..recorder import Recorder, Trial
from ..schema import STATUSES, file_names
from . import CODEGEN_SETTINGS

# The columns of helion 1.5.1; a test compares them with the installed ones.
COLUMNS = (
    *("run_id", "timestamp_s", "config_id", "generation", "status", "perf_ms", "compile_time_s"),
    "config",
)
_NUMBER = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")


@dataclass
class HelionImport:
    """What was found: how many rows and runs were written, and what could not be read."""

    num_rows: int = 0
    num_runs: int = 0
    num_graphs: int = 0
    damage: list[Damage] = field(default_factory=list)


def import_helion(base: str, out: str) -> HelionImport:
    """Write what `BASE.csv` and `BASE.meta.jsonl` of Helion hold to the base `out`.

    Raises ValueError if there is no such log, or if `out` exists: an import is not repeated.
    """
    csv_path, meta_path = f"{base}.csv", f"{base}.meta.jsonl"
    if not os.path.exists(csv_path):
        raise ValueError(f"there is no {csv_path}: give the value of HELION_AUTOTUNE_LOG")
    taken = [path for path in file_names(out) if os.path.exists(path)]
    if taken:
        raise ValueError(f"{taken[0]} exists already: give another --out")
    found = HelionImport()
    records = _records(meta_path, found.damage)
    for rows in _searches(csv_path, found.damage):
        _import_search(rows, records.get(rows[0]["run_id"]), out, found)
    return found


def _records(path: str, damage: list[Damage]) -> dict[str, dict[str, Any]]:
    """Read the metadata by run_id. A search that was repeated adds its configs."""
    found: dict[str, dict[str, Any]] = {}
    if not os.path.exists(path):
        return found
    size, torn = whole_size(path)
    for line in lines_of(path, size + torn):
        record, wrong = parse_record(line.data, (0,))  # Helion's records have no version
        wrong = wrong or _why_no_record(record or {})
        if record is None or wrong:
            damage.append(Damage(path, line.number, wrong))
        elif record["run_id"] in found:
            found[record["run_id"]]["configs"].update(record["configs"])
        else:
            found[record["run_id"]] = record
    return found


def _why_no_record(record: dict[str, Any]) -> str:
    texts = ("run_id", "kernel_name", "kernel_source", "input_shapes", "dtypes", "hardware")
    wrong = [name for name in texts if not isinstance(record.get(name), str)]
    wrong += [] if isinstance(record.get("configs"), dict) else ["configs"]
    return f"not a record of Helion: no usable {', '.join(wrong)}" if wrong else ""


def _searches(path: str, damage: list[Damage]) -> Iterator[list[dict[str, str]]]:
    """Yield the rows of each search, in the order of the file."""
    rows: list[dict[str, str]] = []
    for row in _rows(path, damage):
        is_new = rows and (
            row["run_id"] != rows[-1]["run_id"]
            or float(row["timestamp_s"] or 0) < float(rows[-1]["timestamp_s"] or 0)
        )
        if is_new:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def _rows(path: str, damage: list[Damage]) -> Iterator[dict[str, str]]:
    with open_regular(path):
        pass  # refuse a pipe before it is opened for reading
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        reader = csv.reader(file)
        head = next(reader, [])
        if tuple(head) != COLUMNS:
            raise ValueError(f"{path}:1: not a log of Helion 1.5: {','.join(head)[:120]!r}")
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                damage.append(Damage(path, reader.line_num, f"not a CSV row ({error})"))
                continue
            row = dict(zip(COLUMNS, cells, strict=False))
            if wrong := _why_no_row(cells, row):
                damage.append(Damage(path, reader.line_num, wrong))
            else:
                yield row


def _why_no_row(cells: list[str], row: dict[str, str]) -> str | None:
    if len(cells) != len(COLUMNS):
        return f"{len(cells)} cells instead of {len(COLUMNS)}"
    for name in ("timestamp_s", "perf_ms", "compile_time_s"):
        if row[name] and not _NUMBER.fullmatch(row[name]):
            return f"{name} is not a number: {row[name][:40]!r}"
    return None if row["status"] in STATUSES else f"unknown status {row['status'][:40]!r}"


def _import_search(
    rows: list[dict[str, str]], record: dict[str, Any] | None, out: str, found: HelionImport
) -> None:
    now = 0.0
    graph = None if record is None else _graph(record)
    info = None if record is None else _info(record)
    configs = {} if record is None else record["configs"]
    with Recorder(out, info, graph=graph, clock=lambda: now) as recorder:
        trials: dict[str, Trial] = {}
        for row in rows:
            now = float(row["timestamp_s"] or now)
            name = row["config_id"]
            if name not in trials:
                trials[name] = recorder.start(
                    configs.get(name, {"config": row["config"]}),
                    decorator=row["config"],
                    generation=int(row["generation"]) if row["generation"].isdigit() else None,
                )
            if row["status"] != "started":
                _end(trials[name], row, None if graph is None else graph["ir_id"])
    found.num_rows += len(rows)
    found.num_runs += 1
    found.num_graphs += graph is not None


def _end(trial: Trial, row: dict[str, str], ir_id: str | None) -> None:
    failed = row["status"] in ("error", "timeout", "accuracy_error")
    trial.end(
        row["status"],
        perf_ms=float(row["perf_ms"]) if row["perf_ms"] else None,
        compile_time_s=float(row["compile_time_s"]) if row["compile_time_s"] else None,
        error=f"{row['status']}: Helion's log has no reason" if failed else None,
        ir_id=ir_id,
        timer="helion",
    )


def _info(record: dict[str, Any]) -> RunInfo:
    """Convert Helion's record of a run. Shapes and dtypes are text there, and stay text."""
    settings: Any = record.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    source = {"name": record["kernel_name"], "path": None, "text": record["kernel_source"]}
    arguments = [
        {"name": name, "kind": "value", "type": "str", "value": record[name]}
        for name in ("input_shapes", "dtypes")
    ]
    backend = settings.get("backend")
    return RunInfo(
        kernel_name=record["kernel_name"],
        kernel_source=[{**source, "captures": {}, "options": {}}],
        codegen_settings={name: settings.get(name) for name in CODEGEN_SETTINGS},
        arguments=arguments,
        settings={**settings, "imported_from": "helion", "helion_run_id": record["run_id"]},
        backend=backend if isinstance(backend, str) else None,
        hardware={"name": record["hardware"]},
    )


def _graph(record: dict[str, Any]) -> IrGraphRecord | None:
    """Helion's `ir_graph` in our envelope: `edges` are `links`, and each has a key."""
    graph = record.get("ir_graph")
    if not isinstance(graph, dict) or not isinstance(graph.get("graph"), dict):
        return None
    nodes, edges = graph.get("nodes"), graph.get("edges")
    if not isinstance(nodes, list) or not isinstance(edges, list):
        return None
    if not all(isinstance(item, dict) for item in nodes + edges):
        return None
    found: IrGraphRecord = {
        "schema_version": 1,
        "ir_id": "",
        "run_id": None,
        "directed": True,
        "multigraph": True,
        "graph": {
            **graph["graph"],
            "frontend": "helion-log",
            "kernel_name": record["kernel_name"],
            "input_shapes": record["input_shapes"],
        },
        "nodes": nodes,
        "links": [{**edge, "key": 0} for edge in edges],
    }
    found["ir_id"] = ir_id_of(found)
    return found
