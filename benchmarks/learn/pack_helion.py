"""`python -m benchmarks.learn pack-helion BASE data/h200 NAME`: make a shard of Helion's tunings.

BASE is what `sundog.dataset.helion.record_autotuning` wrote. Helion keeps one time of a config and
nothing of the compiled kernel, so the columns that describe launch, compiled kernel, samples and
clocks are empty. The device IR of a task stands in the column `device_ir`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas

from sundog.dataset.ir_graph import canonical_json
from sundog.dataset.reader import Dataset, read
from sundog.dataset.shards import DEVICE_IR, SPLITS, in_test

from .pack import checksums, shard_paths, write
from .subject import shape_kind

FAMILIES = {
    "add": "elementwise", "attention": "attention", "matmul": "matmul", "softmax": "softmax",
}  # fmt: skip
_EMPTY = {  # columns of the other shards that Helion's record does not have
    **dict.fromkeys(("relative_error", "bytes", "flops", "trips", "occupancy", "power_w"), "f8"),
    **dict.fromkeys(("grid_x", "grid_y", "grid_z"), "Int64"),
    **dict.fromkeys(("registers", "spills", "shared"), "Int32"),
    **dict.fromkeys(("sm_mhz", "memory_mhz", "temperature_c"), "Int32"),
    **dict.fromkeys(("ttir", "ttgir"), "str"),
    "samples_ns": "object",
}
_OUT_OF_RESOURCES = "OutOfResources"


def pack_helion(base: Path, folder: Path, name: str) -> str:
    """Write NAME.rows.parquet and NAME.ir.parquet; return what they hold."""
    paths = shard_paths(folder, name)
    data = read(base)
    if data.damage:
        raise ValueError(f"{data.damage[0]}: repair {base} before its rows are published")
    rows, ir = rows_frame(data, name), ir_frame(data)
    runs = [json.loads(line) for line in Path(f"{base}.meta.jsonl").read_text().splitlines()]
    write(rows, paths[0], {"run": json.dumps(runs)})
    write(ir, paths[1], {})
    checksums(folder)
    return f"{len(rows)} rows, {len(ir)} graphs"


def rows_frame(data: Dataset, name: str) -> pandas.DataFrame:
    """Return a row for each time or failure, in the columns of the other shards."""
    runs = {run["session"]: run for run in data.runs.to_dict("records")}
    begin = min(pandas.Timestamp(run["started_at"]) for run in runs.values())
    ended = data.rows[data.rows.status != "started"].to_dict("records")
    frame = pandas.DataFrame([_row(row, runs[row["session"]], begin) for row in ended])
    frame.insert(0, "collection", name)
    for column, kind in _EMPTY.items():
        frame[column] = pandas.Series([None] * len(frame), dtype=kind)
    for split in SPLITS:
        frame[f"test_{split}"] = [in_test(split, row) for row in frame.to_dict("records")]
    frame["median_ns"] = frame["median_ns"].round().astype("Int32")
    frame["at_s"] = frame["at_s"].round(3).astype("float32")
    return frame.sort_values(["kernel", "dtype", "shape", "config", "repeat"], ignore_index=True)


def _row(row: dict[str, Any], run: dict[str, Any], begin: pandas.Timestamp) -> dict[str, Any]:
    tensors = [each for each in run["arguments"] if each["kind"] == "tensor"]
    shape = {each["name"]: each["shape"] for each in tensors}
    sizes = {f"{name} {n}": size for name in shape for n, size in enumerate(shape[name])}
    config, error = json.loads(row["config"]), row["error"] or ""
    after = (pandas.Timestamp(run["started_at"]) - begin).total_seconds()
    return {
        "kernel": f"helion_{run['kernel_name']}", "function": run["kernel_name"],
        "family": FAMILIES[run["kernel_name"]], "shape": json.dumps(shape, sort_keys=True),
        "shape_kind": shape_kind(sizes), "dtype": tensors[0]["dtype"].removeprefix("torch."),
        "config": json.dumps(config, sort_keys=True), "repeat": row["repeat"], "control": False,
        "status": "out_of_resources" if _OUT_OF_RESOURCES in error else row["status"],
        "median_ns": row["perf_ms"] * 1e6, "compile_s": row["compile_time_s"],
        "num_warps": config["num_warps"], "num_stages": config["num_stages"],
        DEVICE_IR: row["ir_id"] or run["ir_id"], "error": error,
        "at_s": after + row["timestamp_s"],
    }  # fmt: skip


def ir_frame(data: Dataset) -> pandas.DataFrame:
    """Return each graph as the text of its record, which `KernelData.record` reads."""
    lines = [
        {"id": each.ir_id, "stage": DEVICE_IR, "kernel": f"helion_{each.kernel_name}",
         "text": canonical_json(data.record(each.ir_id))}
        for each in data.graphs.itertuples()
    ]  # fmt: skip
    return pandas.DataFrame(lines).sort_values(["kernel", "id"], ignore_index=True)
