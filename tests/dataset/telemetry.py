"""A made-up run, its graph, and the files as plain Python: what the telemetry tests share."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from sundog.dataset import RunInfo, ir_id_of


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
