"""Gluon kernels are checked and mutated as the others: faults are found, at their lines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sundog.tools.check.mutation import find_mutants, mutate
from sundog.tools.check.schedules import check

from . import gluon_kernels as kernels

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]

WRONG = {
    kernels.no_barrier: "no CTA barrier",
    kernels.relaxed_signal: "relaxed release",
    kernels.relaxed_poll: "relaxed acquire",
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("function", [kernels.by_name, kernels.by_hand])
def test_a_right_kernel_is_clean(function: Callable, world_size: int) -> None:
    report = check(function, world_size, schedules=6)
    assert not report.findings, report


@pytest.mark.parametrize("function", WRONG, ids=lambda function: function.__name__)
def test_a_wrong_kernel_is_found_out(function: Callable) -> None:
    report = check(function, 2, schedules=6)
    races = [finding for finding in report.findings if finding.kind == "race"]
    assert races, report
    text = str(report)
    assert "tests/interpreter/gluon_kernels.py:" in text
    assert any(WRONG[function] in finding.rule for finding in races), text


@pytest.mark.parametrize("function", [kernels.by_name, kernels.by_hand])
def test_every_mutant_is_killed(function: Callable) -> None:
    found, report = find_mutants(function, 2)
    assert not report.findings, report
    words = " | ".join(mutant.what for mutant in found)
    wanted = (
        ["device.signal(", "device.wait("]
        if function is kernels.by_name
        else ["barrier(): dropped"]
    )
    assert all(each in words for each in wanted), words
    survived = [o for o in mutate(function, 2, found, schedules=60) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)
