"""Kernels of our own whose words validate themselves: the payload is the flag (Lamport)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)


@triton.jit
def push_words(table, x, peer, slot, BLOCK: tl.constexpr, EXTRA: tl.constexpr):
    """Store x as words of the peer; with EXTRA also something that no word carries."""
    at = tl.arange(0, BLOCK)
    theirs = tl.load(table + peer).to(tl.pointer_type(tl.int32)) + slot * 2 * BLOCK
    if EXTRA:
        tl.store(theirs + BLOCK + at, at)
    tl.store(theirs + at, tl.load(x + at))


@triton.jit
def take_words(
    table, out, rank, slot, BLOCK: tl.constexpr, EXTRA: tl.constexpr, VOLATILE: tl.constexpr,
    EMPTIES: tl.constexpr,
):  # fmt: skip
    """Poll all words, take them, and make them empty again unless something later does."""
    at = tl.arange(0, BLOCK)
    mine = tl.load(table + rank).to(tl.pointer_type(tl.int32)) + slot * 2 * BLOCK
    words = tl.load(mine + at, volatile=VOLATILE)
    while tl.min(words) == EMPTY:
        words = tl.load(mine + at, volatile=VOLATILE)
    if EXTRA:
        words += tl.load(mine + BLOCK + at)
    tl.store(out + at, words)
    if EMPTIES:
        tl.store(mine + at, tl.full([BLOCK], EMPTY, tl.int32))


@triton.jit
def empty_words(table, rank, slot, BLOCK: tl.constexpr):
    mine = tl.load(table + rank).to(tl.pointer_type(tl.int32)) + slot * 2 * BLOCK
    tl.store(mine + tl.arange(0, BLOCK), tl.full([BLOCK], EMPTY, tl.int32))


def program(
    extra: bool = False, volatile: bool = True, slots: int = 2, empties: str = "reader"
) -> Callable[[], list[int]]:
    """Return a program that exchanges words between two ranks, over and over.

    The reader empties them, or a later kernel, or the host. With two slots a rank writes a slot
    again only when the peer has taken what was in it: it has read the peer's next words, which the
    peer sent after that. With one slot it does not wait.
    """

    def main() -> list[int]:
        dist.init_process_group("nccl")
        rank, n = dist.get_rank(), 64
        buffer = symm_mem.empty(4 * n, dtype=torch.int32, device="cuda").fill_(-1)
        handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
        dist.barrier()  # both buffers are empty
        table = torch.tensor(handle.buffer_ptrs, device="cuda")
        x, out = torch.arange(n, dtype=torch.int32) + rank, torch.zeros(n, dtype=torch.int32)
        for call in range(3):
            slot = call % slots
            push_words[(1,)](table, x, 1 - rank, slot, BLOCK=n, EXTRA=extra)
            take_words[(1,)](
                table, out, rank, slot, BLOCK=n, EXTRA=extra, VOLATILE=volatile,
                EMPTIES=empties == "reader",
            )  # fmt: skip
            if empties == "kernel":
                empty_words[(1,)](table, rank, slot, BLOCK=n)
            elif empties == "host":
                buffer[slot * 2 * n : (slot * 2 + 1) * n].fill_(-1)
        return out.tolist()

    return main
