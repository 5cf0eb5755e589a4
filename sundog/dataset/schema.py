"""The fields of the three files, each with its type and meaning: docs/dataset.md is tested on it.

A CSV file's version is its header; each line of `.meta.jsonl` and `.ir.jsonl` has `schema_version`.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "CSV_COLUMNS",
    "CSV_FIELDS",
    "META_END_FIELDS",
    "META_SCHEMA_VERSION",
    "META_START_FIELDS",
    "STATUSES",
    "csv_header",
    "file_names",
]

# Readers gate on record.get("schema_version", 0); raise it when a field changes its meaning.
META_SCHEMA_VERSION = 1

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
    Field("schema_version", "int", "1"),
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
)

META_END_FIELDS = (
    Field("schema_version", "int", "1"),
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
)


def csv_header() -> str:
    """Return the first line of a CSV file."""
    return ",".join(CSV_COLUMNS) + "\n"


def file_names(base: str) -> tuple[str, str, str]:
    """The CSV, metadata and IR files of a base; its dots stay."""
    return f"{base}.csv", f"{base}.meta.jsonl", f"{base}.ir.jsonl"
