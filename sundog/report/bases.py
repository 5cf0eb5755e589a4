"""A dataset's base as sections: each tuning run, and the IR graphs of its best and first configs.

A graph keeps what a page shows of it: operations inside operations, the data between them, their
types and attributes as text, and the source line of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["base_of", "read_base"]

_SUFFIXES = (".csv", ".meta.jsonl", ".ir.jsonl")
_MOST_RUNS, _MOST_ROWS, _MOST_GRAPHS, _MOST_NODES = 24, 20_000, 8, 4000
_SHOWN = 300  # characters of a detail


def base_of(path: str) -> str | None:
    """Return the base that a path names, by itself or by one of its files; None: it names none."""
    for suffix in _SUFFIXES:
        if path.endswith(suffix):
            return path.removesuffix(suffix)
    there = any(os.path.isfile(path + suffix) for suffix in _SUFFIXES)
    return path if there and not os.path.isfile(path) else None


def read_base(base: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kinds and data of a dataset's sections."""
    from ..dataset import read

    data = read(base)
    if not len(data.rows) and not len(data.graphs):
        raise ValueError(f"{base} is a dataset without a row: nothing was tried")
    damage = [str(each) for each in data.damage[:20]]
    runs = [_run(data, run) for run in data.runs.to_dict("records")[-_MOST_RUNS:]]
    if runs:
        left_out = max(len(data.runs) - _MOST_RUNS, 0)
        yield "tuning", {"runs": runs, "damage": damage, "left_out": left_out}
    graphs = list(_graphs(data))
    if graphs:
        yield "ir", {"graphs": graphs, "left_out": max(len(data.graphs) - len(graphs), 0)}


def _run(data: Any, run: dict[str, Any]) -> dict[str, Any]:
    rows = data.rows[(data.rows.session == run["session"]) & (data.rows.status != "started")]
    rows = rows.head(_MOST_ROWS)
    arguments = [a for a in run["arguments"] or [] if isinstance(a, dict)]
    return {
        "session": run["session"], "kernel": run["kernel_name"],
        "problem": ",".join(f"{a.get('name')}={a.get('value', a.get('shape'))}" for a in arguments),
        "hardware": run["hardware_name"], "backend": run["backend"], "world": _plain(run["world"]),
        "seconds": _plain(run["seconds"]), "started_at": str(run["started_at"]),
        "versions": run["versions"] or {}, "search": run["settings"] or {},
        "rows": {
            "time_s": [_plain(each) for each in rows.timestamp_s],
            "status": rows.status.tolist(),
            "ms": [_plain(each) for each in rows.perf_ms],
            "low_ms": [_plain(each) for each in rows.p10_ms],
            "high_ms": [_plain(each) for each in rows.p90_ms],
            "compile_s": [_plain(each) for each in rows.compile_time_s],
            "config": [_loaded(each) for each in rows.config],
            "error": [each[:_SHOWN] for each in rows.error],
        },
    }  # fmt: skip


def _plain(number: Any) -> float | int | None:
    """A number without numpy's type; None for one that is missing."""
    try:
        found = float(number)
    except (TypeError, ValueError):
        return None
    if found != found:
        return None
    return int(found) if found.is_integer() else found


def _loaded(text: Any) -> dict[str, Any]:
    found = json.loads(text) if isinstance(text, str) and text else {}
    return found if isinstance(found, dict) else {}


def _graphs(data: Any) -> Iterator[dict[str, Any]]:
    """Of each run the graphs of its fastest and of its first config; a run's own if it has one."""
    seen: set[str] = set()
    newest = data.runs.to_dict("records")[::-1]
    one_each = {run["kernel_name"]: run for run in reversed(newest)}
    for run in [*one_each.values(), *newest]:
        rows = data.rows[(data.rows.session == run["session"]) & (data.rows.ir_id != "")]
        timed = rows[rows.status == "ok"].sort_values("perf_ms")
        for row in [*timed.head(1).to_dict("records"), *rows.head(1).to_dict("records")]:
            for ir_id in row["ir_id"].split():
                if ir_id not in seen and ir_id in data.ir_lines and len(seen) < _MOST_GRAPHS:
                    seen.add(ir_id)
                    record = data.record(ir_id)
                    about = {"config": _loaded(row["config"]), "ms": _plain(row["perf_ms"])}
                    yield about | {"run": run["kernel_name"]} | graph_of(record, run)


