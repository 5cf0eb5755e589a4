"""Loops that others keep going are livelocks, and are found; loops that end for certain are not."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.machine.rounds import Cycles
from sundog.tools.check.schedules import Report, check, check_once


@triton.jit
def swap(word, value):
    return tl.atomic_xchg(word, value, sem="acq_rel", scope="gpu")


@triton.jit
def undo(words):
    """Each waits for a value that the other one overwrites."""
    if tl.program_id(0) == 0:
        while swap(words, 0) == 1:
            pass
    else:
        while swap(words, 1) == 0:
            pass


@triton.jit
def undone_once(words):
    if tl.program_id(0) == 0:
        while swap(words, 0) == 1:
            pass
    else:
        swap(words, 1)


@triton.jit
def give_way_to_each_other(words):
    """Claim one's own word, and take it back while the other one claims too: after you."""
    me = tl.program_id(0)
    swap(words + me, 1)
    while tl.atomic_add(words + 1 - me, 0, sem="acquire", scope="gpu") == 1:
        swap(words + me, 0)
        swap(words + me, 1)
    swap(words + me, 0)


@triton.jit
def give_way_to_the_first(words):
    """The same, but the first one insists."""
    me = tl.program_id(0)
    swap(words + me, 1)
    while tl.atomic_add(words + 1 - me, 0, sem="acquire", scope="gpu") == 1:
        if me == 1:
            swap(words + me, 0)
            while tl.atomic_add(words, 0, sem="acquire", scope="gpu") == 1:
                pass
            swap(words + me, 1)
    swap(words + me, 0)


@triton.jit
def take_turns(words):
    """Hand a token round three times; every turn of a loop waits for another program."""
    me = tl.program_id(0)
    turn = 0
    while turn < 3:
        while tl.atomic_cas(words, me, 7, sem="acq_rel", scope="gpu") != me:
            pass
        swap(words, 1 - me)
        turn += 1


@triton.jit
def add_by_compare_and_swap(words):
    """Retry while others are faster: each time that one fails, another one has got on."""
    seen = tl.atomic_add(words, 0, sem="relaxed", scope="gpu")
    old = tl.atomic_cas(words, seen, seen + 1, sem="relaxed", scope="gpu")
    while old != seen:
        seen = old
        old = tl.atomic_cas(words, seen, seen + 1, sem="relaxed", scope="gpu")


@triton.jit
def third_ends_it(words):
    """Two overwrite each other until a third one, which the schedule may not forget, says stop."""
    me = tl.program_id(0)
    if me == 2:
        swap(words + 1, 1)
    else:
        while tl.atomic_add(words + 1, 0, sem="acquire", scope="gpu") == 0:
            swap(words, me)


@triton.jit
def overwrite_for_long(words):
    """One spins while the other one, which counts, writes the same two values again and again."""
    if tl.program_id(0) == 0:
        while swap(words, 0) != 5:
            pass
    else:
        for turn in range(200):
            swap(words, turn % 2)
        while swap(words, 5) != 0:
            pass
        swap(words, 5)


def _of(kernel: triton.JITFunction, programs: int = 2) -> object:
    def main(world: sundog.World) -> None:
        words = torch.zeros(4, dtype=torch.int32)
        kernel[(programs,)](words, launch_cooperative_grid=True)
        world.synchronize()

    return main


def _checked(kernel: triton.JITFunction, programs: int = 2) -> Report:
    return check(_of(kernel, programs), 1, schedules=30)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernel", [undo, give_way_to_each_other])
def test_a_livelock_is_found_with_its_cycle(kernel: triton.JITFunction) -> None:
    report = _checked(kernel)
    (finding,) = report.findings
    assert finding.kind == "livelock"
    assert "2 programs run without end" in finding.why
    assert "turns bring all programs and all memory back to where they were" in finding.why
    assert "atomic XCHG found 0" in finding.why
    again = check_once(_of(kernel), 1, finding.token)  # type: ignore[arg-type]
    assert [each.why for each in again.findings] == [finding.why]


RIGHT = [
    (undone_once, 2),
    (give_way_to_the_first, 2),
    (take_turns, 2),
    (add_by_compare_and_swap, 4),
    (third_ends_it, 3),
    (overwrite_for_long, 2),
]


@pytest.mark.parametrize(("kernel", "programs"), RIGHT)
def test_a_loop_that_ends_for_certain_is_clean(kernel: triton.JITFunction, programs: int) -> None:
    report = _checked(kernel, programs)
    assert not report.findings, report
    assert report.spins


def test_programs_must_all_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that a loop that a third one would end counts as a livelock."""
    monkeypatch.setattr(Cycles, "_must_take_part", lambda self, program: set())
    assert any(finding.kind == "livelock" for finding in _checked(third_ends_it, 3).findings)
