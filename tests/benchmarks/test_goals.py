"""The table of goals: the worst case counts, and what was not measured is not there."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.goals import goal_rows
from sundog.tools.baselines import BASELINES


def timed(problem: str, variant: str, micros: float, config: str = "Config()") -> dict[str, Any]:
    times = {"name": variant, "samples_ns": [[1e3 * micros, 1.0]] * 3}
    row = {"problem": f"Problem({problem})", "variant": variant, "config": config, "times": times}
    return row | {"limit_ns": 90e3, "link_bytes": 0}


def table(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"rows": list(rows)}


def verdicts(files: dict[str, Any]) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for cells in goal_rows(files)}


LARGE, SMALL = "numel=33554432, size=2", "numel=1024, size=2"


def test_nothing_measured_no_goals() -> None:
    assert goal_rows({}) == []


def test_the_fastest_config_and_algorithm_of_the_worst_size() -> None:
    rows = [timed(LARGE, "push", 120.0), timed(LARGE, "push", 100.0), timed(LARGE, "pull", 300.0)]
    larger = timed("numel=99999999, size=2", "gluon", 94.0)
    found = verdicts({"h200-all-gather-2": table(*rows, larger, timed(SMALL, "push", 900.0))})
    name = "all_gather, part of the limit, 64 MB and more"
    assert found[name] == ["at least 0.95", "0.9", "missed in 1 of 2", LARGE]


def test_a_later_file_counts_if_it_is_better() -> None:
    old, new = table(timed(LARGE, "push", 100.0)), table(timed(LARGE, "push", 92.0))
    found = verdicts({"h200-all-gather-2": old, "h200-all-gather-large-2": new})
    assert found["all_gather, part of the limit, 64 MB and more"][2] == "reached"


@pytest.mark.parametrize(("micros", "verdict"), [(105.0, "reached"), (106.0, "missed in 1 of 1")])
def test_ratios_are_of_one_file(micros: float, verdict: str) -> None:
    shape = "m=4096, n=1, k=1, size=8"
    rows = [timed(shape, "hbm_buffer", micros), timed(shape, "our GEMM, A gathered", 100.0)]
    found = verdicts({"h200-all-gather-matmul-4096": table(*rows)})
    assert list(found) == ["hbm_buffer over our GEMM with A gathered, 8 ranks on one GPU"]
    assert next(iter(found.values()))[2] == verdict


def test_baselines_as_bench_names_them() -> None:
    """Two of the three are what our algorithms are held against, the other has A gathered."""
    shape = "m=4096, n=1, k=1, size=8"
    theirs = [timed(shape, name, 100.0) for name in BASELINES["all_gather_matmul"]]
    ours = [timed(shape, name, 100.0) for name in ("hbm_buffer", "direct", "barrier")]
    assert len(verdicts({"h200-all-gather-matmul-4096": table(*ours, *theirs)})) == 6


def test_what_failed_is_no_figure() -> None:
    broken = timed(LARGE, "push", 1.0) | {"times": None}
    assert verdicts({"h200-all-gather-2": table(broken)}) == {}


def test_figures_of_tunings() -> None:
    head = ["op", "problem", "pattern, 100 configs", "its gain", "its gain", "runs apart"]
    rows = [
        ["all_gather.gluon", "numel=1", "+0.5 %", "1.010", "0.900", "2.3 % of 3"],
        ["all_gather.gluon", "numel=2", "", "", "", "0.4 % of 2"],
        ["all_gather.push", "numel=1", "+3.5 %", "0.950", "1.000", ""],
    ]
    found = list(verdicts({"h200-tune": {"head": head, "rows": rows}}).values())
    assert [row[1:] for row in found] == [
        ["3.5 %", "missed in 1 of 2", "all_gather.push numel=1"],
        ["1.01", "reached", "all_gather.gluon numel=1"],
        ["2.3 %", "missed in 1 of 2", "all_gather.gluon numel=1"],
    ]


def test_figures_of_tables() -> None:
    """Of two runs that are alike the last one counts."""
    rows = [["a", "x", "9%", "3%"], ["a", "x", "70%", "0.5%"], ["a", "y", "50%", "2%"]]
    content = {"head": ["op", "search", "busy", "rows"], "rows": rows}
    found = verdicts({"h200-tune-cost": content})
    assert found["the tuner's GPU has something to measure, of the last run of each kind"][1:] == [
        "50 %",
        "missed in 1 of 2",
        "a, y",
    ]
    assert found["the tuner's rows, of the same"][2] == "missed in 1 of 2"
