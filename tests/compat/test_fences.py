"""Fences of inline PTX: which make a relaxed signal publish, which make a relaxed poll acquire."""

from __future__ import annotations

import pytest

import sundog
from sundog.compat.rank import as_rank
from sundog.errors import CannotInterpret
from sundog.tools.check.schedules import check

from .fences import program

BAR, FENCE = "bar.sync 0;", "fence.acq_rel.sys;"
RIGHT = [
    (f"{BAR} {FENCE}", FENCE),
    (f"{BAR} fence.sc.sys;", FENCE),
    (f"{BAR} membar.sys;", "membar.sys;"),
    ("membar.sys; bar.sync 0;", "membar.sys;"),  # the order of fence.sc: each thread has its own
    (f"{BAR} fence.release.sys;", "fence.acquire.sys;"),
]
WRONG = [
    (BAR, FENCE, "relaxed release"),
    (f"{BAR} {FENCE}", BAR, "relaxed acquire"),
    (FENCE, FENCE, "no CTA barrier before the release"),
    (f"{FENCE} {BAR}", FENCE, "no CTA barrier before the release"),
    (f"{BAR} fence.acq_rel.gpu;", FENCE, "no order"),
    (f"{BAR} {FENCE}", "membar.gl;", "no order"),
    (f"{BAR} fence.acquire.sys;", FENCE, "relaxed release"),
]


@pytest.mark.parametrize(("before", "after"), RIGHT)
def test_right_fences_are_clean(before: str, after: str) -> None:
    report = check(as_rank(program(before, after)), 2, schedules=6, seed=1)
    assert not report.findings + report.remarks, report


@pytest.mark.parametrize(("before", "after", "rule"), WRONG)
def test_wrong_fences_are_found(before: str, after: str, rule: str) -> None:
    report = check(as_rank(program(before, after)), 2, schedules=6, seed=1)
    assert {finding.rule for finding in report.findings} == {rule}, report


def test_fence_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(CannotInterpret, match=r"line 1: fence\.weak\.sys: expected a fence"):
        sundog.run(program("fence.weak.sys;", FENCE), 2, "sim", torch=True)
