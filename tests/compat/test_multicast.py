"""A two-shot all-reduce on multicast addresses: a counting barrier, a reduced load, a store."""

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

BLOCK, BLOCKS = 2, 3  # vectors of four floats


@triton.jit
def arrive_and_wait(everyone, mine, target, SEND: tl.constexpr, WAIT: tl.constexpr):
    """Add one to a word of all ranks, and wait until all of them have added to mine."""
    arrive: tl.constexpr = f"multimem.red.{SEND}.global.add.u32 [$1], 1; mov.u32 $0, 0;"
    wait: tl.constexpr = f"""
    {{
        .reg .pred %less;
        again:
            ld.{WAIT}.global.u32 $0, [$1];
            setp.lt.u32 %less, $0, $2;
            @%less bra again;
    }}
    """
    if thread() == 0:
        tl.inline_asm_elementwise(arrive, "=r,l", [everyone], tl.int32, False, 1)
        tl.inline_asm_elementwise(wait, "=r,l,r", [mine, target], tl.int32, False, 1)
    tl.debug_barrier()


@triton.jit
def all_reduce(
    everyone, everyones_words, words, call, rank, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SEND: tl.constexpr, WAIT: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    theirs, mine = everyones_words + 4 * block, words + 4 * block
    arrive_and_wait(theirs, mine, (call * (1 + LAST) - LAST) * SIZE, SEND, WAIT)
    place = everyone + 16 * ((rank * blocks + block) * BLOCK + tl.arange(0, BLOCK))
    a, b, c, d = tl.inline_asm_elementwise(
        "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [place],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r",
        [place, a, b, c, d],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    if LAST:
        tl.debug_barrier()
        arrive_and_wait(theirs, mine, 2 * call * SIZE, SEND, WAIT)


def program(
    send: str = "release.sys", wait: str = "acquire.sys", last: bool = True
) -> Callable[[], None]:
    def main() -> None:
        dist.init_process_group("nccl")
        rank, size = dist.get_rank(), dist.get_world_size()
        n = 4 * BLOCK * BLOCKS * size
        buffer = symm_mem.empty(n, dtype=torch.float32, device="cuda")
        words = symm_mem.empty(BLOCKS, dtype=torch.int32, device="cuda").zero_()
        everyone = symm_mem.rendezvous(buffer, dist.group.WORLD).multicast_ptr
        everyones_words = symm_mem.rendezvous(words, dist.group.WORLD).multicast_ptr
        dist.barrier()  # all words are zero
        x = torch.arange(n, dtype=torch.float32)
        for call in (1, 2):
            buffer.copy_(call * x + rank)
            all_reduce[(BLOCKS,)](
                everyone, everyones_words, words.data_ptr(), call, rank, SIZE=size, BLOCK=BLOCK,
                SEND=send, WAIT=wait, LAST=last,
            )  # fmt: skip
            torch.testing.assert_close(buffer, size * call * x + sum(range(size)))
            dist.barrier()

    return main


def checked(size: int, **how: object) -> Report:
    return check(as_rank(program(**how)), size, schedules=3, seed=0, heap_size=8 << 20)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_right_two_shot_is_clean(size: int) -> None:
    report = checked(size)
    assert not report.findings + report.remarks, report


WRONG = [
    ({"send": "release.gpu"}, {"scope does not reach"}),
    ({"send": "relaxed.sys"}, {"relaxed release"}),
    ({"last": False}, {"no order", "wrong result"}),
]


@pytest.mark.parametrize(("how", "rules"), WRONG, ids=["scope", "order", "barrier"])
def test_wrong_two_shot_is_found(how: dict, rules: set[str]) -> None:
    findings = checked(2, **how).findings
    assert {finding.rule or finding.kind for finding in findings} == rules


def test_a_relaxed_wait_relies_on_the_kernel_boundary() -> None:
    """Ranks that read an arrival late, after its sender has arrived again, rely on it too."""
    report = checked(2, wait="relaxed.sys")
    assert not report.findings, report
    assert {remark.rule for remark in report.remarks} == {"relies on the kernel boundary"}
