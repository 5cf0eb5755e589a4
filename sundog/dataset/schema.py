"""The fields of the three files, each with its type and meaning: docs/dataset.md is tested on it.

A CSV file's version is its header; each line of `.meta.jsonl` and `.ir.jsonl` has `schema_version`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

# Readers gate on record.get("schema_version", 0); raise it when a field changes its meaning.
META_SCHEMA_VERSION = 2  # 1 had no num_rows, rows_hash, span_hash, rows_end and chain
META_SCHEMA_VERSIONS = (1, 2)

# What a row may say. All but `started` end an attempt; `ok` alone has a time.
STATUSES = (
    "started",
    "ok",
    "compiled",
    "error",
    "timeout",
    "accuracy_error",
    "peer_compilation_fail",
    "filtered",
    "deduplicated",
    "source_rejected",
)


class Field(NamedTuple):
    name: str
    type: str
    meaning: str


# The first eleven are the specification's, in its order; ours follow. Append only.
CSV_FIELDS = (
    Field("run_id", "text", "joins the three files; empty where the run has no metadata"),
    Field("kernel_id", "text", "groups runs of one kernel; empty where the run has no metadata"),
    Field("sample_id", "text", "hash of run_id and config"),
    Field("timestamp_s", "float", "seconds since the run started"),
    Field("config_index", "int", "number of the configuration in its session, from 0"),
    Field("generation", "int", "the search's generation; empty where it has none"),
    Field("status", "text", "one of the statuses below"),
    Field("perf_ms", "float", "what the search compares: the median of samples unless given"),
    Field("compile_time_s", "float", "seconds that compiling took"),
    Field("decorator", "text", "the configuration as a person would write it"),
    Field("config", "JSON", "the configuration"),
    Field("session", "text", "one tuning run in time; two runs with one run_id differ in it"),
    Field("repeat", "int", "0 for the first measurement of a configuration, 1 for the next, ..."),
    Field("num_samples", "int", "how many timings the percentiles are of"),
    Field("min_ms", "float", "fastest timing"),
    Field("p10_ms", "float", "10th percentile, linear between neighbours"),
    Field("p50_ms", "float", "median"),
    Field("p90_ms", "float", "90th percentile"),
    Field("max_ms", "float", "slowest timing"),
    Field("world", "int", "number of ranks"),
    Field("timer", "text", "what measured; `synthetic` where the time is invented"),
    Field("error", "text", "why it failed; a line break is written \\n, a backslash \\\\"),
    Field("ir_id", "text", "the IR graphs of this configuration, a space between two"),
    Field("metrics", "JSON", "further figures: registers, spills, shared bytes, ..."),
)
CSV_COLUMNS = tuple(field.name for field in CSV_FIELDS)

META_START_FIELDS = (
    Field("schema_version", "int", "2; 1 in files of sundog before November 2026"),
    Field("event", "text", "`start`"),
    Field("run_id", "text", "hash of all that the run's times may depend on, but the config"),
    Field("kernel_id", "text", "hash of kernel_source and codegen_settings"),
    Field("session", "text", "random; joins the rows and the end record of this run in time"),
    Field("started_at", "text", "UTC time, ISO 8601"),
    Field("kernel_name", "text", "the kernel's name"),
    Field("kernel_source", "list", "the kernel, then all that it calls: name, path, text, ..."),
    Field("codegen_settings", "object", "settings that change the code"),
    Field("arguments", "list", "shape, stride, dtype of tensors; value and type of the rest"),
    Field("settings", "object", "all other settings of the run"),
    Field("world", "int", "number of ranks"),
    Field("backend", "text", "where ranks and memory come from, or the compiler's backend"),
    Field("hardware", "object", "name, capability, SMs, memory, clocks, driver"),
    Field("versions", "object", "of sundog, Python, torch, triton, helion, CUDA, HIP"),
    Field("ir_id", "text", "the run's IR graph where it does not depend on the config, or null"),
    Field("chain", "text", "hash of this line and of the one before it"),
)

META_END_FIELDS = (
    Field("schema_version", "int", "2; 1 in files of sundog before November 2026"),
    Field("event", "text", "`end`"),
    Field("run_id", "text", "as in the start record"),
    Field("session", "text", "as in the start record"),
    Field("ended_at", "text", "UTC time, ISO 8601"),
    Field("seconds", "float", "how long the run took"),
    Field("num_configs", "int", "configurations started"),
    Field("counts", "object", "rows by status"),
    Field("best", "object", "config_index, sample_id, perf_ms, decorator, config; or null"),
    Field("error", "text", "what ended the run early, or null"),
    Field("unwritten", "int", "rows that could not be written (full disk)"),
    Field("num_rows", "int", "rows of this session in the CSV"),
    Field("rows_hash", "text", "sha256 of these rows, each with its newline, in their order"),
    Field("span_hash", "text", "sha256 of all rows from its first to its last, others' too"),
    Field("rows_end", "int", "where the last of them ends in the CSV, in bytes; 0 without rows"),
    Field("chain", "text", "hash of this line and of the one before it"),
)

IR_LINE_FIELDS = (
    Field("schema_version", "int", "2; 1 where the line is the graph itself"),
    Field("ir_id", "text", "hash of graph, nodes and links without run identity"),
    Field("run_id", "text", "the run that found this graph first; others name it by ir_id"),
    Field("frontend", "text", "`triton` or `helion`: who made the graph"),
    Field("kernel_name", "text", "the kernel's name"),
    Field("num_nodes", "int", "nodes of the graph"),
    Field("num_links", "int", "links of the graph"),
    Field("reference", "text", "ir_id of the graph that this one is packed against, or null"),
    Field("depth", "int", "how many references lead to a graph that has none; at most 8"),
    Field("packed", "text", "the graph, in base85"),
    Field("chain", "text", "hash of this line and of the one before it"),
)


def csv_header() -> str:
    """Return the first line of a CSV file."""
    return ",".join(CSV_COLUMNS) + "\n"


def file_names(base: str) -> tuple[str, str, str]:
    """Return the names of the CSV, metadata and IR files of a base; its dots stay."""
    return f"{base}.csv", f"{base}.meta.jsonl", f"{base}.ir.jsonl"


SESSION = re.compile(r"[0-9A-Za-z_.-]{1,64}")
_PYTHON = {"text": str, "int": int, "float": (int, float), "list": list, "object": dict}
_MAY_BE_NULL = frozenset(
    ("kernel_source", "codegen_settings", "arguments", "settings", "backend", "hardware")
    + ("versions", "ir_id", "best", "error")
)
_SINCE_2 = ("num_rows", "rows_hash", "span_hash", "rows_end")


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def why_no_event(record: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a record of `.meta.jsonl`, or None if every field is possible."""
    event, version = record.get("event"), record.get("schema_version")
    fields = META_START_FIELDS if event == "start" else META_END_FIELDS
    names = [f.name for f in fields if not (version == 1 and f.name in _SINCE_2)]
    missing = [name for name in names if name not in record and name != "chain"]
    if event not in ("start", "end") or missing:
        return f"a {str(event)[:40]!r} record without {', '.join(missing[:5]) or 'a known event'}"
    for field in fields:
        value = record.get(field.name)
        if value is None and (field.name in _MAY_BE_NULL or field.name not in record):
            continue
        if not isinstance(value, _PYTHON[field.type]) or isinstance(value, bool):  # type: ignore[arg-type]
            return f"{field.name} is {type(value).__name__}, not {field.type}"
        if not _is_possible(field, value):
            return f"{field.name} {str(value)[:60]!r} is not possible"
    return None


