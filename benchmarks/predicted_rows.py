"""Measured times of ops, as a time model is held to them: from docs/measured and data.

A row is used either to calibrate or to judge, never for both. For each op and number of ranks,
every second problem in order of size is kept from the calibration. The shape decides, so all
algorithms and configs of a problem are on the same side.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.result_files import read_result, result_paths
from sundog.hardware.description import Hardware
from sundog.ops import load as ops
from sundog.ops.op import OPS
from sundog.predict.expected import time
from sundog.predict.parts import Time


@dataclass(frozen=True)
class Row:
    """One algorithm, problem and config, and what it took."""

    op: str  # all_gather.push
    problem: Any
    config: Any
    machine: str
    backend: str
    num_sms: int
    seconds: float
    run: str
    is_held_out: bool = False

    @property
    def place(self) -> str:
        """Where the ranks were: on a backend, or across PCIe."""
        return "pcie" if self.machine == "h200-pcie" else self.backend

    @property
    def case(self) -> tuple:
        """What several algorithms were measured on."""
        name = self.op.partition(".")[0]
        return name, self.problem, self.machine, self.backend, self.num_sms, self.run

    def __str__(self) -> str:
        return f"{self.op} {self.problem} {self.config} on {self.machine}, {self.backend}"


def measured_rows(folder: Path) -> list[Row]:
    """Return all rows of ops measured with `sundog bench`, half of their shapes held out."""
    found: list[Row] = []
    for path in result_paths(folder):
        content = read_result(path)
        if content.get("kind") == "op":
            found += _rows_of(content, path.name.removesuffix(".xz"))
    return _held_out(found)


def _rows_of(content: dict[str, Any], run: str) -> list[Row]:
    found = []
    for row in content["rows"]:
        op = f"{content['op']}.{row['variant']}"
        if op not in OPS or not row["config"] or not row["times"]:
            continue  # a baseline, or it failed
        module = ops.find(op)
        names = {"Problem": module.Problem, "Config": module.Config, "torch": torch}
        is_linked, size = content.get("link") == "pcie", content["world"]
        machine = "h200-pcie" if is_linked else "h200-shared"
        # Over the link peers are kernels of one program each, which only wait.
        num_sms = 132 - (size - 1) if is_linked else 132 // size
        samples = row["times"]["samples_ns"]
        found.append(
            Row(
                op, eval(row["problem"], names), eval(row["config"], names), machine,
                content["backend"], num_sms,
                statistics.median(max(each) for each in samples) * 1e-9, run,
            )
        )  # fmt: skip
    return found


def tuning_rows(folder: Path) -> list[Row]:
    """Return all configs that tuning runs tried, on 8 ranks: none of them is used to calibrate."""
    found = []
    for path in sorted(folder.glob("*.meta.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        begun = [each for each in lines if each["event"] == "start"]
        starts = {each["run_id"]: each for each in begun if each["kernel_name"] in OPS}
        with path.with_name(path.name.replace(".meta.jsonl", ".csv")).open() as file:
            for row in csv.DictReader(file):
                is_timed = row["status"] == "ok" and row["perf_ms"]
                if is_timed and row["run_id"] in starts:  # others are not of ops
                    found.append(_tuning_row(starts[row["run_id"]], row))
    return found


def _tuning_row(start: dict[str, Any], row: dict[str, str]) -> Row:
    op = start["kernel_name"]
    words = {each["name"]: each["value"] for each in start["arguments"]}
    module = ops.find(op)
    problem = module.Problem(**{name: _parsed(word) for name, word in words.items()})
    config = module.Config(**json.loads(row["config"]))
    seconds = float(row["perf_ms"]) * 1e-3
    return Row(op, problem, config, "h200-shared", "virtual", 16, seconds, "data/h200", True)


def _parsed(word: Any) -> Any:
    is_dtype = isinstance(word, str) and word.startswith("torch.")
    return getattr(torch, word.removeprefix("torch.")) if is_dtype else word


def _held_out(rows: Sequence[Row]) -> list[Row]:
    """Mark every second problem of each op, machine and number of ranks, in order of size."""
    groups: dict[tuple, set[Any]] = {}
    for row in rows:
        groups.setdefault(_group(row), set()).add(row.problem)
    kept = {
        (group, problem)
        for group, problems in groups.items()
        for problem in sorted(problems, key=_size)[1::2]
    }
    return [Row(**{**vars(row), "is_held_out": (_group(row), row.problem) in kept}) for row in rows]


def _group(row: Row) -> tuple:
    return row.op.partition(".")[0], row.machine, row.problem.size


def _size(problem: Any) -> float:
    if hasattr(problem, "numel"):
        return float(problem.numel)
    return float(problem.m) * problem.n * problem.k


def predict_rows(rows: Sequence[Row], machines: dict[str, Hardware]) -> list[float]:
    """Return the seconds that the model expects of each."""
    return [each.seconds for each in predict_times(rows, machines)]


def predict_times(rows: Sequence[Row], machines: dict[str, Hardware]) -> list[Time]:
    by_place = {(name, False): each for name, each in machines.items()}
    by_place |= {(name, True): each.between_processes() for name, each in machines.items()}
    found = []
    for row in rows:
        machine = by_place[row.machine, row.backend == "symm"]
        found.append(time(row.op, row.problem, row.config, machine, row.num_sms))
    return found
