"""What a host did to a tensor alone is written down, and counts once a kernel touches it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import NO_ORDER
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
