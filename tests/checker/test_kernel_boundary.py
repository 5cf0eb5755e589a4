"""A relaxed signal at the start of a kernel is a remark for what earlier kernels did, no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import KERNEL_BOUNDARY, RELAXED_RELEASE
from sundog.device import memory
from sundog.tools.check.schedules import Report, check

pytestmark = pytest.mark.compat
BLOCK = 16


@triton.jit
def write(data, rank, BLOCK: tl.constexpr):
    tl.store(data + tl.arange(0, BLOCK), rank + 1)


@triton.jit
def meet_and_read(
    data,
    flag,
    out,
    peer,
    ctx,
    POLL: tl.constexpr,
    WRITE: tl.constexpr,
    MEET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.arange(0, BLOCK)
    if WRITE:
        tl.store(data + at, 5)
        tl.debug_barrier()
    # relaxed on purpose: relies on the end of the kernel before this one
    memory.atomic_xchg(flag, 1, peer, ctx, sem="relaxed")
    if POLL == "volatile":
        while tl.load(flag, volatile=True) < 1:
            pass
    else:
        while tl.atomic_add(flag, 0, sem=POLL, scope="sys") < 1:
            pass
    if MEET:
        tl.debug_barrier()  # no thread loads before the poll has ended
    tl.store(out + at, memory.load(data + at, peer, ctx))


def run(poll: str, writes: bool, strict: bool, meet: bool = True) -> Report:
    def main(world: sundog.World) -> None:
        data, flag = world.zeros((BLOCK,), torch.float32, "data"), world.signals((1,), "flag")
        out, peer = torch.empty(BLOCK), 1 - world.rank
        world.barrier()
        write[(1,)](data, world.rank, BLOCK)
        meet_and_read[(1,)](data, flag, out, peer, world.ctx, poll, writes, meet, BLOCK)
        assert out[0].item() == (5 if writes else peer + 1)

    return check(main, 2, 4, heap_size=256 << 10, strict=strict)


def rules(findings: list[Any]) -> set[str]:
    return {finding.rule for finding in findings if finding.second.allocation == "data"}


@pytest.mark.parametrize("poll", ["acquire", "relaxed", "volatile"])
def test_what_an_earlier_kernel_wrote_is_a_remark(poll: str) -> None:
    report = run(poll, False, strict=False)
    assert not report.findings, report
    assert rules(report.remarks) == {KERNEL_BOUNDARY.name}
    assert "before the signalling kernel began" in str(report)
    strict = run(poll, False, strict=True)
    assert not strict.remarks
    assert KERNEL_BOUNDARY.name in rules(strict.findings)


def test_what_the_same_kernel_wrote_is_a_race() -> None:
    report = run("acquire", True, strict=False)
    assert RELAXED_RELEASE.name in rules(report.findings)


@pytest.mark.parametrize("poll", ["relaxed", "volatile"])
def test_a_load_that_may_be_made_before_the_poll_is_a_race(poll: str) -> None:
    report = run(poll, False, strict=False, meet=False)
    assert RELAXED_RELEASE.name in rules(report.findings)


@triton.jit
def meet_and_write(data, flag, peer, ctx, SEND: tl.constexpr, BLOCK: tl.constexpr):
    """Meet the peer, then write what a later kernel of this rank stands for."""
    memory.atomic_xchg(flag + 1, 1, peer, ctx, sem=SEND)
    while tl.atomic_add(flag + 1, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(data + tl.arange(0, BLOCK), 3)


@pytest.mark.parametrize("send", ["relaxed", "release"])
def test_an_earlier_signal_does_not_hide_the_boundary(send: str) -> None:
    def main(world: sundog.World) -> None:
        data, flag = world.zeros((BLOCK,), torch.float32, "data"), world.signals((2,), "flag")
        out, peer = torch.empty(BLOCK), 1 - world.rank
        world.barrier()
        meet_and_write[(1,)](data, flag, peer, world.ctx, send, BLOCK)
        meet_and_read[(1,)](data, flag, out, peer, world.ctx, "acquire", False, False, BLOCK)
        assert out[0].item() == 3

    report = check(main, 2, 4, heap_size=256 << 10)
    assert not report.findings, report
    assert rules(report.remarks) == {KERNEL_BOUNDARY.name}
