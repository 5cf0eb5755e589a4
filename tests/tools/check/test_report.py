"""What a finding says, once per pair of lines, and that its token replays it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from support.scripts import python
from support.traced import traced

from sundog.checker.findings import Finding
from sundog.machine.schedule import from_token
from sundog.testing import check as must_be_clean
from sundog.tools.check.schedules import Report, check, tokens

from . import kernels

pytestmark = pytest.mark.compat


def line_of(text: str) -> int:
    lines, first = inspect.getsourcelines(kernels.send.fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_clean_kernel_has_no_findings():
    assert check(kernels.clean, 3, schedules=6).findings == []


def test_finding_names_both_accesses_and_the_missing_edge():
    (finding,) = check(kernels.racy, 3, schedules=4).findings
    assert (finding.kind, finding.rule) == ("race", "no CTA barrier before the release")
    assert finding.first.line == line_of("memory.store(inbox")
    assert finding.second.line == line_of("tl.store(out")
    assert finding.first.file == finding.second.file == "tests/tools/check/kernels.py"
    assert finding.first.text.startswith("memory.store(inbox + at")
    assert (finding.first.verb, finding.second.verb) == ("store", "load")
    assert finding.first.rank != finding.second.rank
    assert finding.first.program == (0, 0, 0)
    assert finding.first.allocation == "inbox"
    assert finding.first.indices == "[0:37]"
    assert not finding.first.atomic
    assert f"kernels.py:{line_of('atomic_xchg')}" in finding.why
    assert "debug_barrier" in finding.suggestion


def test_one_finding_per_pair_of_lines_with_a_count():
    report = check(kernels.racy, 3, schedules=4)
    assert len(report.findings) == 1
    assert report.findings[0].count == 3 * 4  # each rank is a reader, in each schedule
    assert report.first_schedule == 1


def test_token_replays_the_interleaving():
    found = check(kernels.racy, 2, schedules=6, seed=11).findings[0]
    (report, first), (_, second) = (traced(kernels.racy, 2, found.token) for _ in range(2))
    assert report.findings[0].key() == found.key()
    plain = [[event[:5] for event in trace] for trace in (first, second)]
    assert plain[0] == plain[1]
    _, other = traced(kernels.racy, 2, "random:12345")
    assert [event[:5] for event in other] != plain[0]


def test_finding_as_json_has_all_that_the_text_has():
    (finding,) = check(kernels.racy, 2, schedules=1).findings
    data = json.loads(json.dumps(finding.as_json()))
    assert data["first"]["line"] == finding.first.line
    assert {f.name for f in dataclasses.fields(Finding)} == set(data)


def test_errors_of_ranks_and_kernels_are_findings():
    (error,) = check(kernels.raises, 2, schedules=1).findings
    assert error.kind == "error"
    assert "rank 1" in error.why
    assert "nobody has it" in error.why
    (wrong,) = check(kernels.wrong, 2, schedules=1).findings
    assert wrong.kind == "wrong result"
    assert "computed something else" in wrong.why


def test_sys_exit_is_no_verdict():
    def main(world):
        kernels.racy(world)
        sys.exit(0)

    assert {f.kind for f in check(main, 2, schedules=2).findings} >= {"race", "error"}


def test_the_heap_is_as_large_as_the_environment_says(monkeypatch):
    def large(world):
        world.empty((20 << 20,), torch.uint8)

    monkeypatch.delenv("SUNDOG_HEAP_SIZE", raising=False)
    (finding,) = check(large, 1, schedules=1).findings
    assert "SUNDOG_HEAP_SIZE" in finding.why
    monkeypatch.setenv("SUNDOG_HEAP_SIZE", "32M")
    assert not check(large, 1, schedules=1).findings


def test_testing_check_raises_with_the_whole_report():
    must_be_clean(kernels.clean, 2, schedules=2)
    with pytest.raises(AssertionError, match="no CTA barrier before the release"):
        must_be_clean(kernels.racy, 2, schedules=2)


def test_testing_check_over_a_link():
    seen = set()
    must_be_clean(lambda world: seen.add((world.rank, world.passive)), 2, 1, link="pcie")
    assert seen == {(0, False), (1, True)}


def test_the_pytest_fixture_checks_a_users_kernel(tmp_path):
    test = tmp_path / "test_users.py"
    test.write_text(
        "from tests.tools.check import kernels\n"
        "def test_clean(sundog_check): sundog_check(kernels.clean, 2, schedules=1)\n"
        "def test_racy(sundog_check): sundog_check(kernels.racy, 2, schedules=1)\n"
    )
    command = ["-m", "pytest", "-q", "-p", "sundog.testing", str(test)]
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-o", "addopts="]
    done = python([*command, *options])
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "no CTA barrier before the release" in done.stdout


def test_kinds_of_schedules_take_turns():
    chosen = list(tokens(8, 5, Report(steps=40)))
    assert chosen[:4] == ["random:5", "pct:5:2:40", "ranks:5:2:40", "random:6"]
    assert [from_token(token).token for token in chosen] == chosen


def test_the_resident_programs_vary_unless_given():
    chosen = list(tokens(12, 0, Report(steps=40, widest=5)))
    few = [int(token.partition("@")[2] or 0) for token in chosen]
    assert few == [0, 1, 0, 2, 0, 4, 0, 1, 0, 2, 0, 4]
    assert [from_token(token).residents for token in chosen] == few
    assert not any("@" in token for token in tokens(12, 0, Report(widest=5), num_sms=16))
    assert not any("@" in token for token in tokens(12, 0, Report(widest=1)))


def test_a_late_rank_is_late_with_all_that_it_does():
    """The rank of the highest priority runs until nothing of it is left."""
    tasks = [SimpleNamespace(rank=rank) for rank in (0, 1, 2) * 3]
    schedule, order = from_token("ranks:3:1"), []
    while tasks:
        order.append(tasks.pop(schedule.choose(tasks)).rank)
    assert all(len(set(order[i : i + 3])) == 1 for i in (0, 3, 6))


@pytest.mark.parametrize("token", ["", "random", "random:x", "pct:1", "round-robin:1"])
def test_unknown_schedule_is_refused(token: str):
    with pytest.raises(ValueError, match="expected random:SEED or pct:SEED:DEPTH"):
        from_token(token)


def test_a_host_that_refuses_few_resident_programs_is_no_finding():
    report = check(kernels.four_at_once, 1, schedules=12)
    assert not report.findings, report
    assert "not run with 1 resident: 4 programs on 1 SMs could wait for ever" in report.notes


@pytest.mark.parametrize(
    ("report", "head"),
    [(Report(schedules=1), "no findings in 1 schedule"), (Report(), "no findings in 0 schedules")],
)
def test_the_head_of_a_report_has_its_counts(report, head):
    assert str(report) == head
