"""Self-validating words: a rule of their own, and what it does not cover."""

from __future__ import annotations

from typing import Any

import pytest

import sundog
from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import Report, check

from .lamport import program


def checked(**how: Any) -> Report:
    return check(as_rank(program(**how)), 2, schedules=6, seed=1)


def test_words_arrive() -> None:
    found = sundog.run(program(), 2, "sim", torch=True)
    assert found == [[n + 1 for n in range(64)], [*range(64)]]


@pytest.mark.parametrize("empties", ["reader", "kernel", "host"])
def test_self_validating_words_rely_on_the_kernel_boundary(empties: str) -> None:
    report = checked(empties=empties)
    assert not report.findings, report
    assert {finding.rule for finding in report.remarks} == {"relies on the kernel boundary"}
    assert "self-validating" in report.remarks[0].why


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"extra": True}, "self-validating word for other data"),
        ({"volatile": False}, "no order"),
        ({"slots": 1}, "no order"),
        ({"slots": 1, "empties": "kernel"}, "no order"),
    ],
    ids=["other data", "plain poll", "slot written too early", "and emptied by a kernel"],
)
def test_what_words_do_not_cover_is_found(how: dict, rule: str) -> None:
    report = checked(**how)
    assert rule in {finding.rule for finding in report.findings}, report
