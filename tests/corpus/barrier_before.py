"""A tile is made by all warps, the release after it by one thread: a CTA barrier must lie between.

Triton's compiler adds none. Validation of a published kernel failed for this reason.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import BARRIER_BEFORE
from sundog.device import memory, signal

from .pair import Kernel, Pair, everyone, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def push_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    # wrong: no CTA barrier between the tile and its flag
    memory.atomic_xchg(flag, 1, peer, ctx, sem="release")
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def push_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    memory.atomic_xchg(flag, 1, peer, ctx, sem="release")
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


def exchange(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox = world.empty((BLOCK,), name="inbox")
    flag = world.signals((1,), "flag")
    world.barrier()
    kernel[(1,)](x, inbox, out, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world, -1), BLOCK))


@triton.jit
def rounds_wrong(x, inbox, out, ready, done, peer, ctx, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(1, STEPS + 1):
        signal.wait(done, peer, step - 1, ctx)
        signal.put_signal(inbox + at, x + step * BLOCK + at, ready, peer, step, ctx)
        signal.wait(ready, peer, step, ctx)
        tl.store(out + step * BLOCK + at, tl.load(inbox + at))
        # wrong: no CTA barrier between the load of the tile and "done"
        memory.atomic_xchg(done, step, peer, ctx, sem="release")


@triton.jit
def rounds_fixed(x, inbox, out, ready, done, peer, ctx, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for step in range(1, STEPS + 1):
        signal.wait(done, peer, step - 1, ctx)
        signal.put_signal(inbox + at, x + step * BLOCK + at, ready, peer, step, ctx)
        signal.wait(ready, peer, step, ctx)
        tl.store(out + step * BLOCK + at, tl.load(inbox + at))
        tl.debug_barrier()
        memory.atomic_xchg(done, step, peer, ctx, sem="release")


def rounds(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 3, BLOCK), torch.zeros(3, BLOCK)
    inbox = world.empty((BLOCK,), name="inbox")
    ready, done = world.signals((1,), "ready"), world.signals((1,), "done")
    world.barrier()
    kernel[(1,)](x, inbox, out, ready, done, neighbour(world), world.ctx, 2, BLOCK)
    assert torch.equal(out[1:], values(neighbour(world, -1), 3, BLOCK)[1:])


@triton.jit
def gather_wrong(x, gathered, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, WORLD)
    for peer in range(WORLD):
        memory.store(gathered + rank * BLOCK + at, tl.load(x + at), peer, ctx)
    # wrong: no CTA barrier before the flags, which the lanes of one tensor atomic set
    flag = memory.translate(flags + rank + lane * 0, lane, ctx)
    tl.atomic_xchg(flag, lane * 0 + 1, sem="release", scope="sys")
    signal.wait_all(flags, 1, ctx, WORLD)
    for source in range(WORLD):
        tl.store(out + source * BLOCK + at, tl.load(gathered + source * BLOCK + at))


@triton.jit
def gather_fixed(x, gathered, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, WORLD)
    for peer in range(WORLD):
        memory.store(gathered + rank * BLOCK + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    flag = memory.translate(flags + rank + lane * 0, lane, ctx)
    tl.atomic_xchg(flag, lane * 0 + 1, sem="release", scope="sys")
    signal.wait_all(flags, 1, ctx, WORLD)
    for source in range(WORLD):
        tl.store(out + source * BLOCK + at, tl.load(gathered + source * BLOCK + at))


def gather(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(world.size, BLOCK)
    gathered = world.empty((world.size, BLOCK), name="gathered")
    flags = world.signals((world.size,), "flags")
    world.barrier()
    kernel[(1,)](x, gathered, out, flags, world.rank, world.ctx, world.size, BLOCK)
    assert torch.equal(out, everyone(world, BLOCK))


@triton.jit
def stage_wrong(x, staged, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        # wrong: no CTA barrier between the fetched tile and its flag
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out + at, tl.load(staged + at))


@triton.jit
def stage_fixed(x, staged, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out + at, tl.load(staged + at))


def stage(kernel: Kernel, world: sundog.World) -> None:
    x, staged, out = values(0, BLOCK), torch.empty(BLOCK), torch.empty(BLOCK)
    flag = torch.zeros(1, dtype=torch.int64)
    kernel[(2,)](x, staged, out, flag, BLOCK)
    assert torch.equal(out, x)


@triton.jit
def last_sums_wrong(x, partial, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.program_id(0) * BLOCK + at
    tl.store(partial + mine, tl.load(x + mine) * 2)
    # wrong: no CTA barrier before the arrival; that its result is used does not help
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for part in range(PARTS):
            total += tl.load(partial + part * BLOCK + at)
        tl.store(out + at, total)


@triton.jit
def last_sums_fixed(x, partial, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.program_id(0) * BLOCK + at
    tl.store(partial + mine, tl.load(x + mine) * 2)
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        total = tl.zeros((BLOCK,), tl.float32)
        for part in range(PARTS):
            total += tl.load(partial + part * BLOCK + at)
        tl.store(out + at, total)


def last_sums(kernel: Kernel, world: sundog.World) -> None:
    x, partials, out = values(0, 3, BLOCK), torch.empty(3, BLOCK), torch.empty(BLOCK)
    count = torch.zeros(1, dtype=torch.int32)
    kernel[(3,)](x, partials, out, count, 3, BLOCK)
    assert torch.equal(out, x.sum(0) * 2)


@triton.jit
def phases_wrong(x, middle, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    tl.store(middle + part * BLOCK + at, tl.load(x + part * BLOCK + at))
    # wrong: a grid barrier by hand, without the CTA barrier before the arrival
    tl.atomic_add(count, 1, sem="release", scope="gpu")
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < PARTS:
        pass
    tl.store(out + part * BLOCK + at, tl.load(middle + (PARTS - 1 - part) * BLOCK + at))


@triton.jit
def phases_fixed(x, middle, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    tl.store(middle + part * BLOCK + at, tl.load(x + part * BLOCK + at))
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="release", scope="gpu")
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < PARTS:
        pass
    tl.store(out + part * BLOCK + at, tl.load(middle + (PARTS - 1 - part) * BLOCK + at))


def phases(kernel: Kernel, world: sundog.World) -> None:
    x, middle, out = values(0, 3, BLOCK), torch.empty(3, BLOCK), torch.empty(3, BLOCK)
    count = torch.zeros(1, dtype=torch.int64)
    kernel[(3,)](x, middle, out, count, 3, BLOCK, launch_cooperative_grid=True)
    assert torch.equal(out, x.flip(0))


def _pair(name: str, host: Kernel, wrong: Kernel, fixed: Kernel, world_size: int) -> Pair:
    family = "missing CTA barrier before the flag"
    hosts = partial(host, wrong), partial(host, fixed)
    return Pair(family, name, *hosts, world_size, BARRIER_BEFORE)


PAIRS = [
    _pair("tile store, then flag", exchange, push_wrong, push_fixed, 2),
    _pair("tile load, then done", rounds, rounds_wrong, rounds_fixed, 2),
    _pair("tile store, then tensor release", gather, gather_wrong, gather_fixed, 2),
    _pair("staged tile, between programs", stage, stage_wrong, stage_fixed, 1),
    _pair("partial sums, last one adds up", last_sums, last_sums_wrong, last_sums_fixed, 1),
    _pair("grid barrier by hand", phases, phases_wrong, phases_fixed, 1),
]
