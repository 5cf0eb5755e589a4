"""Fences of inline PTX and of AMD's assembly: what a relaxed signal publishes or acquires."""

from __future__ import annotations

import pytest

import sundog
from sundog.compat.rank import as_rank
from sundog.errors import CannotInterpret
from sundog.tools.check.schedules import check

from .fences import program

BAR, FENCE = "bar.sync 0;", "fence.acq_rel.sys;"
WRITE_BACK = "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0)"
RIGHT = [
    (f"{BAR} {FENCE}", FENCE),
    (f"{BAR} fence.sc.sys;", FENCE),
    (f"{BAR} membar.sys;", "membar.sys;"),
    ("membar.sys; bar.sync 0;", "membar.sys;"),  # the order of fence.sc: each thread has its own
    (f"{BAR} fence.release.sys;", "fence.acquire.sys;"),
    (f"{BAR} {FENCE} fence.acq_rel.gpu;", f"fence.acq_rel.gpu; {FENCE}"),  # the wider one holds
    (f"{BAR} {FENCE} membar.cta; membar.gl;", FENCE),
    (f"s_barrier\n{WRITE_BACK}", "buffer_inv sc0 sc1"),  # as AMD's compiler orders it
]
WRONG = [
    (BAR, FENCE, "relaxed release"),
    (f"{BAR} {FENCE}", BAR, "relaxed acquire"),
    (FENCE, FENCE, "no CTA barrier before the release"),
    (f"{FENCE} {BAR}", FENCE, "no CTA barrier before the release"),
    (f"bar.warp.sync 0xffffffff; {FENCE}", FENCE, "no CTA barrier before the release"),
    (f"{BAR} fence.acq_rel.gpu;", FENCE, "scope does not reach"),
    (f"{FENCE} {BAR} fence.acq_rel.gpu;", FENCE, "no CTA barrier before the release"),
    (f"{BAR} {FENCE}", "membar.gl; membar.cta;", "scope does not reach"),
    (f"{BAR} {FENCE}", "membar.gl;", "scope does not reach"),
    (f"{BAR} fence.acquire.sys;", FENCE, "relaxed release"),
    ("s_barrier\ns_waitcnt vmcnt(0)", "buffer_inv sc0 sc1", "relaxed release"),
    (f"s_barrier\n{WRITE_BACK}", "s_waitcnt vmcnt(0)", "relaxed acquire"),
    (WRITE_BACK, "buffer_inv sc0 sc1", "no CTA barrier before the release"),
    (f"s_barrier\n{WRITE_BACK.replace('sc0 ', '')}", "buffer_inv sc0 sc1", "scope does not reach"),
]


@pytest.mark.parametrize(("before", "after"), RIGHT)
def test_right_fences_are_clean(before: str, after: str) -> None:
    report = check(as_rank(program(before, after)), 2, schedules=6, seed=1)
    assert not report.findings + report.remarks, report


@pytest.mark.parametrize(("before", "after", "rule"), WRONG)
def test_wrong_fences_are_found(before: str, after: str, rule: str) -> None:
    report = check(as_rank(program(before, after)), 2, schedules=6, seed=1)
    assert {finding.rule for finding in report.findings} == {rule}, report


def test_the_barrier_that_lacks_stands_before_the_fence() -> None:
    (found,) = check(as_rank(program(f"{FENCE} {BAR}", FENCE)), 2, schedules=2).findings
    assert "between the tile and the fence before the signal" in found.why
    assert "Smallest repair: a CTA barrier before the fence of " in found.why


def test_fence_that_is_none_is_refused_with_its_line() -> None:
    with pytest.raises(CannotInterpret, match=r"line 1: fence\.weak\.sys: expected a fence"):
        sundog.run(program("fence.weak.sys;", FENCE), 2, "sim", torch=True)
    with pytest.raises(CannotInterpret, match=r"needs `s_waitcnt vmcnt\(0\)` after it"):
        sundog.run(program("buffer_wbl2 sc0 sc1", FENCE), 2, "sim", torch=True)
