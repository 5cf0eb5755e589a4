"""Every wrong kernel is found within 200 schedules, for the right reason; every twin is clean."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from sundog.checker.portability import VOLATILE_FLAG
from sundog.checker.races import PLAIN_FLAG, RELAXED_ACQUIRE
from sundog.tools._options import CheckOptions
from sundog.tools.check.check_command import run_corpus
from sundog.tools.check.schedules import Report, check, check_once, tokens

from . import PAIRS, Pair

SCHEDULES = 200
TWIN_SCHEDULES = 12  # each kind of schedule with all and with few programs resident, twice
HEAP = 256 << 10  # bytes: too small for mailboxes, which take half of the time to open a world


def search(pair: Pair) -> Report:
    """Until the expected finding is there."""
    report = Report()
    for token in tokens(SCHEDULES, 0, report):
        report.merge(check_once(pair.wrong, pair.world_size, token, pair.num_sms, HEAP))
        if any((f.kind, f.rule) == (pair.kind, pair.rule.name) for f in report.findings):
            break
    return report


def twin_of(pair: Pair) -> tuple:
    """Some wrong kernels have the same twin, which is checked once."""
    assert isinstance(pair.fixed, partial)
    return pair.fixed.func, pair.fixed.args, pair.world_size, pair.num_sms


TWINS = list({twin_of(pair): pair for pair in PAIRS}.values())


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_wrong_kernel_is_found(pair: Pair) -> None:
    report = search(pair)
    assert (pair.kind, pair.rule.name) in {(f.kind, f.rule) for f in report.findings}, report


@pytest.mark.parametrize("pair", TWINS, ids=str)
def test_twin_is_clean(pair: Pair) -> None:
    report = check(
        pair.fixed, pair.world_size, TWIN_SCHEDULES, 0, pair.num_sms, HEAP, stop_early=True
    )
    assert not report.findings, report


def test_the_corpus_is_large_enough() -> None:
    assert len(PAIRS) >= 40
    assert len({str(pair) for pair in PAIRS}) == len(PAIRS)


def test_finding_replays_from_its_token() -> None:
    pair = next(p for p in PAIRS if p.name == "two locks in two orders")  # only some schedules
    found = search(pair).findings[0]
    again = check_once(pair.wrong, pair.world_size, found.token, pair.num_sms, HEAP)
    assert [str(f) for f in again.findings] == [str(found)]


def test_poll_without_order_explains_the_race_on_the_data() -> None:
    """The data's race has the same cause as the flag's, and says so."""
    (pair,) = [pair for pair in PAIRS if pair.family == "plain poll"]
    found = {(f.second.allocation, f.rule) for f in search(pair).findings}
    assert found == {("flag", PLAIN_FLAG.name), ("inbox", PLAIN_FLAG.name)}


def test_a_volatile_poll_is_atomic_on_nvidia_a_remark_for_amd() -> None:
    (pair,) = [pair for pair in PAIRS if pair.family == "volatile poll"]
    report = search(pair)
    assert {(f.second.allocation, f.rule) for f in report.findings} == {
        ("inbox", RELAXED_ACQUIRE.name)
    }
    assert {(f.second.allocation, f.rule) for f in report.remarks} == {("flag", VOLATILE_FLAG.name)}
    strict = check(pair.fixed, pair.world_size, 3, 0, 0, HEAP, strict=True)
    assert {f.rule for f in strict.findings} == {VOLATILE_FLAG.name}


@pytest.mark.parametrize("name", ["double buffering", "single buffer"])
def test_pct_changes_priorities_within_the_run(name: str) -> None:
    """With the old window of 2,000 steps, in runs of about 30, none of 60 schedules found these."""
    (pair,) = [p for p in PAIRS if p.family == "one buffer short" and p.name == name]
    report = check_once(pair.wrong, pair.world_size, "random:0", pair.num_sms, HEAP)
    assert 0 < report.steps < 100
    schedules = [token for token in tokens(60, 0, report) if token.startswith("pct")]
    reports = (check_once(pair.wrong, pair.world_size, t, pair.num_sms, HEAP) for t in schedules)
    assert any(finding.kind == pair.kind for report in reports for finding in report.findings)


def test_the_command_searches_for_the_expected_kind(tmp_path: Path) -> None:
    """The first schedule of one of these ends in a wrong result before it shows the race."""
    few = "PAIRS = [pair for pair in ALL if pair.family == 'one buffer short']"
    (tmp_path / "__init__.py").write_text(f"from corpus import PAIRS as ALL\n{few}\n")
    path = tmp_path / "found.json"
    options = CheckOptions("", 2, 20, 0, corpus=str(tmp_path), json=str(path))
    assert run_corpus(options) == 0
    assert [row["found"] for row in json.loads(path.read_text())] == [True, True]
