"""A ring of puts with 64-bit flags, a block of each rank beside others: any number of ranks."""

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

BLOCK = 8


@triton.jit
def set_flag(flag, value, ORDER: tl.constexpr):
    asm: tl.constexpr = f"st.{ORDER}.global.b64 [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l,l", [flag, value], tl.int32, False, 1)


@triton.jit
def wait_for_flag(flag, value, ORDER: tl.constexpr):
    asm: tl.constexpr = f"""
    {{
        .reg .u64 %seen;
        .reg .pred %less;
        again_${{:uid}}:
            ld.{ORDER}.global.u64 %seen, [$1];
            setp.lt.u64 %less, %seen, $2;
            @%less bra.uni again_${{:uid}};
        cvt.u32.u64 $0, %seen;
    }}
    """
    tl.inline_asm_elementwise(asm, "=r,l,l", [flag, value], tl.int32, False, 1)


@triton.jit
def pass_on(
    buffers, pads, x, n, call, rank, size,
    SEND: tl.constexpr, WAIT: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Put each rank's part into the next rank's buffer, until all have all parts."""
    block, following = tl.program_id(0), (rank + 1) % size
    at = block * BLOCK + tl.arange(0, BLOCK)
    tables = buffers.to(tl.pointer_type(tl.uint64)), pads.to(tl.pointer_type(tl.uint64))
    mine = tl.load(tables[0] + rank).to(tl.pointer_type(tl.float32))
    theirs = tl.load(tables[0] + following).to(tl.pointer_type(tl.float32))
    my_flags = tl.load(tables[1] + rank).to(tl.pointer_type(tl.uint64)) + block * size
    their_flags = tl.load(tables[1] + following).to(tl.pointer_type(tl.uint64)) + block * size
    tl.store(mine + rank * n + at, tl.load(x + at, mask=at < n), mask=at < n)
    tl.debug_barrier()
    for step in range(size - 1):
        part = (rank - step + size) % size
        if step > 0:
            if thread() == 0:
                wait_for_flag(my_flags + part, call, WAIT)
            if AFTER:
                tl.debug_barrier()
        value = tl.load(mine + part * n + at, mask=at < n)
        tl.store(theirs + part * n + at, value, mask=at < n)
        if BEFORE:
            tl.debug_barrier()
        if thread() == 0:
            set_flag(their_flags + part, call, SEND)
    if size > 1:
        if thread() == 0:
            wait_for_flag(my_flags + following, call, WAIT)
        tl.debug_barrier()


def program(
    n: int, send: str = "release.sys", wait: str = "acquire.sys", before: bool = True,
    after: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """Return a program that gathers n numbers of each rank, twice."""

    def main() -> None:
        dist.init_process_group("nccl")
        rank, size = dist.get_rank(), dist.get_world_size()
        buffer = symm_mem.empty(size * n, dtype=torch.float32, device="cuda")
        handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
        parts = [torch.arange(n, dtype=torch.float32) + 100 * r for r in range(size)]
        for call in (1, 2):
            pass_on[(triton.cdiv(n, BLOCK),)](
                handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, call * parts[rank], n, call,
                rank, size, SEND=send, WAIT=wait, BEFORE=before, AFTER=after, BLOCK=BLOCK,
            )  # fmt: skip
            torch.testing.assert_close(buffer, call * torch.cat(parts))
            dist.barrier()

    return main


def checked(size: int, n: int, **how: object) -> Report:
    return check(as_rank(program(n, **how)), size, schedules=3, seed=1, heap_size=8 << 20)


@pytest.mark.parametrize(("size", "n"), [(1, 5), (2, 13), (3, 17), (8, 1)])
def test_right_ring_is_clean_on_any_number_of_ranks(size: int, n: int) -> None:
    report = checked(size, n)
    assert not report.findings + report.remarks, report


WRONG = [
    ({"send": "relaxed.sys"}, "relaxed release"),
    ({"send": "release.gpu"}, "scope does not reach"),
    ({"wait": "acquire.gpu"}, "scope does not reach"),
    ({"wait": "relaxed.sys"}, "relaxed acquire"),
    ({"before": False}, "no CTA barrier before the release"),
    ({"after": False}, "no CTA barrier after the acquire"),
]


@pytest.mark.parametrize(("how", "rule"), WRONG, ids=str)
def test_wrong_ring_is_found(how: dict, rule: str) -> None:
    assert rule in {finding.rule for finding in checked(3, 13, **how).findings}
