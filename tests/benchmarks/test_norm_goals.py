"""The goals of all_reduce_rms_norm and of signals by stores: what is compared with which figure."""

from __future__ import annotations

from typing import Any

from benchmarks.many_calls import _verdict
from benchmarks.norm import OP, PLAIN, UNFUSED, line_of


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
