"""What stores and fences of inline PTX order: a store reads nothing, a fence has its own scope."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl

from sundog import World
from sundog.checker.races import RELAXED_RELEASE
from sundog.tools.check.schedules import check

pytestmark = pytest.mark.sim_only
FENCE = "fence.acq_rel.gpu; mov.u32 $0, 0;"
STORE = "st.relaxed.gpu.global.u64 [$1], 2; mov.u32 $0, 0;"
ADD = "{ .reg .u64 old; atom.relaxed.gpu.global.add.u64 old, [$1], 1; mov.u32 $0, 0; }"


@triton.jit
def write_and_fence(data, flag, go, out, WRITE: tl.constexpr, FENCE: tl.constexpr):
    """Program 1 overwrites program 0's release, fences, and loads what was released."""
    if tl.program_id(0) == 0:
        tl.store(data, 9)
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
        tl.atomic_xchg(go, 1, sem="relaxed", scope="gpu")
    else:
        while tl.atomic_add(go, 0, sem="relaxed", scope="gpu") == 0:  # orders nothing
            pass
        tl.inline_asm_elementwise(WRITE, "=r,l", [flag], tl.int32, False, 1)
        tl.inline_asm_elementwise(FENCE, "=r", [], tl.int32, False, 1)
        tl.store(out, tl.load(data))


def overwrite(write: str, world: World) -> None:
    data, flag, go, out = (torch.zeros(1, dtype=torch.int64) for _ in range(4))
    write_and_fence[(2,)](data, flag, go, out, write, FENCE)


def test_a_store_learns_nothing_from_what_it_overwrites() -> None:
    report = check(partial(overwrite, STORE), 1, schedules=6)
    assert {finding.rule for finding in report.findings} == {RELAXED_RELEASE.name}, report


@triton.jit
def third_by_chain(data, flag, out, WRITE: tl.constexpr):
    """Program 1 writes to program 0's flag; program 2 acquires what it wrote."""
    program = tl.program_id(0)
    if program == 0:
        tl.store(data, 9)
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    elif program == 1:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="gpu") == 0:
            pass
        tl.inline_asm_elementwise(WRITE, "=r,l", [flag], tl.int32, False, 1)
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") < 2:
            pass
        tl.store(out, tl.load(data))


def pass_on(write: str, world: World) -> None:
    data, flag, out = (torch.zeros(1, dtype=torch.int64) for _ in range(3))
    third_by_chain[(3,)](data, flag, out, write)


def test_a_finding_never_says_that_a_store_waits() -> None:
    report = check(partial(pass_on, STORE), 1, schedules=12)
    assert report.findings, report
    assert not [f for f in report.findings if "st.relaxed.gpu.global.u64 waits" in f.why], report


def test_a_read_modify_write_keeps_the_chain() -> None:
    """One per thread in inline PTX, so the count goes beyond 2."""
    report = check(partial(pass_on, ADD), 1, schedules=12)
    assert not report.findings, report
