"""Every kind of mutant is made, and killed. What only atomics need is not called superfluous."""

from __future__ import annotations

import pytest
import torch

from sundog.tools.check.mutation import Outcome, find_mutants, mutate, same

from . import mutable

pytestmark = pytest.mark.sim_only


def outcomes(function: object, size: int) -> dict[str, Outcome]:
    found, report = find_mutants(function, size)
    assert not report.findings, report
    done = mutate(function, size, found, schedules=40, expected=report.results)
    return {outcome.name: outcome for outcome in done}


@pytest.fixture(scope="module")
def of_everything() -> dict[str, Outcome]:
    return outcomes(mutable.everything, 3)


@pytest.mark.parametrize(
    "name",
    [
        "pass_on: while seen < epoch: dropped",
        'pass_on: atomic_xchg: sem="release" (from SEM) becomes "relaxed"',
        "pass_on: wait: the epoch is one more",
        "pass_on: wait: the next flag",
        "pass_on: signal: the next peer",
        "pass_on: signal: the next flag",
        "pass_on: store: the next peer",
        "pass_on: mask at < n: one less",
        "pass_on: mask at < n: one less #2",
        "everything: world.barrier(): dropped",
    ],
)
def test_a_kind_is_made_and_killed(of_everything: dict[str, Outcome], name: str) -> None:
    assert of_everything[name].killed_by, of_everything[name].mutant.diff


def test_a_wait_that_comes_after_its_access_is_killed(of_everything: dict[str, Outcome]) -> None:
    (late,) = [name for name in of_everything if "wait: after memory.store(" in name]
    assert of_everything[late].killed_by == "race"


def test_nothing_survives(of_everything: dict[str, Outcome]) -> None:
    assert len(of_everything) > 25
    alive = [o.mutant.diff for o in of_everything.values() if not o.killed_by]
    assert not alive, "\n".join(alive)


def test_an_unasserted_result_kills_too(of_everything: dict[str, Outcome]) -> None:
    """The last element of x stays what it was, which is no race and no unwritten read."""
    assert of_everything["pass_on: mask at < n: one less #2"].killed_by == "wrong result"


def test_what_only_atomics_need_is_not_called_superfluous() -> None:
    found = outcomes(mutable.atomics_only, 1)
    relaxed = [name for name in found if 'sem="acq_rel" (the default) becomes' in name]
    assert len(relaxed) == 2, list(found)
    for name in relaxed:
        assert found[name].killed_by == "wrong result", found[name].report
    assert found['count: atomic_add: scope="gpu" (the default) becomes "cta"'].killed_by == "race"


def test_results_are_compared_bit_by_bit() -> None:
    one, two = torch.ones(2), torch.tensor([1.0, 2.0])
    assert same([{"a": (one, 1)}], [{"a": (one.clone(), 1)}])
    for other in ({"a": (two, 1)}, {"a": (one, 2)}, {"b": (one, 1)}, {"a": (one,)}, None):
        assert not same([{"a": (one, 1)}], [other])
