"""A scope must reach both parties: `gpu` ends at the rank, `cta` at the program.

The wrong and the right kernel are one, with the scopes as its constants: that is the whole bug.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.races import SCOPE
from sundog.device import memory

from .pair import Pair, everyone, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def push(
    x, inbox, out, flag, peer, ctx,
    RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    tl.debug_barrier()
    tl.atomic_xchg(memory.translate(flag, peer, ctx), 1, sem="release", scope=RELEASE)
    while tl.atomic_add(flag, 0, sem="acquire", scope=ACQUIRE) < 1:
        pass
    tl.store(out + at, tl.load(inbox + at))


def exchange(release: str, acquire: str, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox = world.empty((BLOCK,), name="inbox")
    flag = world.signals((1,), "flag")
    world.barrier()
    peer = neighbour(world)
    push[(1,)](x, inbox, out, flag, peer, world.ctx, release, acquire, BLOCK)
    assert torch.equal(out, values(neighbour(world, -1), BLOCK))


@triton.jit
def gather_by_count(
    x, inbox, out, count, rank, ctx, SCOPE: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + rank * BLOCK + at, tl.load(x + at), 0, ctx)
    tl.debug_barrier()
    tl.atomic_add(memory.translate(count, 0, ctx), 1, sem="release", scope=SCOPE)
    if rank == 0:
        while tl.atomic_add(count, 0, sem="acquire", scope="sys") < WORLD:
            pass
        for source in range(WORLD):
            tl.store(out + source * BLOCK + at, tl.load(inbox + source * BLOCK + at))


def count_arrivals(scope: str, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(world.size, BLOCK)
    inbox = world.empty((world.size, BLOCK), name="inbox")
    count = world.signals((1,), "count")
    world.barrier()
    gather_by_count[(1,)](x, inbox, out, count, world.rank, world.ctx, scope, world.size, BLOCK)
    if world.rank == 0:
        assert torch.equal(out, everyone(world, BLOCK))


@triton.jit
def add_to_first(x, total, ctx, SCOPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there = memory.translate(total + at, 0, ctx)
    tl.atomic_add(there, tl.load(x + at), sem="relaxed", scope=SCOPE)


def sum_by_atomics(scope: str, world: sundog.World) -> None:
    total = world.zeros((BLOCK,), name="total")
    world.barrier()
    add_to_first[(1,)](values(world.rank, BLOCK), total, world.ctx, scope, BLOCK)
    world.barrier()
    if world.rank == 0:
        assert torch.equal(total, everyone(world, BLOCK).sum(0))


@triton.jit
def stage(x, staged, out, flag, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope=RELEASE)
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope=ACQUIRE) == 0:
            pass
        tl.store(out + at, tl.load(staged + at))


def between_programs(release: str, acquire: str, world: sundog.World) -> None:
    x, staged, out = values(0, BLOCK), torch.empty(BLOCK), torch.empty(BLOCK)
    flag = torch.zeros(1, dtype=torch.int64)
    stage[(2,)](x, staged, out, flag, release, acquire, BLOCK)
    assert torch.equal(out, x)


@triton.jit
def phases(x, middle, out, count, SCOPE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    tl.store(middle + part * BLOCK + at, tl.load(x + part * BLOCK + at))
    tl.debug_barrier()
    tl.atomic_add(count, 1, sem="acq_rel", scope=SCOPE)
    while tl.atomic_add(count, 0, sem="acquire", scope=SCOPE) < PARTS:
        pass
    tl.store(out + part * BLOCK + at, tl.load(middle + (PARTS - 1 - part) * BLOCK + at))


def grid_barrier(scope: str, world: sundog.World) -> None:
    x, middle, out = values(0, 3, BLOCK), torch.empty(3, BLOCK), torch.empty(3, BLOCK)
    count = torch.zeros(1, dtype=torch.int64)
    phases[(3,)](x, middle, out, count, scope, 3, BLOCK, launch_cooperative_grid=True)
    assert torch.equal(out, x.flip(0))


def _ranks(name: str, wrong: partial, fixed: partial, world_size: int) -> Pair:
    return Pair("gpu scope between ranks", name, wrong, fixed, world_size, SCOPE)


def _programs(name: str, wrong: partial, fixed: partial) -> Pair:
    return Pair("cta scope between programs", name, wrong, fixed, 1, SCOPE)


_sys = partial(exchange, "sys", "sys")
_gpu = partial(between_programs, "gpu", "gpu")

PAIRS = [
    # wrong: the release reaches only the programs of the producer's rank
    _ranks("release", partial(exchange, "gpu", "sys"), _sys, 2),
    # wrong: the acquire reaches only the programs of the consumer's rank
    _ranks("acquire", partial(exchange, "sys", "gpu"), _sys, 2),
    # wrong: neither reaches the other rank
    _ranks("both", partial(exchange, "gpu", "gpu"), _sys, 2),
    # wrong: several ranks add to one counter, with a scope that ends at each of them
    _ranks("shared counter", partial(count_arrivals, "gpu"), partial(count_arrivals, "sys"), 3),
    # wrong: atomic adds of two ranks are not atomic to each other
    _ranks("sum by atomics", partial(sum_by_atomics, "gpu"), partial(sum_by_atomics, "sys"), 2),
    # wrong: the release does not leave the program
    _programs("release", partial(between_programs, "cta", "gpu"), _gpu),
    # wrong: the acquire takes nothing in from other programs
    _programs("acquire", partial(between_programs, "gpu", "cta"), _gpu),
    # wrong: a grid barrier that only synchronises each program with itself
    _programs("grid barrier", partial(grid_barrier, "cta"), partial(grid_barrier, "gpu")),
]
