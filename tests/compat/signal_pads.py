"""Kernels of our own in the idioms of torch symmetric memory: signal pads, %tid, bar.sync."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl


@triton.jit
def thread():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def sync_threads():
    tl.inline_asm_elementwise("bar.sync 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(words, SEM: tl.constexpr, SCOPE: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .b32 %seen;
            .reg .pred %taken;
            again:
                atom.global.{SEM}.{SCOPE}.cas.b32 %seen, [$1], 0, 1;
                setp.ne.b32 %taken, %seen, 0;
                @%taken bra again;
            mov.b32 $0, %seen;
        }}
        """,
        "=r,l",
        [words],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def take(words, SEM: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .b32 %seen;
            .reg .pred %there;
            again:
                atom.global.{SEM}.sys.cas.b32 %seen, [$1], 1, 0;
                setp.eq.b32 %there, %seen, 1;
                @!%there bra again;
            mov.b32 $0, %seen;
        }}
        """,
        "=r,l",
        [words],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_acquire(word):
    tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];",
        "=r,l",
        [word],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(
    pads,
    rank: tl.constexpr,
    size: tl.constexpr,
    RELEASE: tl.constexpr = "release",
    ACQUIRE: tl.constexpr = "acquire",
    SCOPE: tl.constexpr = "sys",
    BETWEEN: tl.constexpr = True,
):
    """Meet the programs of the same number on all ranks; CTA barriers are the caller's."""
    peers = tl.arange(0, size)
    table = pads.to(tl.pointer_type(tl.uint64))
    block = tl.program_id(0) * size
    theirs = tl.load(table + peers).to(tl.pointer_type(tl.uint32)) + block + rank
    mine = tl.load(table + rank).to(tl.pointer_type(tl.uint32)) + block + peers
    if thread() < size:
        put(theirs, RELEASE, SCOPE)
        take(mine, "relaxed" if ACQUIRE == "by all" else ACQUIRE)
    if ACQUIRE == "by all":  # every thread acquires what one has taken
        if BETWEEN:
            sync_threads()  # no thread loads a word before its taker has taken it
        for peer in tl.static_range(size):
            load_acquire(tl.load(table + rank).to(tl.pointer_type(tl.uint32)) + block + peer)


@triton.jit
def push_and_sum(
    table,
    pads,
    x,
    out,
    n,
    rank: tl.constexpr,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    BEFORE: tl.constexpr = True,
    AFTER: tl.constexpr = True,
    RELEASE: tl.constexpr = "release",
    ACQUIRE: tl.constexpr = "acquire",
    SCOPE: tl.constexpr = "sys",
    BETWEEN: tl.constexpr = True,
):
    """Write x to this rank's symmetric buffer, meet, and sum over the ranks' buffers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    buffers = table.to(tl.pointer_type(tl.uint64))
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    tl.store(mine + at, tl.load(x + at, mask=at < n), mask=at < n)
    if BEFORE:
        sync_threads()  # orders the tile before the release, which single threads make
    meet(pads, rank, size, RELEASE, ACQUIRE, SCOPE, BETWEEN)
    if AFTER:
        tl.debug_barrier()  # what single threads acquired, all learn
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(size):
        theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.float32))
        total += tl.load(theirs + at, mask=at < n, other=0.0)
    tl.store(out + at, total, mask=at < n)


def program(numel: int = 200, block: int = 128, **how: Any) -> Callable[[], torch.Tensor]:
    """Return a program for torchrun that sums a tensor over the ranks."""

    def main() -> torch.Tensor:
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl")
        torch.manual_seed(rank)
        x = torch.randint(0, 9, (numel,), device="cuda", dtype=torch.float32)
        buffer = symm_mem.empty(numel, dtype=torch.float32, device=f"cuda:{rank}")
        handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
        out = torch.empty_like(x)
        push_and_sum[(triton.cdiv(numel, block),)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, x, out, numel,
            rank=handle.rank, size=handle.world_size, BLOCK=block, **how,
        )  # fmt: skip
        wanted = x.clone()
        dist.all_reduce(wanted)
        torch.testing.assert_close(out, wanted)
        dist.destroy_process_group()
        return out.cpu()

    return main


right = program()


@triton.jit
def push_by_multicast(multicast, pads, x, n, rank: tl.constexpr, size: tl.constexpr):
    """Write x to every rank's buffer by one store to the multicast address, a word per thread."""
    tid = thread()
    to = multicast.to(tl.pointer_type(tl.int32)) + rank * n + tid
    inside = (tid < n).to(tl.int32)
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred %p;
            .reg .b32 %word;
            setp.eq.s32 %p, $3, 1;
            @%p ld.global.b32 %word, [$2];
            @%p multimem.st.relaxed.sys.global.b32 [$1], %word;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,l,r",
        [to, x + tid, inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    sync_threads()  # orders the stores of all threads before the release
    meet(pads, rank, size)
    sync_threads()  # what single threads acquired, all learn


def gather(twice: bool = False) -> list[int]:
    """Gather by multicast: a program for torchrun."""
    dist.init_process_group("nccl")
    rank, size, n = dist.get_rank(), dist.get_world_size(), 20
    buffer = symm_mem.empty(size * n, dtype=torch.int32, device="cuda")
    handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
    x = torch.arange(n, device="cuda", dtype=torch.int32) + 100 * rank
    for _ in range(1 + twice):
        push_by_multicast[(1,)](
            handle.multicast_ptr, handle.signal_pad_ptrs_dev, x, n, rank=rank, size=size
        )
    return buffer.tolist()


def take_relaxed_and_write_again() -> None:
    """Sum twice; the second kernel overwrites what peers read in the first one."""
    dist.init_process_group("nccl")
    rank, size, n = dist.get_rank(), dist.get_world_size(), 128
    x, out = torch.ones(n, device="cuda"), torch.empty(n, device="cuda")
    buffer = symm_mem.empty(n, dtype=torch.float32, device="cuda")
    handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
    for _ in range(2):
        sum_and_leave[(1,)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, x, out, rank=rank, size=size,
            BLOCK=n,
        )  # fmt: skip
    assert out.eq(size).all()


@triton.jit
def sum_and_leave(table, pads, x, out, rank: tl.constexpr, size: tl.constexpr, BLOCK: tl.constexpr):
    push_and_sum(table, pads, x, out, BLOCK, rank, size, BLOCK)
    sync_threads()  # orders the loads above before the release
    meet(pads, rank, size, "release", "relaxed")


@triton.jit
def by_multicast(multicast, out, TEXT: tl.constexpr):
    """Run a line of PTX on the multicast address ($1) and a word of this rank ($2)."""
    if thread() == 0:
        word = multicast.to(tl.pointer_type(tl.int32))
        tl.inline_asm_elementwise(TEXT, "=r,l,l", [word, out.to(word.dtype)], tl.int32, False, 1)


def multimem(text: str, dtype: torch.dtype) -> Callable[[], tuple[list[float], list[float]]]:
    """Return a program: each rank holds its rank + 1, runs the text, and returns both tensors."""

    def main() -> tuple[list[float], list[float]]:
        dist.init_process_group("nccl")
        buffer = symm_mem.empty(8, dtype=dtype, device="cuda").fill_(dist.get_rank() + 1)
        handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
        out = torch.zeros(8, dtype=dtype, device="cuda")
        dist.barrier()
        by_multicast[(1,)](handle.multicast_ptr, out, TEXT=text)
        dist.barrier()
        return buffer.tolist(), out.tolist()

    return main
