"""Who signals in a block: a thread or a warp per peer, threads on a counter, or one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import Report, check

from .signal_pads import thread


@triton.jit
def warp_and_lane():
    return tl.inline_asm_elementwise(
        "{.reg .u32 %t; mov.u32 %t, %tid.x; mov.u32 $0, %warpid; and.b32 $1, %t, 31;}",
        "=r,=r",
        [],
        dtype=(tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def send(words, call, HOW: tl.constexpr):
    asm: tl.constexpr = f"{HOW}; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,r", [words, call], tl.int32, False, 1)


@triton.jit
def wait(words, least, ORDER: tl.constexpr):
    asm: tl.constexpr = f"""
    {{
        .reg .pred less;
        again:
            ld.{ORDER}.global.u32 $0, [$1];
            setp.lt.u32 less, $0, $2;
            nanosleep.u32 20;
            @less bra again;
    }}
    """
    tl.inline_asm_elementwise(asm, "=&r,l,r", [words, least], tl.int32, False, 1)


@triton.jit
def fence(KIND: tl.constexpr):
    tl.inline_asm_elementwise(f"{KIND}; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@triton.jit
def sum_over_ranks(
    buffers, pads, x, out, n, call, rank, SIZE: tl.constexpr, WHO: tl.constexpr,
    SEND: tl.constexpr, ADD: tl.constexpr, WAIT: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    half = (call % 2) * n + at
    tables = buffers.to(tl.pointer_type(tl.uint64)), pads.to(tl.pointer_type(tl.uint64))
    mine = tl.load(tables[0] + rank).to(tl.pointer_type(tl.float32))
    words = tl.load(tables[1] + rank).to(tl.pointer_type(tl.uint32))
    tl.store(mine + half, tl.load(x + at, mask=at < n), mask=at < n)
    if BEFORE:
        tl.debug_barrier()
    if "fence" in BEFORE:
        fence(BEFORE)
    if WHO == "a thread each":
        peer = thread()
        if peer < SIZE:
            send(tl.load(tables[1] + peer).to(tl.pointer_type(tl.uint32)) + rank, call, SEND)
            wait(words + peer, call, WAIT)
    elif WHO == "a warp each":
        peer, lane = warp_and_lane()
        if (lane == 0) & (peer < SIZE):
            send(tl.load(tables[1] + peer).to(tl.pointer_type(tl.uint32)) + rank, call, SEND)
            wait(words + peer, call, WAIT)
    elif WHO == "a counter":
        peer = thread()
        if peer < SIZE:
            send(tl.load(tables[1] + peer).to(tl.pointer_type(tl.uint32)), 1, ADD)
        if peer == 0:
            wait(words, call * SIZE, WAIT)
    else:
        if thread() == 0:
            for peer in tl.static_range(SIZE):
                send(tl.load(tables[1] + peer).to(tl.pointer_type(tl.uint32)) + rank, call, SEND)
            for peer in tl.static_range(SIZE):
                wait(words + peer, call, WAIT)
    if "fence" in AFTER:
        fence(AFTER)
    if AFTER:
        tl.debug_barrier()
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(SIZE):
        theirs = tl.load(tables[0] + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(theirs + half, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)


def program(
    who: str, send: str = "release.sys", wait: str = "acquire.sys", before: str = "barrier",
    after: str = "barrier", warps: int = 4,
) -> Callable[[], None]:  # fmt: skip
    """Return a program that sums 37 numbers over the ranks, three times."""
    stores, adds = f"st.{send}.global.u32 [$1], $2", f"red.{send}.global.add.u32 [$1], $2"

    def main() -> None:
        dist.init_process_group("nccl")
        rank, size, n = dist.get_rank(), dist.get_world_size(), 37
        buffer = symm_mem.empty(2 * n, dtype=torch.float32, device="cuda")
        handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
        x, out = torch.arange(n, dtype=torch.float32), torch.empty(n, device="cuda")
        for call in (1, 2, 3):
            sum_over_ranks[(1,)](
                handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, call * x + rank, out, n, call,
                rank, SIZE=size, WHO=who, SEND=stores, ADD=adds, WAIT=wait, BEFORE=before,
                AFTER=after, BLOCK=64, num_warps=warps,
            )  # fmt: skip
            torch.testing.assert_close(out, size * call * x + sum(range(size)))

    return main


def checked(size: int, who: str, **how: object) -> Report:
    main = as_rank(program(who, **how))  # type: ignore[arg-type]
    return check(main, size, schedules=3, seed=1, heap_size=8 << 20)


WHO = ("a thread each", "a warp each", "a counter", "one thread")
FENCES = {
    "send": "relaxed.sys",
    "wait": "relaxed.sys",
    "before": "fence.acq_rel.sys",
    "after": "fence.acq_rel.sys",
}


@pytest.mark.parametrize("how", [{}, {"warps": 8}, FENCES], ids=str)
@pytest.mark.parametrize("who", WHO)
def test_whoever_signals_right_is_clean(who: str, how: dict) -> None:
    report = checked(3, who, **how)
    assert not report.findings + report.remarks, report


WRONG = [
    ({"send": "relaxed.sys"}, "relaxed release"),
    ({"wait": "relaxed.sys"}, "relaxed acquire"),
    ({"send": "release.gpu"}, "scope does not reach"),
    ({"before": ""}, "no CTA barrier before the release"),
    ({"after": ""}, "no CTA barrier after the acquire"),
    (FENCES | {"before": "fence.acq_rel.gpu"}, "scope does not reach"),
]


@pytest.mark.parametrize(("how", "rule"), WRONG, ids=str)
@pytest.mark.parametrize("who", WHO)
def test_whoever_signals_wrong_is_found(who: str, how: dict, rule: str) -> None:
    assert rule in {finding.rule for finding in checked(2, who, **how).findings}
