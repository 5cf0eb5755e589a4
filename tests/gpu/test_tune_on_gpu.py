"""`sundog tune` on a GPU, as a process of its own: CUDA does not live through a fork."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu("virtual")
WORDS = ["--problem", "numel=65536,dtype=bfloat16", "--world", "2", "--log", "log"]


def tune(folder: Path, *words: str) -> str:
    environment = {**os.environ, "SUNDOG_CACHE": str(folder / "cache")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    command = [sys.executable, "-m", "sundog", "tune", *words, *WORDS]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ended(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["status"] != "started"]


def test_a_short_run(tmp_path: Path) -> None:
    tune(tmp_path, "all_gather.push", "--budget", "8")
    first = ended(tmp_path)
    timed = [row for row in first if row["status"] == "ok"]
    assert len(timed) >= 8, [(row["status"], row["error"]) for row in first]
    for row in timed:
        assert row["timer"] == "graph replay"
        assert 0 < float(row["min_ms"]) <= float(row["p50_ms"]) <= float(row["max_ms"]) < 100
        assert json.loads(row["metrics"])["registers"] > 0
        assert row["ir_id"]
    (file,) = (tmp_path / "cache").glob("*/*.json")
    (entry,) = json.loads(file.read_text())
    best = min(float(row["perf_ms"]) for row in timed if row["repeat"] == "1")
    assert entry["seconds"] == pytest.approx(best * 1e-3, rel=1e-3)  # rows have six digits
    tune(tmp_path, "all_gather.push", "--budget", "10", "--resume")
    searched = {row["config"] for row in ended(tmp_path)[len(first) :] if row["generation"]}
    assert len(searched) == 2, "eight of ten were known"


def test_behind_a_link(tmp_path: Path) -> None:
    tune(tmp_path, "all_gather.push", "--budget", "3", "--link", "pcie")
    assert [row["status"] for row in ended(tmp_path)][:3] == ["ok"] * 3
