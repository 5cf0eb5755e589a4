"""Every wrong kernel is found within 200 schedules, for the right reason; every twin is clean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import sundog
from sundog.check import Report, check, check_once, tokens

from . import PAIRS, Pair

SCHEDULES = 200


def search(pair: Pair) -> Report:
    """Until the expected finding is there."""
    report = Report()
    for token in tokens(SCHEDULES, seed=0):
        report.merge(check_once(pair.wrong, pair.world_size, token, pair.num_sms))
        if any((f.kind, f.rule) == (pair.kind, pair.rule) for f in report.findings):
            break
    return report


@functools.cache  # some wrong kernels have the same twin
def check_twin(
    host: Callable[..., None], arguments: tuple[Any, ...], world_size: int, num_sms: int
) -> Report:
    def fixed(world: sundog.World) -> None:
        host(*arguments, world)

    return check(fixed, world_size, SCHEDULES, num_sms=num_sms)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_wrong_kernel_is_found(pair: Pair) -> None:
    report = search(pair)
    assert (pair.kind, pair.rule) in {(f.kind, f.rule) for f in report.findings}, report


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_twin_is_clean(pair: Pair) -> None:
    fixed = pair.fixed
    assert isinstance(fixed, functools.partial)
    report = check_twin(fixed.func, fixed.args, pair.world_size, pair.num_sms)
    assert not report.findings, report


def test_the_corpus_is_large_enough() -> None:
    assert len(PAIRS) >= 40
    assert len({str(pair) for pair in PAIRS}) == len(PAIRS)


def test_finding_replays_from_its_token() -> None:
    pair = next(p for p in PAIRS if p.name == "two locks in two orders")  # only some schedules
    found = search(pair).findings[0]
    again = check_once(pair.wrong, pair.world_size, found.token, pair.num_sms)
    assert [str(f) for f in again.findings] == [str(found)]
