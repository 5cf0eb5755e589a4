"""The parts of `sundog bench OP` that need no GPU: axes, limits, statistics, refusals."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from typer.testing import CliRunner

from sundog.bench.axes import parse_axes
from sundog.bench.limits import Rates, seconds
from sundog.bench.timing import Times
from sundog.cli import app
from sundog.op import Cost, algorithms, find
from sundog.target import has_gpu

RATES = Rates(copy=4e12, fill=2e12, read=5e12, gemm=8e14)


def parse(name: str, *axes: str, size: int = 2) -> tuple[list, list]:
    return parse_axes(name, algorithms(name), axes, size)


def test_axes_of_problem_and_config_are_combined() -> None:
    axes = ["numel=10,20", "dtype=bfloat16", "algo=push", "programs=4,8"]
    problems, choices = parse("all_gather", *axes, size=3)
    assert [(p.numel, p.dtype, p.size) for p in problems] == [
        (10, torch.bfloat16, 3),
        (20, torch.bfloat16, 3),
    ]
    assert choices == [("push", {"programs": 4}), ("push", {"programs": 8})]


def test_without_axes_all_algorithms_that_need_no_asking_for_are_timed() -> None:
    problems, choices = parse("all_reduce")
    assert problems == find("all_reduce").cases(2)[:1]
    assert choices == [(algo, {}) for algo in ("one_shot", "low_latency", "two_shot")]
    assert parse("all_reduce.ring")[1] == [("ring", {})]
    assert parse("all_reduce", "algo=ring,two_shot")[1] == [("ring", {}), ("two_shot", {})]


def test_an_axis_is_for_the_configs_that_have_it() -> None:
    """One variant, not three, of an algorithm that does not know the axis."""
    assert "threads_per_warp" not in {f.name for f in fields(find("all_gather.push").Config)}
    _, choices = parse("all_gather", "algo=push,gluon", "threads_per_warp=32,64", "programs=4")
    assert choices == [
        ("push", {"programs": 4}),
        ("gluon", {"threads_per_warp": 32, "programs": 4}),
        ("gluon", {"threads_per_warp": 64, "programs": 4}),
    ]


@pytest.mark.parametrize(
    "axis", ["nosuch=1", "numel=", "numel", "numel=many", "algo=nosuch", "programs=few"]
)
def test_bad_axes_are_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"axis '{axis}'"):
        parse("all_gather", axis)


def test_the_limit() -> None:
    assert seconds(Cost(0, 4000, 4000, 0), 1, RATES) == pytest.approx(8000 / 4e12)
    assert seconds(Cost(0, 1000, 4000, 0), 1, RATES) == pytest.approx(2000 / 4e12 + 3000 / 2e12)
    assert seconds(Cost(0, 4000, 1000, 0), 1, RATES) == pytest.approx(2000 / 4e12 + 3000 / 5e12)
    assert seconds(Cost(8 * 10**14, 1, 1, 0), 1, RATES) == pytest.approx(1.0)
    assert seconds(Cost(0, 4000, 4000, 0), 8, RATES) == pytest.approx(8 * 8000 / 4e12)


def test_the_slowest_rank_is_the_headline() -> None:
    times = Times("x", [[1.0, 3.0], [2.0, 2.0], [9.0, 1.0], [4.0, 5.0], [6.0, 6.5]])
    assert times.slowest == [3.0, 2.0, 9.0, 5.0, 6.5]
    assert times.median == 5.0
    assert (times.percentile(20), times.percentile(80)) == (3.0, 6.5)
    assert times.skew == 1.0


@pytest.mark.skipif(has_gpu(), reason="about machines without a GPU")
def test_without_a_gpu_bench_says_what_it_can_do() -> None:
    for words in (["all_gather"], ["op", "all_gather"], ["bound"]):
        done = CliRunner().invoke(app, ["bench", *words])
        assert done.exit_code == 2
        assert "no GPU" in done.output
    assert "sundog check" in CliRunner().invoke(app, ["bench", "all_gather"]).output
