"""The checker reports a load that the compiler issues ahead of its acquire, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from sundog.checker import pipelined
from sundog.checker.pipelined import BARRIER_IN_LOOP
from sundog.compiled import hoisted
from sundog.dataset.triton.compile import source_of
from sundog.tools import isa
from sundog.tools._launches import record
from sundog.tools.check.schedules import Report, check

from . import pipelined_loops as loops

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]

RULE = "no CTA barrier in a pipelined loop"
each_loop = pytest.mark.parametrize("loop", loops.HOISTED, ids=lambda loop: loop.__name__)


def found(report: Report) -> set[tuple[str, str]]:
    return {(finding.kind, finding.rule) for finding in report.findings}


@each_loop
@pytest.mark.parametrize("target", ["sm_90", "gfx942", "gfx950"])
def test_what_the_compiler_moves(loop: Any, target: str) -> None:
    launches = record(loops.host(loop), 2, 64 << 20, 16, 64 << 20)
    (launch,) = [each for each in launches if each.kernel is loops.consume]
    source, options = source_of(launch.kernel, launch.args, launch.kwargs, arch=target)
    assert bool(hoisted.find_in(source, options, target)) == loops.HOISTED[loop]


@each_loop
def test_the_checker_reports_just_that(loop: Any) -> None:
    report = check(loops.host(loop), 2, schedules=4)
    assert found(report) == ({("race", RULE)} if loops.HOISTED[loop] else set()), report


def test_the_finding_names_the_acquire_the_loop_and_the_fix() -> None:
    (finding,) = check(loops.host(loops.dot), 2, schedules=2).findings
    assert "the acquire at tests/checker/pipelined_loops.py:" in finding.why
    assert "sm_90, gfx942" in finding.why
    assert finding.first.allocation == finding.second.allocation == "a"
    assert finding.suggestion == BARRIER_IN_LOOP.advice
    assert "tl.debug_barrier()" in finding.suggestion


@pytest.mark.parametrize(("stages", "moves"), [(1, False), (2, True), (4, True)])
def test_the_number_of_stages_of_the_launch_counts(stages: int, moves: bool) -> None:
    report = check(loops.host(loops.dot, num_stages=stages), 2, schedules=2)
    assert found(report) == ({("race", RULE)} if moves else set()), report


def test_isa_marks_the_line() -> None:
    with open(loops.__file__) as file:
        lines = file.read().splitlines()
    (kernel,) = isa.inspect(f"{loops.__file__}:run_dot", ("sm_90",), world=2)
    marks = [mark for mark in kernel.marks if mark.rule == "hoisted"]
    assert marks
    for mark in marks:
        line = int(mark.where.rpartition(":")[2].rstrip(")"))
        assert lines[line - 1].strip().startswith("return tl.load(x")
        assert "tl.debug_barrier()" in mark.text
    (kernel,) = isa.inspect(f"{loops.__file__}:run_dot_and_barrier", ("sm_90",), world=2)
    assert not [mark for mark in kernel.marks if mark.rule == "hoisted"]


def test_a_target_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known about the order there, so the report says so."""

    def find(source: Any, options: Any, arch: str) -> Any:
        if arch == "gfx942":
            raise RuntimeError("PassManager::run failed\nand more")
        return hoisted.find_in(source, options, arch)

    monkeypatch.setattr(pipelined, "find_in", find)
    monkeypatch.setattr(pipelined, "_compiled", {})
    report = check(loops.host(loops.dot), 2, schedules=2)
    (finding,) = report.findings
    assert "(sm_90)" in finding.why
    (note,) = report.notes
    assert "consume does not compile for gfx942 (PassManager::run failed)" in note
    assert "the load at tests/checker/pipelined_loops.py:" in note
    assert f"note: {note}" in str(report)


def test_a_kernel_without_suspicious_loads_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelined, "find_in", lambda *args: 1 / 0)
    monkeypatch.setattr(pipelined, "_compiled", {})
    report = check(loops.host(loops.dot_and_barrier), 2, schedules=2)
    assert not report.findings
    assert not report.notes