def _is_possible(field: Field, value: Any) -> bool:
    if field.type in ("int", "float"):
        return bool((field.name == "world") <= value < 1 << 63)
    if field.name in ("run_id", "kernel_id", "ir_id", "rows_hash", "span_hash"):
        return is_sha256(value)
    if field.name == "session":
        return SESSION.fullmatch(value) is not None
    if field.name in ("started_at", "ended_at"):
        return _is_time(value)
    inner = _INNER.get(field.name)
    return inner is None or inner(value)


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _is_counts(value: Mapping[str, Any]) -> bool:
    return all(k in STATUSES and type(v) is int and 0 <= v < 1 << 63 for k, v in value.items())


def _is_best(value: Mapping[str, Any]) -> bool:
    index: Any = value.get("config_index")
    time: Any = value.get("perf_ms")
    return (
        type(index) is int
        and 0 <= index < 1 << 63
        and is_sha256(value.get("sample_id"))
        and type(time) in (int, float)
        and 0 <= time <= 1.8e308
        and isinstance(value.get("decorator"), str)
        and "config" in value
    )


def _is_source(value: list[Any]) -> bool:
    names = {"name": str, "path": (str, type(None)), "text": (str, type(None))}
    kinds: dict[str, Any] = {**names, "captures": dict, "options": dict}
    return all(
        isinstance(entry, dict)
        and all(isinstance(entry.get(name, ...), kind) for name, kind in kinds.items())
        for entry in value
    )


def _are_arguments(value: list[Any]) -> bool:
    return all(
        isinstance(entry, dict) and all(isinstance(entry.get(k), str) for k in ("name", "kind"))
        for entry in value
    )


_INNER: dict[str, Callable[[Any], bool]] = {
    "counts": _is_counts,
    "best": _is_best,
    "kernel_source": _is_source,
    "arguments": _are_arguments,
}
