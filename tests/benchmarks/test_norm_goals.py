"""The goals of all_reduce_rms_norm and of many calls: what is compared with which figure."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

import sundog
from benchmarks.many_calls import _checked, _verdict
from benchmarks.norm import OP, PLAIN, UNFUSED, entries, line_of
from sundog.ops.select import read_entries


def _row(tokens: int, ours: float, plain: float, unfused: float, algo: str) -> dict[str, Any]:
    us = {f"{OP}.{algo}": ours, f"{PLAIN}.{algo}": plain, UNFUSED: unfused}
    return {"tokens": tokens, "hidden": 4096, "us": us}


def _goals(*given: Any) -> str:
    return line_of(_row(*given), 8)


def test_few_tokens_have_a_goal_in_microseconds() -> None:
    line = _goals(32, 11.4, 10.0, 22.8, "one_shot")
    assert "+1.40 us (at most 1.5 over plain: reached)" in line
    assert "2.00 x unfused (at least 1.5 times as fast: reached)" in line
    assert "+1.60 us (at most 1.5 over plain: MISSED)" in _goals(1, 6.6, 5.0, 9.0, "low_latency")
    assert "1.36 x unfused (at least 1.5 times as fast: MISSED)" in _goals(
        1, 6.6, 5.0, 9.0, "low_latency"
    )


def test_more_tokens_have_a_goal_by_their_bytes() -> None:
    """(W + 3) / (W + 1) and 3 / 2, 1.1 times."""
    assert "1.30 x plain (at most 1.34: reached)" in _goals(64, 13.0, 10.0, 30.0, "one_shot")
    assert "1.70 x plain (at most 1.65: MISSED)" in _goals(4096, 17.0, 10.0, 30.0, "two_shot")
    assert "unfused" not in _goals(4096, 17.0, 10.0, 30.0, "two_shot")


def test_a_size_that_an_op_does_not_take() -> None:
    row = {"tokens": 16, "hidden": 7168, "us": {f"{OP}.one_shot": 9.0, UNFUSED: 18.0}}
    assert line_of(row, 8).endswith(
        "no plain all-reduce to compare with; 2.00 x unfused (at least 1.5 times as fast: reached)"
    )
    assert "none fits 0.00 us" in line_of({**row, "us": {UNFUSED: 18.0}}, 8)


def test_stores_against_atomics() -> None:
    assert _verdict({"atomic": 5e-6, "store": 5.4e-6}).endswith("1.080 (at most 1.1: reached)")
    assert _verdict({"atomic": 5e-6, "store": 6e-6}).endswith("1.200 (at most 1.1: MISSED)")


def test_the_fastest_config_of_each_algorithm_becomes_an_entry(tmp_path: Path) -> None:
    us = {f"{OP}.one_shot": 13.0, f"{OP}.one_shot x32": 11.0, f"{OP}.two_shot": 12.0}
    configs = {name: {"programs": 16} for name in us} | {f"{OP}.one_shot x32": {"programs": 32}}
    us[UNFUSED] = 20.0
    row = {"tokens": 32, "hidden": 4096, "us": us, "configs": configs}
    machine = {"date": "2026-11-16T19:00:00Z"}
    file, target = tmp_path / "run.json", tmp_path / "target.json"
    file.write_text(json.dumps({"machine": machine, "world": 8, "num_sms": 16, "rows": [row]}))
    entries(file, target)
    found = {entry.op: entry for entry in read_entries(target)}
    assert {op: (e.config["programs"], e.seconds) for op, e in found.items()} == {
        f"{OP}.one_shot": (32, 11e-6),
        f"{OP}.two_shot": (16, 12e-6),
    }
    assert found[f"{OP}.one_shot"].problem["hidden"] == 4096
    assert found[f"{OP}.one_shot"].run == "run.json"


def test_checked_calls_are_added_up_and_findings_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(world: sundog.World, is_late: bool) -> dict[str, Any]:
        if is_late and world.rank == 1:
            raise ValueError("too late")
        return {"calls": 5, "wrong": 0, "seconds": 0.5}

    found = _checked(functools.partial(main, is_late=False), 2, range(3))
    assert found == {"calls": 15, "wrong": 0, "seconds": 1.5, "findings": 0, "world": 2}
    assert _checked(functools.partial(main, is_late=True), 2, range(2))["findings"] == 2
    assert "too late" in capsys.readouterr().out
