"""What a host did to a tensor alone is written down, and counts once a kernel touches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from support.traced import traced

import sundog
from sundog.checker.races import NO_ORDER
from sundog.machine.launcher import unseen
from sundog.tools._subject import expected
from sundog.tools.check.schedules import Report, check_once


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def read_on_another_stream(world: sundog.World, waits: bool) -> None:
    """Fill a tensor twice on one stream, and read it on another."""
    x, out = torch.zeros(8), torch.zeros(8)
    x[::2] = 2.0
    x[4:] += 1.0
    ready = world.record_event()
    with world.stream(1):
        if waits:
            world.wait_event(ready)
        copy[(1,)](x, out, 8, BLOCK=8)
    world.synchronize()


def read_what_is_half_written(world: sundog.World, end: int) -> None:
    x, out = torch.empty(8), torch.zeros(8)
    x[:end] = 1.0
    copy[(1,)](x, out, 8, BLOCK=8)
    world.synchronize()


def _checked(function: object, *more: object) -> Report:
    return check_once(lambda world: function(world, *more), 1)  # type: ignore[operator]


def test_a_kernel_on_another_stream_meets_the_diary() -> None:
    findings = _checked(read_on_another_stream, False).findings
    assert {finding.rule for finding in findings if finding.first.verb == "host write"} == {
        NO_ORDER.name
    }
    assert "x[4:] += 1.0" in {finding.first.text for finding in findings}
    assert not _checked(read_on_another_stream, True).findings


@pytest.mark.parametrize(("end", "found"), [(5, ["[5:8]"]), (8, [])])
def test_bytes_that_the_host_left_out_stay_unwritten(end: int, found: list[str]) -> None:
    findings = _checked(read_what_is_half_written, end).findings
    assert [finding.second.indices for finding in findings] == found
    assert all(finding.kind == "unwritten" for finding in findings)


def add_unseen(world: sundog.World) -> None:
    x = torch.zeros(8)
    with unseen():
        y = x + 1.0
    y *= 2.0


class Doubled:
    """An op, as far as its answer is concerned."""

    @staticmethod
    def reference(problem: None, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[rank] * 2.0


def ask_for_the_answer(world: sundog.World) -> None:
    assert (expected(world, Doubled, None, (torch.ones(8),)) == 2.0).all()  # type: ignore[arg-type]


def _seen(function: Callable, body: Callable) -> list[tuple[str, int]]:
    """Return what a checked rank is seen to touch in some lines, counted from their first."""
    first = body.__code__.co_firstlineno
    last = max(line or 0 for _, _, line in body.__code__.co_lines())
    _, trace = traced(function, 1)
    lines = [(step[0], step[4]) for step in trace if step[4] is not None]
    return [(what, line - first) for what, line in lines if first <= line <= last]


def test_only_what_is_done_unseen_goes_unnoticed() -> None:
    assert _seen(add_unseen, add_unseen) == [("host_read", 4), ("host_write", 4)]


def test_an_answer_is_computed_unseen() -> None:
    """It comes from copies that the rank alone has, so no kernel can race with it."""
    assert ("host_read", 1) in _seen(ask_for_the_answer, ask_for_the_answer)  # what it does with it
    assert not _seen(ask_for_the_answer, Doubled.reference)
