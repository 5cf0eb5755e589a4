"""A made-up run, its graph, and the files as plain Python: what the telemetry tests share."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from sundog.dataset import RunInfo, ir_id_of
from sundog.dataset.graph_file import GraphReader, Place


def info(name: str = "k") -> RunInfo:
    source = [{"name": name, "path": "k.py", "text": name, "captures": {}, "options": {}}]
    return RunInfo(name, source, {}, [], {}, 2, "sim", {"name": "gpu"}, {"triton": "3.7.1"})


def graph(nodes: int = 2) -> dict:
    record = {
        "schema_version": 1,
        "run_id": None,
        "directed": True,
        "multigraph": True,
        "graph": {"frontend": "test", "kernel_name": "k"},
        "nodes": [{"id": i, "target": f"op{i}"} for i in range(nodes)],
        "links": [
            {"source": i, "target": i + 1, "key": 0, "edge_kind": "data"} for i in range(nodes - 1)
        ],
    }
    return {**record, "ir_id": ir_id_of(record)}


def rows_of(base: str | Path) -> list[dict[str, str]]:
    with open(f"{base}.csv", newline="") as file:
        return list(csv.DictReader(file))


def metas_of(base: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(f"{base}.meta.jsonl").read_text().splitlines()]


def graphs_of(base: str | Path) -> list[dict]:
    """The graphs of the IR file in the order of its lines, unpacked."""
    reader = GraphReader(f"{base}.ir.jsonl")
    offset = 0
    for line in Path(f"{base}.ir.jsonl").read_bytes().splitlines(keepends=True):
        reader.places[json.loads(line)["ir_id"]] = Place(offset, len(line))
        offset += len(line)
    return [dict(reader.record(ir_id)) for ir_id in reader.places]


def as_version_1(base: str | Path) -> None:
    """Rewrites the files as sundog wrote them at first: no hashes of lines, and whole graphs."""
    metas, graphs = metas_of(base), graphs_of(base)
    for record in metas:
        record["schema_version"] = 1
        for name in ("chain", "num_rows", "rows_hash", "span_hash", "rows_end"):
            record.pop(name, None)
    for name, records in (("meta", metas), ("ir", graphs)):
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in records]
        Path(f"{base}.{name}.jsonl").write_text("".join(lines))
