"""A tile is made by many threads, and its memory may end before they do."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import FREED_IN_USE, TORN_TILE
from sundog.checker.layouts import READ_BACK_TILE

from .pair import Kernel, Pair, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def reversed_wrong(x, scratch, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(scratch + at, tl.load(x + at))
    # wrong: the last thread loads what the first one stores, perhaps before
    tl.store(out + at, tl.load(scratch + BLOCK - 1 - at))


@triton.jit
def reversed_fixed(x, scratch, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(scratch + at, tl.load(x + at))
    tl.debug_barrier()  # all threads' stores before any thread's load
    tl.store(out + at, tl.load(scratch + BLOCK - 1 - at))


def reverse(kernel: Kernel, world: sundog.World) -> None:
    x, scratch, out = values(0, BLOCK), torch.zeros(BLOCK), torch.empty(BLOCK)
    kernel[(1,)](x, scratch, out, BLOCK)
    assert torch.equal(out, x.flip(0))


@triton.jit
def transposed(x, scratch, out, SIDE: tl.constexpr, BARRIER: tl.constexpr):
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    tl.store(scratch + row * SIDE + column, tl.load(x + row * SIDE + column))
    if BARRIER:
        tl.debug_barrier()  # all threads' stores before any thread's load
    # wrong without it: a column's elements are other threads' than a row's
    tl.store(out + row * SIDE + column, tl.load(scratch + column * SIDE + row))


def transpose(barrier: bool, world: sundog.World) -> None:
    x, scratch, out = values(0, 4, 4), torch.zeros(4, 4), torch.empty(4, 4)
    transposed[(1,)](x, scratch, out, 4, barrier)
    assert torch.equal(out, x.T)


@triton.jit
def scan(x, scratch, out, BLOCK: tl.constexpr, BARRIER: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.load(x + at)
    step = 1
    while step < BLOCK:
        tl.store(scratch + at, total)
        if BARRIER:
            tl.debug_barrier()  # all threads' stores before any thread's load
        # wrong without it: the mask leaves out the first places, and the others are shifted
        total += tl.load(scratch + at - step, mask=at >= step, other=0.0)
        tl.debug_barrier()  # all threads' loads before the next store
        step *= 2
    tl.store(scratch + at, total)
    # right without a barrier: each thread loads what it has stored, whatever the mask leaves out
    part = tl.load(scratch + at, mask=(at >= 3) & (at < BLOCK - 1), other=0.0)
    tl.store(out + at, tl.where(part == 0.0, total, part))


def prefix_sums(barrier: bool, world: sundog.World) -> None:
    x, scratch, out = torch.arange(1.0, BLOCK + 1), torch.zeros(BLOCK), torch.empty(BLOCK)
    scan[(1,)](x, scratch, out, BLOCK, barrier)
    assert torch.equal(out, x.cumsum(0))


@triton.jit
def pair_wrong(words, out, value):
    lane = tl.arange(0, 2)
    if tl.program_id(0) == 0:
        # wrong: these are two atomics, the value and its tag
        pair = tl.where(lane == 0, value, 1)
        tl.atomic_xchg(words + lane, pair, sem="release", scope="gpu")
    else:
        seen = tl.atomic_add(words + lane, lane * 0, sem="acquire", scope="gpu")
        while tl.sum(tl.where(lane == 1, seen, 0), 0) == 0:
            seen = tl.atomic_add(words + lane, lane * 0, sem="acquire", scope="gpu")
        tl.store(out, tl.sum(tl.where(lane == 0, seen, 0), 0))


@triton.jit
def pair_fixed(words, out, value):
    if tl.program_id(0) == 0:
        # value and tag in one word: the reader sees both or none
        tl.atomic_xchg(words, value * 2 + 1, sem="release", scope="gpu")
    else:
        seen = tl.atomic_add(words, 0, sem="acquire", scope="gpu")
        while seen % 2 == 0:
            seen = tl.atomic_add(words, 0, sem="acquire", scope="gpu")
        tl.store(out, seen // 2)


def tagged(kernel: Kernel, world: sundog.World) -> None:
    words, out = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    kernel[(2,)](words, out, 42)
    assert out.item() == 42, f"{out.item()} arrived instead of 42"


@triton.jit
def copy(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


def free_early(wait: str, world: sundog.World) -> None:
    x, out = world.empty((BLOCK,), name="x").copy_(values(world.rank, BLOCK)), torch.empty(BLOCK)
    world.barrier()
    with world.stream(1):
        copy[(1,)](x, out, BLOCK)
        done = world.record_event()
    # wrong without either: stream 1 may still read x
    if wait == "event":
        world.wait_event(done)
    if wait == "host":
        world.synchronize()
    world.free(x)
    world.synchronize()
    assert torch.equal(out, values(world.rank, BLOCK))


PAIRS = [
    Pair(
        "tile read back by other threads",
        "reversed",
        partial(reverse, reversed_wrong),
        partial(reverse, reversed_fixed),
        1,
        READ_BACK_TILE,
    ),
    Pair(
        "tile read back by other threads",
        "transposed",
        partial(transpose, False),
        partial(transpose, True),
        1,
        READ_BACK_TILE,
    ),
    Pair(
        "tile read back by other threads",
        "shifted, with a mask",
        partial(prefix_sums, False),
        partial(prefix_sums, True),
        1,
        READ_BACK_TILE,
    ),
    Pair(
        "tile atomic taken for one",
        "value and tag",
        partial(tagged, pair_wrong),
        partial(tagged, pair_fixed),
        1,
        TORN_TILE,
    ),
    Pair(
        "freed while a stream uses it",
        "twin waits for an event",
        partial(free_early, ""),
        partial(free_early, "event"),
        1,
        FREED_IN_USE,
    ),
    Pair(
        "freed while a stream uses it",
        "twin waits on the host",
        partial(free_early, ""),
        partial(free_early, "host"),
        2,
        FREED_IN_USE,
    ),
]
