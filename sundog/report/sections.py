"""The sections of a report: the content of sundog's files, recognised and checked.

Every file becomes sections of plain data, which the page draws. A file that is damaged, foreign,
too large or of a newer schema is a ValueError with one sentence.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECK_SCHEMA_VERSION = 1  # of `sundog check --json`
MOST_BYTES = 256 << 20  # of one file
_SUFFIXES = (".csv", ".meta.jsonl", ".ir.jsonl")
_MOST_RUNS, _MOST_ROWS, _MOST_GRAPHS, _MOST_NODES = 24, 20_000, 8, 4000
_SHOWN = 300  # characters of a detail


@dataclass(frozen=True)
class Section:
    """The content of a file, or of a part of it. `kind` chooses how the page draws it."""

    kind: str
    name: str
    data: Any


# By kind: the newest schema that the page knows, and what must be there.
_KNOWN: dict[str, tuple[int, dict[str, type]]] = {
    "check": (CHECK_SCHEMA_VERSION, {"findings": list, "schedules": int, "runs": list}),
    "bench": (1, {"op": str, "rows": list, "machine": dict}),
    "probe": (1, {"rows": list, "machine": dict}),
    "summary": (1, {"ranks": list, "title": str}),
    "trace": (1, {"traceEvents": list}),
    "isa": (1, {"kernels": list}),
    "predict": (1, {"points": list}),
}
_OF_KIND = {"op": "bench", "check": "check", "probe": "probe", "trace": "summary"}
_OF_ITEMS = {
    "isa": ("registers", "target", "marks"),
    "predict": ("machine", "problem", "best", "times"),
}
_LISTS = {"isa": "kernels", "predict": "points"}


def section(content: Any, name: str) -> Section:
    """Recognise a command's JSON. Raise ValueError if it is foreign, or newer than this version."""
    kind, content = _recognise(content, name)
    newest, needed = _KNOWN[kind]
    version = content.get("schema_version", 1)
    if not isinstance(version, int) or version > newest:
        raise ValueError(
            f"{name} has schema version {version}, and this sundog knows {kind} up to {newest}: "
            "use the sundog that wrote it, or a newer one"
        )
    for key, type_ in needed.items():
        if not isinstance(content.get(key), type_):
            raise ValueError(f"{name} looks like {kind}, but has no {type_.__name__} {key!r}")
    shrink = _SHRINK.get(kind)
    return Section(kind, name, shrink(content, name) if shrink else content)


def _recognise(content: Any, name: str) -> tuple[str, dict[str, Any]]:
    if isinstance(content, dict) and "traceEvents" in content:
        return "trace", content
    if isinstance(content, dict) and content.get("kind") in _OF_KIND:
        return _OF_KIND[content["kind"]], content
    if isinstance(content, dict) and "findings" in content and "mutants" in content:
        return "check", {"schema_version": 0, "runs": [], **content}  # without a schema
    if isinstance(content, list) and content and all(isinstance(each, dict) for each in content):
        for kind, keys in _OF_ITEMS.items():
            if all(key in each for each in content for key in keys):
                return kind, {_LISTS[kind]: content}
    raise ValueError(
        f"{name} is JSON, but not of check, trace, bench, probe, isa or predict: give a file that "
        "one of them wrote with --json, a trace, or the base of a dataset"
    )


def _slowest(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Keep only the slowest rank's time of a benchmark's samples, which is what counts."""
    rows = []
    for row in content["rows"]:
        times = row.get("times") or {}
        samples = [max(ranks) for ranks in times.get("samples_ns", []) if ranks]
        rows.append({k: v for k, v in row.items() if k != "times"} | {"samples_ns": samples})
    return content | {"rows": rows}


_ARGUMENTS = ("what", "value", "peer", "ended_by")


def _columns_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a trace's spans and arrows as columns. Raise ValueError if nothing can be drawn."""
    try:
        spans, arrows = _spans_and_arrows(content["traceEvents"])
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{name} has trace events that sundog did not write: give a file of `sundog trace`"
        ) from None
    if not spans["rank"]:
        raise ValueError(
            f"{name} is an empty trace: it has no span. Trace an op with trace points, such as "
            "all_gather"
        )
    kinds = list(dict.fromkeys(spans["kind"]))
    number = {kind: at for at, kind in enumerate(kinds)}
    spans["kind"] = [number[kind] for kind in spans["kind"]]
    about = content.get("otherData", {})
    unit = "us" if about.get("time") == "ns" else str(about.get("time", "us"))
    return {
        "title": str(about.get("op", name)), "unit": unit, "clock": str(about.get("clocks", "")),
        "dropped": int(about.get("dropped", 0)), "kinds": kinds, "spans": spans, "arrows": arrows,
    }  # fmt: skip


