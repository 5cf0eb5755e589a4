"""Kernels of our own with fences in inline PTX: two ranks pass a tile, with relaxed signals."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl


@triton.jit
def run_asm(TEXT: tl.constexpr):
    tl.inline_asm_elementwise(TEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def pass_tile(
    table,
    pads,
    out,
    rank: tl.constexpr,
    BEFORE: tl.constexpr,  # the signal: what publishes the tile
    AFTER: tl.constexpr,  # the poll: what acquires it
    BLOCK: tl.constexpr,
):
    """Rank 0 stores a tile to rank 1 and signals; rank 1 polls and loads the tile."""
    at = tl.arange(0, BLOCK)
    theirs = tl.load(table.to(tl.pointer_type(tl.uint64)) + 1).to(tl.pointer_type(tl.int32))
    flag = tl.load(pads.to(tl.pointer_type(tl.uint64)) + 1).to(tl.pointer_type(tl.int32)) + 32
    if rank == 0:
        tl.store(theirs + at, at + 1)
        run_asm(BEFORE)
        tl.atomic_xchg(flag, 1, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") != 1:
            pass
        run_asm(AFTER)
        tl.store(out + at, tl.load(theirs + at))


def program(before: str, after: str) -> Callable[[], list[int]]:
    """Return a program for two ranks, with these lines of PTX around the relaxed signal."""

    def main() -> list[int]:
        dist.init_process_group("nccl")
        rank, n = dist.get_rank(), 128
        buffer = symm_mem.empty(n, dtype=torch.int32, device="cuda").zero_()
        handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
        handle.barrier()  # the zeroes come before the tile
        out = torch.zeros(n, dtype=torch.int32, device="cuda")
        pass_tile[(1,)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, out,
            rank=rank, BEFORE=before, AFTER=after, BLOCK=n,
        )  # fmt: skip
        return out.tolist()

    return main
