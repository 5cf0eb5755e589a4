"""The sections of a report: what a file of ours holds, recognised by its content, and checked.

Every file becomes sections of plain data, which the page draws. A file that is damaged, foreign,
too large or of a newer schema is a ValueError with one sentence.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .bases import base_of, read_base

__all__ = ["CHECK_SCHEMA_VERSION", "Section", "read_sections", "section"]

CHECK_SCHEMA_VERSION = 1  # of `sundog check --json`
MOST_BYTES = 256 << 20  # of one file


@dataclass(frozen=True)
class Section:
    """What one file, or one part of it, says. `kind` chooses how the page draws it."""

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
    """Recognise what a command writes as JSON. ValueError: it is not ours, or newer than this."""
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
    return Section(kind, name, _SHRINK.get(kind, _same)(content, name))


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


def _same(content: dict[str, Any], name: str) -> dict[str, Any]:
    return content


def _slowest(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Keep of a benchmark's samples the slowest rank's time, which is what counts."""
    rows = []
    for row in content["rows"]:
        times = row.get("times") or {}
        samples = [max(ranks) for ranks in times.get("samples_ns", []) if ranks]
        rows.append({k: v for k, v in row.items() if k != "times"} | {"samples_ns": samples})
    return content | {"rows": rows}


_ARGUMENTS = ("what", "value", "peer", "ended_by")


def _columns_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a trace's spans and arrows as columns; ValueError if there is nothing to draw."""
    spans: dict[str, list[Any]] = {
        key: [] for key in ("rank", "program", "kind", "begin", "length", *_ARGUMENTS)
    }
    starts: dict[Any, list[Any]] = {}
    arrows: list[list[Any]] = []
    try:
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                _add_span(spans, event)
            elif event["ph"] in "sf":
                end = [event["pid"], event["tid"], event["ts"]]
                if event["ph"] == "s":
                    starts[event["id"]] = end
                elif event["id"] in starts:
                    arrows.append([*starts.pop(event["id"]), *end])
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
    """Read a file of ours, or the dataset whose base, or one of whose files, is named."""
    base = base_of(path)
    if base is not None:
        return [Section(kind, Path(base).name, data) for kind, data in read_base(base)]
    return [section(_load(path), Path(path).name)]


def _load(path: str) -> Any:
    text = read_text(path)
    try:
        return json.loads(text, parse_constant=lambda word: None)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply: no file of ours is") from None
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
        raise ValueError(f"{path} is not text, so it is no file of ours") from None