def graph_of(record: Any, run: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of an IR record."""
    owner = _owners(record)
    nodes = [
        {"id": node["id"], "label": _label(node), "parent": owner.get(node["id"]),
         "detail": _detail(node), "at": _place(node)}
        for node in record["nodes"][:_MOST_NODES]
        if node.get("node_kind") != "block"
    ]  # fmt: skip
    known = {node["id"] for node in nodes}
    flows = ("data", "region", "result", "carried", "symbol")
    edges = [
        [link["source"], link["target"], link["edge_kind"]]
        for link in record["links"]
        if link["edge_kind"] in flows and {link["source"], link["target"]} <= known
    ]
    graph = record["graph"]
    return {
        "ir_id": record["ir_id"], "kernel": str(graph.get("kernel_name")),
        "stage": str(graph.get("stage") or graph.get("frontend")), "nodes": nodes, "edges": edges,
        "source": _source(record, run["kernel_source"] or []),
        "left_out": max(len(record["nodes"]) - _MOST_NODES, 0),
    }  # fmt: skip


def _owners(record: Any) -> dict[str, str]:
    """By node: the operation, or Helion's graph, whose region it stands in."""
    of_block = {e["target"]: e["source"] for e in record["links"] if e["edge_kind"] == "region"}
    owners = {
        e["target"]: of_block[e["source"]]
        for e in record["links"]
        if e["edge_kind"] in ("contains", "argument") and e["source"] in of_block
    }
    calls = {e["target"]: e["source"] for e in record["links"] if e["edge_kind"] == "call"}
    body = {  # Helion: a graph's nodes belong to the node that calls the graph
        node["graph_id"]: calls[node["id"]]
        for node in record["nodes"]
        if node["id"] in calls and "graph_id" in node
    }
    helion = {n["id"]: body[n["graph_id"]] for n in record["nodes"] if n.get("graph_id") in body}
    return owners | helion


def _label(node: dict[str, Any]) -> str:
    if node.get("node_kind") == "argument":
        return str(node.get("location", {}).get("name") or node["id"])
    return str(node.get("op") or node.get("target") or node.get("name") or node["id"])


def _detail(node: dict[str, Any]) -> dict[str, str]:
    hidden = ("id", "node_kind", "op", "location", "num_regions", "graph_id", "stack_trace")
    shown = {k: v for k, v in node.items() if k not in hidden and v not in (None, [], {}, "")}
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in shown.items()}
    return {k: v if len(v) <= _SHOWN else f"{v[:_SHOWN]} …" for k, v in texts.items()}


def _place(node: dict[str, Any]) -> list[Any]:
    """File and line of a node; of an inlined one that of the kernel's call; [] if not known."""
    location = node.get("location")
    if isinstance(node.get("source_loc"), str):  # Helion: file:line
        file, _, line = node["source_loc"].rpartition(":")
        return [file, int(line)] if line.isdecimal() else []
    while isinstance(location, dict):
        if location.get("kind", "file") == "file" and "line" in location:
            return [str(location.get("file")), int(location["line"])]
        inner = location.get("caller") or location.get("child") or location.get("parts")
        location = inner[0] if isinstance(inner, list) and inner else inner
    return []


def _source(record: Any, sources: list[dict[str, Any]]) -> dict[str, Any]:
    """The kernel's own lines, by file: {file: {first, lines}}."""
    found: dict[str, Any] = {}
    for source in sources:
        file, lines = str(source.get("path")), str(source.get("text", "")).split("\n")
        first = _first_line(record, file, lines)
        if file not in found and first is not None:
            found[file] = {"first": first, "lines": lines}
    return found


def _first_line(record: Any, file: str, lines: list[str]) -> int | None:
    """Find where a function begins in its file: Triton says it, Helion has columns to match."""
    here = [node for node in record["nodes"] if _place(node)[:1] == [file]]
    heads = [_place(node)[1] for node in here if node.get("op") == "tt.func"]
    if heads:
        return min(heads)
    spans = {tuple(node["source_span"]) for node in here if node.get("source_span")}
    lowest = min((span[0] for span in spans), default=0)
    fitting = [
        first
        for first in range(max(lowest - len(lines) + 1, 1), lowest + 1)
        if all(_fits(lines, first, span) for span in spans)
    ]
    return fitting[0] if len(fitting) == 1 else None


def _fits(lines: list[str], first: int, span: tuple[int, ...]) -> bool:
    """Whether an expression can stand at (line, column) to (line, column) of this text."""
    begin, left, end, right = span
    if end - first >= len(lines) or right > len(lines[end - first]):
        return False
    before, after = lines[begin - first][:left], lines[begin - first][left:]
    return after[:1].strip() != "" and not before[-1:].isalnum()
