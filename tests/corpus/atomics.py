"""Atomics and plain accesses on the same memory, and plain ones where an atomic was needed."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.findings import Rule
from sundog.checker.races import NO_ORDER, PLAIN_FLAG

from .pair import Kernel, Pair, values

__all__ = ["PAIRS"]

BLOCK = 16
PARTS = 3


@triton.jit
def count_wrong(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    large = tl.sum((tl.load(x + tl.program_id(0) * BLOCK + at) > 0).to(tl.int32), 0)
    tl.atomic_add(count, large, sem="relaxed", scope="gpu")
    # wrong: a plain load of a counter to which others are adding
    tl.store(out + tl.program_id(0), tl.load(count) >= large)


@triton.jit
def count_fixed(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    large = tl.sum((tl.load(x + tl.program_id(0) * BLOCK + at) > 0).to(tl.int32), 0)
    tl.atomic_add(count, large, sem="relaxed", scope="gpu")
    now = tl.atomic_add(count, 0, sem="relaxed", scope="gpu")
    tl.store(out + tl.program_id(0), now >= large)


def counted(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(0, PARTS, BLOCK), torch.empty(PARTS)
    count = torch.zeros(1, dtype=torch.int32)
    kernel[(PARTS,)](x, out, count, PARTS, BLOCK)
    assert count.item() == (x > 0).sum()
    assert out.all()


@triton.jit
def split_k_wrong(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * BLOCK + at)
    # wrong: all parts of the sum load, add and store the same tile
    tl.store(out + at, tl.load(out + at) + part)


@triton.jit
def split_k_fixed(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * BLOCK + at)
    tl.atomic_add(out + at, part, sem="relaxed", scope="gpu")


@triton.jit
def clear_wrong(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * BLOCK + at)
    # wrong: the first program clears the tile while others may have added to it
    if tl.program_id(0) == 0:
        tl.store(out + at, tl.zeros((BLOCK,), tl.float32))
    tl.atomic_add(out + at, part, sem="relaxed", scope="gpu")


@triton.jit
def clear_fixed(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * BLOCK + at)
    if tl.program_id(0) == 0:
        tl.store(out + at, tl.zeros((BLOCK,), tl.float32))
        tl.debug_barrier()
        tl.atomic_xchg(count, 1, sem="release", scope="gpu")
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") == 0:
        pass
    tl.atomic_add(out + at, part, sem="relaxed", scope="gpu")


@triton.jit
def read_sum_wrong(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * BLOCK + at)
    tl.atomic_add(out + at, part, sem="relaxed", scope="gpu")
    # wrong: doubles the sum in place, with plain accesses, without knowing that all have added
    if tl.program_id(0) == PARTS - 1:
        tl.store(out + at, tl.load(out + at) * 2)


@triton.jit
def read_sum_fixed(x, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.load(x + tl.program_id(0) * BLOCK + at)
    tl.atomic_add(out + at, part, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        tl.store(out + at, tl.load(out + at) * 2)


def summed(kernel: Kernel, factor: int, world: sundog.World) -> None:
    x, out = values(0, PARTS, BLOCK), torch.zeros(BLOCK)
    kernel[(PARTS,)](x, out, torch.zeros(1, dtype=torch.int32), PARTS, BLOCK)
    assert torch.equal(out, x.sum(0) * factor)


@triton.jit
def overlap_wrong(x, out, n, BLOCK: tl.constexpr):
    # wrong: the last tile is moved back so that it fits, onto the one before it
    at = tl.minimum(tl.program_id(0) * BLOCK, n - BLOCK) + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * 2)


@triton.jit
def overlap_fixed(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.jit
def same_tile_wrong(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + at, mask=start + at < n, other=0)
    # wrong: every program has reduced all of it and stores it
    tl.store(out + at, total)


@triton.jit
def same_tile_fixed(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(x + start + at, mask=start + at < n, other=0)
    if tl.program_id(0) == 0:
        tl.store(out + at, total)


def doubled(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(0, 41), torch.empty(41)
    kernel[(PARTS,)](x, out, 41, BLOCK)
    assert torch.equal(out, x * 2)


def reduced(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(0, 41), torch.empty(BLOCK)
    kernel[(PARTS,)](x, out, 41, BLOCK)
    assert torch.equal(out, torch.nn.functional.pad(x, (0, 7)).view(PARTS, BLOCK).sum(0))


@triton.jit
def broken_chain_wrong(x, staged, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    if part == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_add(count, 1, sem="release", scope="gpu")
    elif part == 1:
        while tl.atomic_add(count, 0, sem="relaxed", scope="gpu") < 1:
            pass
        # wrong: a plain store ends what the release above it began
        tl.store(count, 2)
    else:
        while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < 2:
            pass
        tl.store(out + at, tl.load(staged + at))


@triton.jit
def unbroken_chain_fixed(x, staged, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    if part == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_add(count, 1, sem="release", scope="gpu")
    elif part == 1:
        while tl.atomic_add(count, 0, sem="relaxed", scope="gpu") < 1:
            pass
        # also a relaxed read-modify-write goes on with the release sequence
        tl.atomic_add(count, 1, sem="relaxed", scope="gpu")
    else:
        while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < 2:
            pass
        tl.store(out + at, tl.load(staged + at))


def staged(kernel: Kernel, world: sundog.World) -> None:
    x, tile, out = values(0, BLOCK), torch.empty(BLOCK), torch.empty(BLOCK)
    kernel[(3,)](x, tile, out, torch.zeros(1, dtype=torch.int64), BLOCK)
    assert torch.equal(out, x)


def _pair(family: str, name: str, wrong: partial, fixed: partial, rule: Rule) -> Pair:
    return Pair(family, name, wrong, fixed, 1, rule)


def _sums(family: str, name: str, wrong: Kernel, fixed: Kernel, factor: int, rule: Rule) -> Pair:
    return _pair(family, name, partial(summed, wrong, factor), partial(summed, fixed, factor), rule)


MIXED, SAME = "atomics mixed with plain accesses", "two programs write the same tile"
PAIRS = [
    _pair(
        MIXED,
        "counter read by a plain load",
        partial(counted, count_wrong),
        partial(counted, count_fixed),
        PLAIN_FLAG,
    ),
    _sums(MIXED, "sum cleared while others add", clear_wrong, clear_fixed, 1, PLAIN_FLAG),
    _sums(MIXED, "sum read while others add", read_sum_wrong, read_sum_fixed, 2, PLAIN_FLAG),
    _pair(
        MIXED,
        "release sequence broken by a store",
        partial(staged, broken_chain_wrong),
        partial(staged, unbroken_chain_fixed),
        PLAIN_FLAG,
    ),
    _sums("plain add instead of atomic", "split-k", split_k_wrong, split_k_fixed, 1, NO_ORDER),
    _pair(
        SAME,
        "ragged tile moved back",
        partial(doubled, overlap_wrong),
        partial(doubled, overlap_fixed),
        NO_ORDER,
    ),
    _pair(
        SAME,
        "equal values",
        partial(reduced, same_tile_wrong),
        partial(reduced, same_tile_fixed),
        NO_ORDER,
    ),
]
