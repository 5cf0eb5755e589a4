"""What a finding says: one per direction of a race, and whose call made the signal."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from sundog import World
from sundog.checker.failures import CANNOT_INTERPRET, WRONG_RESULT
from sundog.checker.races import RELAXED_RELEASE
from sundog.tools.check.schedules import check

pytestmark = pytest.mark.sim_only


@triton.jit
def turns(x, out):
    for turn in range(3):
        if tl.program_id(0) == 0:
            tl.store(x, turn)
        else:
            tl.store(out + turn, tl.load(x))


def read_and_overwritten(world: World) -> None:
    turns[(2,)](torch.zeros(1), torch.zeros(3))


def test_both_orders_of_a_read_and_a_write_are_two_findings() -> None:
    found = check(read_and_overwritten, 1, schedules=12).findings
    assert {(f.first.verb, f.second.verb) for f in found} == {("store", "load"), ("load", "store")}
    assert len({(f.first.line, f.second.line) for f in found}) == 2
    assert len(found) == 2, [str(f) for f in found]


@triton.jit
def tell(flag, SEM: tl.constexpr):
    tl.debug_barrier()  # this program's tile before the flag
    tl.atomic_xchg(flag, 1, sem=SEM, scope="gpu")


@triton.jit
def hear(flag):
    while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
        pass


@triton.jit
def pass_on(x, flags, out, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Program 0 stores, each of the next hands it on, and the last one loads."""
    program, last = tl.program_id(0), tl.num_programs(0) - 1
    at = tl.arange(0, BLOCK)
    if program == 0:
        tl.store(x + at, at)
        tell(flags, SEM="release")
    else:
        hear(flags + program - 1)
        if program < last:
            if program == FAULT:
                tell(flags + program, SEM="relaxed")
            else:
                tell(flags + program, SEM="release")
        else:
            tl.store(out + at, tl.load(x + at))


def chain(fault: int, world: World) -> None:
    flags = torch.zeros(8, dtype=torch.int64)
    pass_on[(5,)](torch.zeros(16, dtype=torch.int32), flags, torch.zeros(16), fault, BLOCK=16)


@pytest.mark.parametrize("fault", [1, 2, 3])
def test_the_faulty_link_of_a_long_chain_is_named_with_its_call(fault: int) -> None:
    (found,) = check(partial(chain, fault), 1, schedules=6, num_sms=8).findings
    assert found.rule == RELAXED_RELEASE.name, found
    helper, call = (_line_of(text) for text in ("tl.atomic_xchg(flag, 1", 'SEM="relaxed")'))
    assert f"test_messages.py:{helper} (called from :{call})" in found.why


def test_a_chain_without_fault_is_clean() -> None:
    assert not check(partial(chain, 0), 1, schedules=6, num_sms=8).findings


@triton.jit
def unread(x, flag, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(x + at, at)
        tell(flag, SEM="release")
    else:
        tl.store(out + at, tl.load(x + at))


def nobody_waits(world: World) -> None:
    flag = torch.zeros(1, dtype=torch.int64)
    unread[(2,)](torch.zeros(16, dtype=torch.int32), flag, torch.zeros(16), BLOCK=16)


def test_a_signal_that_nobody_read_is_named() -> None:
    found = check(nobody_waits, 1, schedules=12).findings
    after = [f for f in found if f.second.verb == "load"]
    assert after
    assert "has not read that signal" in after[0].why
    assert f"test_messages.py:{_line_of('tl.atomic_xchg(flag, 1')}" in after[0].why


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@triton.jit
def helper(x):
    return tl.inline_asm_elementwise("frobnicate.u32 $0, $1;", "=r,r", [x], tl.int32, False, 1)


@triton.jit
def unknown_assembly(x):
    tl.store(x, helper(tl.load(x)))


def refused(world: World) -> None:
    unknown_assembly[(1,)](torch.zeros(1, dtype=torch.int32))


def test_unknown_assembly_is_refused_with_its_text_and_line() -> None:
    (found,) = check(refused, 1, schedules=1).findings
    assert found.rule == CANNOT_INTERPRET.name
    assert "frobnicate.u32" in found.why
    inner, outer = (_line_of(text) for text in ("tl.inline_asm_", "helper(tl.load(x))"))
    at = "tests/checker/test_messages.py"
    assert f"at {at}:{inner} (called from :{outer})" in found.why


def test_failures_that_differ_in_numbers_are_one_finding() -> None:
    def key(why: str) -> tuple:
        return WRONG_RESULT.finding(why).key()

    first = key("rank 0: theirs.py:3: 12 of 4096 elements are wrong, the first at 0: -2.5")
    assert first == key("rank 1: theirs.py:3: 7 of 4096 elements are wrong, the first at 31: 4.0")
    assert first != key("rank 0: theirs.py:4: 12 of 4096 elements are wrong, the first at 0: -2.5")
