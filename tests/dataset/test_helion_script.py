"""scripts/helion_h200.py without Helion: cases that hang or die cost no other, and time is kept."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import helion_h200
from helion_h200 import Case, run_all


def work(case: Case, base: Path) -> Callable[[int], None]:
    """Stand in for tuning: a case's name says what happens to it."""
    if case.name == "dies first":
        os._exit(1)
    with (base / "log").open("a") as file:
        file.write(f"prepared {case.name}\n")

    def search(budget: int) -> None:
        with (base / "log").open("a") as file:
            file.write(f"began {case.name}\n")
        if case.name == "dies":
            os._exit(1)
        time.sleep(60 if case.name == "hangs" else 0.5)
        with (base / "log").open("a") as file:
            file.write(f"ended {case.name}\n")

    return search


def test_cases_tune_in_turn_and_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helion_h200, "GRACE_S", 1.0)
    names = ["first", "dies first", "hangs", "dies", "last"]
    begin = time.monotonic()
    ends = run_all([Case(name, [], 1) for name in names], tmp_path, 10.0, work)
    assert ends == ["done", "died", "cut", "died", "done"]
    assert time.monotonic() - begin < 25
    lines = (tmp_path / "log").read_text().splitlines()
    tuned = [line for line in lines if not line.startswith("prepared")]
    assert tuned == [
        "began first", "ended first", "began hangs", "began dies", "began last", "ended last",
    ]  # fmt: skip


def test_a_table_needs_three_kernels_and_two_attention_shapes() -> None:
    shapes: dict[str, set[str]] = {}
    for case in helion_h200.CASES:
        shapes.setdefault(case.name, set()).add(str(case.shapes))
    several = [name for name in shapes if len(shapes[name]) >= 2]
    assert "attention" in several
    assert len(several) >= 3
