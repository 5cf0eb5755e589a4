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
from sundog.checker.findings import Rule
from sundog.checker.races import BARRIER_BEFORE, PLAIN_FLAG, RELAXED_RELEASE
from sundog.device import local
from sundog.tools.check.schedules import check, check_once

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
def reset(parts, count, out, SEM: tl.constexpr, BLOCK: tl.constexpr):
    """The last program to arrive resets the count for the next launch, which orders nothing."""
    at, last = tl.arange(0, BLOCK), tl.num_programs(0) - 1
    tl.store(parts + tl.program_id(0) * BLOCK + at, at)
    if tl.atomic_add(count, 1, sem=SEM, scope="gpu") == last:  # wrong: no CTA barrier first
        tl.atomic_xchg(count, 0, sem="relaxed", scope="gpu")
        for part in range(last + 1):
            tl.store(out + part * BLOCK + at, tl.load(parts + part * BLOCK + at))


def arrive(sem: str, world: World) -> None:
    parts, count = torch.zeros(48, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    reset[(3,)](parts, count, torch.zeros(48), SEM=sem, BLOCK=16)


@pytest.mark.parametrize(
    ("sem", "rule"), [("acq_rel", BARRIER_BEFORE), ("relaxed", RELAXED_RELEASE)]
)
def test_a_signal_is_named_with_the_read_that_came_first(sem: str, rule: Rule) -> None:
    """The reset reads it once more, and is no wait."""
    found, line = (
        check(partial(arrive, sem), 1, schedules=6).findings,
        _line_of("count, 1, sem=SEM"),
    )
    assert {each.rule for each in found} == {rule.name}, [str(each) for each in found]
    assert (
        f"test_messages.py:{line} was read at tests/checker/test_messages.py:{line},"
        in found[0].why
    )


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


@triton.jit
def two_words(data, flag, out, SEM: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.atomic_xchg(data, 42, sem="relaxed", scope="gpu")
        tell(flag, SEM=SEM)
    else:
        hear(flag)
        tl.store(out, tl.atomic_add(data, 0, sem="relaxed", scope="gpu"))


def pass_a_word(sem: str, world: World) -> None:
    data, flag, out = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    two_words[(2,)](data, flag, out, sem)
    assert out.item() == 42


def test_an_older_value_names_its_word_and_the_weak_signal() -> None:
    (found,) = check(partial(pass_a_word, "relaxed"), 1, schedules=12).findings
    assert "read data[0] = 0, not 42" in found.why
    assert "; it read the signal of " in found.why
    assert "(relaxed, gpu)" in found.why
    assert found.why.endswith("(acquire, gpu): relaxed release")
    assert "read with acquire" in found.suggestion
    assert not check(partial(pass_a_word, "release"), 1, schedules=12).findings


@triton.jit
def both_enter(wants, out, SEM: tl.constexpr):
    me = tl.program_id(0)
    tl.atomic_xchg(wants + me, 1, sem="acq_rel" if SEM == "acq_rel" else "release", scope="gpu")
    tl.store(out + me, tl.atomic_add(wants + 1 - me, 0, sem=SEM, scope="gpu"))


def enter(sem: str, world: World) -> None:
    wants, out = (torch.zeros(2, dtype=torch.int64) for _ in range(2))
    both_enter[(2,)](wants, out, sem)
    assert out.sum() > 0


def test_advice_where_all_release_and_acquire_is_not_that() -> None:
    (found,) = check(partial(enter, "acquire"), 1, schedules=12).findings
    assert "fence.sc" in found.suggestion
    assert not check(partial(enter, "acq_rel"), 1, schedules=12).findings


@triton.jit
def late(flag, out, ctx):
    """Program 1 waits with sundog's own wait, whose polls may well read an older value."""
    if tl.program_id(0) == 0:
        local.signal(flag, 1, ctx)
    else:
        local.wait(flag, 1, ctx)
        tl.store(out, 1)


def wait_and_fail(world: World) -> None:
    flag, out = world.signals((1,), "flag"), torch.zeros(1, dtype=torch.int64)
    world.barrier()
    late[(2,)](flag, out, world.ctx)
    assert out.item() == 2


def test_polls_of_a_wait_are_no_cause() -> None:
    for seed in range(12):
        (found,) = check_once(wait_and_fail, 1, f"random:{seed}").findings
        assert "older values" not in found.why, found


@triton.jit
def tell_plainly(x, flag, out):
    if tl.program_id(0) == 0:
        tl.store(x, 1)
        tl.debug_barrier()
        tl.store(flag, 1)
    else:
        hear(flag)
        tl.store(out, tl.load(x))


def signal_by_a_store(world: World) -> None:
    tell_plainly[(2,)](*(torch.zeros(1, dtype=torch.int64) for _ in range(3)))


def test_a_plain_signal_is_the_cause_of_the_race_on_the_data() -> None:
    found = check(signal_by_a_store, 1, schedules=1).findings
    assert {(f.second.allocation, f.rule) for f in found} == {
        ("flag", PLAIN_FLAG.name),
        ("x", PLAIN_FLAG.name),
    }
    (why,) = [f.why for f in found if f.second.allocation == "x"]
    assert "but it is a plain store: it publishes nothing" in why
    assert 'Smallest repair: an atomic with sem="release"' in why


@triton.jit
def read_on(x, out):
    tl.store(out, tl.load(x))


def free_at_the_end_of_a_scope(world: World) -> None:
    out = torch.zeros(1)
    with world.scope():
        x = world.zeros((1,), name="x")
        event = world.record_event()
        with world.stream(1):
            world.wait_event(event)
            read_on[(1,)](x, out)


def test_a_free_is_named_by_the_line_of_its_scope() -> None:
    (found,) = check(free_at_the_end_of_a_scope, 1, schedules=1).findings
    assert found.second.text == "with world.scope():"