def _spans_and_arrows(events: Any) -> tuple[dict[str, list[Any]], list[list[Any]]]:
    spans: dict[str, list[Any]] = {
        key: [] for key in ("rank", "program", "kind", "begin", "length", *_ARGUMENTS)
    }
    starts: dict[Any, list[Any]] = {}
    arrows: list[list[Any]] = []
    for event in events:
        if event["ph"] == "X":
            _add_span(spans, event)
        elif event["ph"] in "sf":
            end = [event["pid"], event["tid"], event["ts"]]
            if event["ph"] == "s":
                starts[event["id"]] = end
            elif event["id"] in starts:
                arrows.append([*starts.pop(event["id"]), *end])
    return spans, arrows


def _add_span(spans: dict[str, list[Any]], event: dict[str, Any]) -> None:
    given = event["args"]
    numbers = event["pid"], event["tid"], event["ts"], event["dur"]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError
    for key, value in zip(("rank", "program", "begin", "length"), numbers, strict=True):
        spans[key].append(value)
    spans["kind"].append(str(event["name"]))
    for key in _ARGUMENTS:
        spans[key].append(given[key])


_SHRINK: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "bench": _slowest,
    "trace": _columns_of,
}


def read_sections(path: str) -> list[Section]:
    """Read a file of sundog's, or a dataset by its base or one of its files."""
    base = base_of(path)
    if base is not None:
        return [Section(kind, Path(base).name, data) for kind, data in read_base(base)]
    return [section(_load(path), Path(path).name)]


def _load(path: str) -> Any:
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=lambda word: None)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for a file that sundog wrote") from None
    except json.JSONDecodeError as error:
        cut = " It ends too early: was the command that wrote it interrupted?"
        more = cut if error.pos >= len(text.rstrip()) - 1 else ""
        raise ValueError(f"{path} is not JSON: {error}.{more}") from None


def read_text(path: str) -> str:
    """Read a file of bounded size, unpacked if its name ends in .xz."""
    try:
        if not os.path.isfile(path):
            reason = "is not a file" if os.path.exists(path) else "does not exist"
            raise ValueError(f"{path} {reason}")
        size = os.path.getsize(path)
        with lzma.open(path) if path.endswith(".xz") else open(path, "rb") as file:
            content = b"" if size > MOST_BYTES else file.read(MOST_BYTES + 1)
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if size > MOST_BYTES or len(content) > MOST_BYTES:
        raise ValueError(
            f"{path} has {max(size, len(content)):,} bytes or more, and a report takes files up to "
            f"{MOST_BYTES:,}: record fewer programs, events or schedules"
        )
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text, so sundog did not write it") from None


# A dataset's base: each tuning run, and the IR graphs of its best and first configs. A graph keeps
# what a page shows: nested operations, the data between them, their types and attributes as text,
# and the source line of each.


def base_of(path: str) -> str | None:
    """Return the base that a path names, by itself or by one of its files, or None."""
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
    """Return a number without numpy's type; None for one that is missing."""
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
    """Yield the graphs of each run's fastest and first config, and its own if it has one."""
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
    """Return what the page shows of an IR record."""
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
        "ir_id": record["ir_id"],
        "kernel": str(graph.get("kernel_name")),
        "stage": str(graph.get("stage") or graph.get("frontend")),
        "nodes": nodes,
        "edges": edges,
        "source": _source(record, run["kernel_source"] or []),
        "left_out": max(len(record["nodes"]) - _MOST_NODES, 0),
    }


def _owners(record: Any) -> dict[str, str]:
    """Return, for each node, the operation or Helion graph whose region contains it."""
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
    """Return file and line of a node, or of the kernel's call if inlined; [] if unknown."""
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
    """Return the kernel's own lines, by file: {file: {first, lines}}."""
    found: dict[str, Any] = {}
    for source in sources:
        file, lines = str(source.get("path")), str(source.get("text", "")).split("\n")
        first = _first_line(record, file, lines)
        if file not in found and first is not None:
            found[file] = {"first": first, "lines": lines}
    return found


def _first_line(record: Any, file: str, lines: list[str]) -> int | None:
    """Find where a function begins in its file: Triton records it, Helion has columns to match."""
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
    """Return whether (line, column) to (line, column) of this text can be an expression."""
    begin, left, end, right = span
    if end - first >= len(lines) or right > len(lines[end - first]):
        return False
    before, after = lines[begin - first][:left], lines[begin - first][left:]
    return after[:1].strip() != "" and not before[-1:].isalnum()
