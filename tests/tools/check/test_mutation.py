"""Mutants: made one at a time, shown as a diff, killed by the checker, all of them."""

from __future__ import annotations

import ast

import pytest
import torch
import triton
import triton.language as tl

from sundog.checker.mutants import mutants
from sundog.device import context, memory, signal
from sundog.interpreter.interpreter import twin
from sundog.tools._subject import function_of
from sundog.tools.check.mutation import find_mutants, mutate

from . import kernels

EXAMPLES = ["examples/ring.py", "examples/all_gather.py", "examples/counter.py", "all_gather.push"]


@pytest.mark.long
@pytest.mark.parametrize("target", EXAMPLES)
def test_every_mutant_is_killed(target: str):
    function = function_of(target, 3)
    found, report = find_mutants(function, 3)
    assert report.findings == [], report
    assert len(found) > 5
    survived = [o for o in mutate(function, 3, found, schedules=60) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)


@pytest.mark.compat
def test_mutants_cover_every_kind_and_show_a_diff():
    found = find_mutants(kernels.clean, 2)[0]
    for example in EXAMPLES:
        found += find_mutants(function_of(example, 2), 2)[0]
    words = " | ".join(mutant.what for mutant in found)
    for what in (
        "tl.debug_barrier(): dropped",
        "signal.wait(flag",  # a wait dropped
        'sem="release" becomes "relaxed"',
        'sem="acquire" becomes "relaxed"',
        'scope="sys" becomes "gpu"',
        'scope="sys" becomes "cta"',
        'scope="gpu" becomes "cta"',
        "wait: the epoch is one less",
        "while seen < epoch: waits for one less",
        "signal: before the store above it",
    ):
        assert what in words, words
    for mutant in found:
        changed = [line for line in mutant.diff.splitlines() if line[:1] in "+-"][2:]
        assert changed, mutant.what


@pytest.mark.compat
def test_kernel_is_itself_again_after_its_mutants():
    found, _ = find_mutants(kernels.clean, 2)
    before = twin(kernels.send)
    outcomes = list(mutate(kernels.clean, 2, found[:3], schedules=2))
    assert len(outcomes) == 3
    assert twin(kernels.send) is before


def test_an_error_of_the_tool_is_no_kill(monkeypatch):
    found = [m for m in find_mutants(kernels.clean, 2)[0] if m.owner == "send"]  # not of the host
    monkeypatch.setattr("sundog.checker.checker.Checker.cta_barrier", lambda *args: 1 / 0)
    outcome = next(mutate(kernels.clean, 2, found[-1:], schedules=1))
    assert [f.kind for f in outcome.report.findings] == ["error"]
    assert outcome.killed_by == ""


@triton.jit
def traced(flag, epoch, ctx, TRACE: tl.constexpr):
    signal.wait(flag, 0, epoch, ctx, TRACE)
    if TRACE:
        tl.atomic_add(flag, epoch, sem="relaxed", scope="gpu")


@triton.jit
def broadcast(x, flag, lane, n, ctx):
    zero = tl.zeros((4,), tl.int64)
    for step in range(tl.load(ctx + context.SIZE)):
        peer = (step + n) % tl.load(ctx + context.SIZE)
        memory.store(x, n, peer, ctx)
        memory.store(x + step, n, peer, ctx)
    inside = lane < n
    tl.atomic_add(flag + lane, zero, mask=lane < 4, sem="relaxed", scope="gpu")
    tl.atomic_add(flag + lane, zero, mask=inside, sem="relaxed", scope="gpu")
    tl.atomic_add(flag + lane, lane, mask=lane < 2, sem="relaxed", scope="gpu")


def test_what_changes_nothing_is_no_mutant():
    """What goes to every peer goes to the next one too; an atomic that adds nothing is a load."""
    words = [mutant.what for mutant in mutants([broadcast])]
    assert [w for w in words if "peer" in w] == ["store: to peer 0 only", "store: the next peer"]
    masks = [w for w in words if "mask" in w and "one less" in w]
    assert sorted(masks) == ["mask lane < 2: one less", "mask lane < n: one less"]


def test_the_bound_of_waits_is_not_mutated():
    """No wait expires in a check, so no mutant of it could be killed."""
    assert mutants([signal._polls_allowed, signal._run_out]) == []
    assert mutants([signal.wait]) != []


def test_a_traced_wait_is_a_wait_and_its_record_is_nothing():
    words = [mutant.what for mutant in mutants([traced])]
    dropped = "signal.wait(flag, 0, epoch, ctx, TRACE): dropped"
    epochs = ["wait: the epoch is one less", "wait: the epoch is one more"]
    assert sorted(words) == [dropped, *epochs]
    (kept,) = (m.tree for m in mutants([traced]) if m.what == dropped)
    assert ast.unparse(kept.body[0]) == "pass"


@triton.jit
def sometimes(flag, MORE: tl.constexpr):
    tl.atomic_add(flag, 1, sem="release", scope="sys")
    if MORE:
        tl.atomic_xchg(flag, 1, sem="release", scope="sys")


def test_an_atomic_that_did_not_run_has_no_mutants_and_is_named():
    def main(world):
        sometimes[(1,)](world.zeros(1, torch.int32), False)

    found, report = find_mutants(main, 1)
    assert any("atomic_add" in mutant.what for mutant in found)
    assert not any("atomic_xchg" in mutant.what for mutant in found)
    (note,) = report.notes
    assert "atomic_xchg(flag, 1, sem='release', scope='sys') did not run" in note


@triton.jit
def one_way(flag, MORE: tl.constexpr):
    if MORE:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen < 1:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        tl.debug_barrier()
    else:
        tl.atomic_add(flag, 1, sem="release", scope="sys")
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
            pass


def test_a_branch_that_did_not_run_has_no_mutants():
    def main(world):
        one_way[(1,)](world.zeros(1, torch.int32), False)

    found, _ = find_mutants(main, 1)
    assert any("while" in mutant.what for mutant in found)
    assert not any("while seen" in mutant.what or "debug" in mutant.what for mutant in found)
