"""Locks: taken with an acquire, given back with a release, after the data and at a wide scope."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.findings import Rule
from sundog.checker.races import BARRIER_BEFORE, NO_ORDER, RELAXED_ACQUIRE, RELAXED_RELEASE, SCOPE
from sundog.device import memory

from .pair import Kernel, Pair, everyone, values

__all__ = ["PAIRS"]

BLOCK = 16
FAMILY = "lock"


@triton.jit
def add_fixed(x, total, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    tl.store(total + at, tl.load(total + at) + mine)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release", scope="gpu")


@triton.jit
def early_release_wrong(x, total, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    mine += tl.load(total + at)
    tl.debug_barrier()
    # wrong: gives the lock back before the sum is stored
    tl.atomic_xchg(lock, 0, sem="release", scope="gpu")
    tl.store(total + at, mine)


@triton.jit
def relaxed_acquire_wrong(x, total, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + tl.program_id(0) * BLOCK + at)
    # wrong: taking the lock orders nothing after it
    while tl.atomic_cas(lock, 0, 1, sem="relaxed", scope="gpu") == 1:
        pass
    tl.store(total + at, tl.load(total + at) + mine)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release", scope="gpu")


@triton.jit
def relaxed_release_wrong(x, total, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    tl.store(total + at, tl.load(total + at) + mine)
    tl.debug_barrier()
    # wrong: giving the lock back publishes nothing
    tl.atomic_xchg(lock, 0, sem="relaxed", scope="gpu")


@triton.jit
def no_barrier_wrong(x, total, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    tl.store(total + at, tl.load(total + at) + mine)
    # wrong: one thread gives the lock back while other warps still store
    tl.atomic_xchg(lock, 0, sem="release", scope="gpu")


@triton.jit
def own_lock_wrong(x, total, lock, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = tl.load(x + tl.program_id(0) * BLOCK + at)
    lock += tl.program_id(0)
    # wrong: every program has a lock of its own, and they share the sum
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    tl.store(total + at, tl.load(total + at) + mine)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release", scope="gpu")


def programs_add(kernel: Kernel, world: sundog.World) -> None:
    x, total = values(0, 3, BLOCK), torch.zeros(BLOCK)
    kernel[(3,)](x, total, torch.zeros(3, dtype=torch.int32), BLOCK)
    assert torch.equal(total, x.sum(0))


@triton.jit
def add_at_first(x, total, lock, ctx, SCOPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total, lock = memory.translate(total, 0, ctx), memory.translate(lock, 0, ctx)
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope=SCOPE) == 1:
        pass
    tl.store(total + at, tl.load(total + at) + tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0, sem="release", scope=SCOPE)


def ranks_add(scope: str, world: sundog.World) -> None:
    total = world.zeros((BLOCK,), name="total")
    lock = world.zeros((1,), torch.int32, "lock")
    world.barrier()
    add_at_first[(1,)](values(world.rank, BLOCK), total, lock, world.ctx, scope, BLOCK)
    world.barrier()
    if world.rank == 0:
        assert torch.equal(total, everyone(world, BLOCK).sum(0))


def _pair(name: str, wrong: Kernel, rule: Rule) -> Pair:
    hosts = partial(programs_add, wrong), partial(programs_add, add_fixed)
    return Pair(FAMILY, name, *hosts, 1, rule)


PAIRS = [
    _pair("released before the data", early_release_wrong, NO_ORDER),
    _pair("relaxed acquire", relaxed_acquire_wrong, RELAXED_ACQUIRE),
    _pair("relaxed release", relaxed_release_wrong, RELAXED_RELEASE),
    _pair("no CTA barrier before the release", no_barrier_wrong, BARRIER_BEFORE),
    _pair("a lock per program", own_lock_wrong, NO_ORDER),
    # wrong: ranks share the lock, whose atomics end at each rank (an intermittent hang elsewhere)
    Pair(
        FAMILY,
        "gpu scope between ranks",
        partial(ranks_add, "gpu"),
        partial(ranks_add, "sys"),
        2,
        SCOPE,
    ),
]
