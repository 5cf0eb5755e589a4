"""`python -m benchmarks.learn pack RUN data/h200 NAME`: make a shard of what a run collected.

A shard is written once. Clocks, temperature and power come from the nearest reading of the GPU.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow
import pyarrow.parquet

from sundog.dataset.shards import SPLITS, in_test
from sundog.learn.features import occupancy

from .record import cell_of, read_lines, read_rows, read_xz
from .subject import shape_kind

_COMPILED = ("compile_s", "shared", "ttir", "ttgir")
_CLOCKS = ("sm_mhz", "memory_mhz", "temperature_c", "power_w")
_INTS = ("registers", "spills", "shared", "sm_mhz", "memory_mhz", "temperature_c", "median_ns")


def pack(run: Path, folder: Path, name: str) -> str:
    """Write NAME.rows.parquet and NAME.ir.parquet; return what they hold."""
    paths = shard_paths(folder, name)
    about = json.loads((run / "run.json").read_text().splitlines()[-1])
    if about["clock"] != "gpu":
        raise ValueError(f"{run}: its times are {about['clock']}, not measured")
    rows = rows_frame(run, name)
    known = _known_ir(folder)
    new = [line for line in read_xz(run / "ir.xz") if line["id"] not in known]
    ir = pandas.DataFrame(new, columns=["id", "stage", "kernel", "text"])
    ir = ir.drop_duplicates("id").sort_values(["kernel", "stage", "text"])
    write(rows, paths[0], {"run": json.dumps(about)})
    write(ir, paths[1], {})
    checksums(folder)
    sizes = [path.stat().st_size for path in paths]
    return f"{len(rows)} rows in {sizes[0]} bytes, {len(ir)} modules in {sizes[1]} bytes"


def rows_frame(run: Path, name: str) -> pandas.DataFrame:
    """Join rows, binaries and clocks."""
    binaries = {line["binary"]: line for line in read_lines(run / "binaries.jsonl")}
    frame = pandas.DataFrame([_row(line, binaries) for line in read_rows(run)])
    frame.insert(0, "collection", name)
    _add_clocks(frame, run / "gpu.csv")
    for split in SPLITS:
        records = frame[["kernel", "function", "shape", "dtype", "config"]].to_dict("records")
        frame[f"test_{split}"] = [in_test(split, record) for record in records]
    for column in _INTS:
        frame[column] = pandas.to_numeric(frame[column]).round().astype("Int32")
    begin = frame["at"].min()
    frame["at_s"] = (frame.pop("at") - begin).round(3).astype("float32")
    return frame.sort_values(["kernel", "dtype", "shape", "config", "repeat"], ignore_index=True)


def _row(line: dict[str, Any], binaries: dict[str, Any]) -> dict[str, Any]:
    task, config, samples = cell_of(line).task, line["config"], line["samples_ns"]
    compiled = binaries.get(line["binary"] or "", {})
    row = {name: line[name] for name in ("kernel", "dtype", "status")}
    row |= {"family": task.subject.family, "function": task.subject.kernel.fn.__name__}
    row |= {name: json.dumps(line[name], sort_keys=True) for name in ("shape", "config")}
    row |= {"shape_kind": shape_kind(task.shape)}
    row |= {"repeat": line["repeat"], "control": line["control"], "samples_ns": samples}
    row |= {"median_ns": statistics.median(samples) if samples else None, "error": line["error"]}
    row |= {"relative_error": line["relative_error"]}
    row |= dict(zip(("grid_x", "grid_y", "grid_z"), task.grid(config), strict=True))
    row |= dict(zip(("bytes", "flops"), map(float, task.work), strict=True))
    row |= {"trips": float(task.subject.trips(task.shape, config))}
    row |= {name: line[name] for name in ("registers", "spills", "at")}
    row |= {name: compiled.get(name) for name in _COMPILED}
    row |= {"num_warps": config.get("num_warps", 4), "num_stages": config.get("num_stages", 3)}
    known = line["registers"] is not None and compiled
    facts = (line["registers"], compiled.get("shared"), row["num_warps"])
    return {**row, "occupancy": occupancy(*facts) if known else None}


def _add_clocks(frame: pandas.DataFrame, path: Path) -> None:
    """Take the reading of the GPU that is nearest in time; leave empty where there is none."""
    found = _readings(path)
    if len(found) < 2:
        frame[list(_CLOCKS)] = numpy.nan
        return
    times, at = found[:, 0], frame["at"].to_numpy()
    after = numpy.clip(numpy.searchsorted(times, at), 1, len(times) - 1)
    nearest = numpy.where(at - times[after - 1] < times[after] - at, after - 1, after)
    for place, column in enumerate(_CLOCKS, start=1):
        frame[column] = found[nearest, place]


def _readings(path: Path) -> numpy.ndarray:
    """Return time, clocks, temperature and power, without lines that are cut off or [N/A]."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            numbers = [float(word) for word in line.split(",")]
            found += [numbers] if len(numbers) == 1 + len(_CLOCKS) else []
    return numpy.array(found)


def shard_paths(folder: Path, name: str) -> list[Path]:
    """Return where the rows and the IR of a new shard go; ValueError if it is there."""
    shards = folder / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    paths = [shards / f"{name}.{sort}.parquet" for sort in ("rows", "ir")]
    if any(path.exists() for path in paths):
        raise ValueError(f"{paths[0]}: a shard is written once; choose another name")
    return paths


def _known_ir(folder: Path) -> set[str]:
    known: set[str] = set()
    for path in folder.glob("shards/*.ir.parquet"):
        known |= set(pandas.read_parquet(path, columns=["id"])["id"])
    return known


def write(frame: pandas.DataFrame, path: Path, about: dict[str, str]) -> None:
    """Write one row group and one page per column: what is alike is then compressed together."""
    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    if "samples_ns" in frame:
        place = table.column_names.index("samples_ns")
        samples = table["samples_ns"].cast(pyarrow.list_(pyarrow.int32()))
        table = table.set_column(place, "samples_ns", samples)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **about})
    words = [name for name in frame if name not in ("text", "samples_ns")]
    pyarrow.parquet.write_table(
        table, path, compression="zstd", compression_level=19, data_page_size=1 << 30,
        row_group_size=1 << 20, use_dictionary=words,
    )  # fmt: skip


def checksums(folder: Path) -> None:
    paths = sorted(folder.glob("shards/*.parquet"))
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  shards/{p.name}" for p in paths]
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n")
