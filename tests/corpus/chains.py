"""Three parties: the one in the middle must learn, and must hand on what it learnt."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.findings import Rule
from sundog.checker.races import BARRIER_AFTER, RELAXED_ACQUIRE, RELAXED_RELEASE, SCOPE
from sundog.device import memory, signal

from .pair import Kernel, Pair, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def no_acquire_wrong(x, data, out, flag, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if rank == 0:
        memory.store(data + at, tl.load(x + at), 2, ctx)
        signal.signal(flag, 1, 1, ctx)
    elif rank == 1:
        # wrong: the rank in the middle sees the flag but does not acquire what it stands for
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
            pass
        signal.signal(flag, 2, 1, ctx)
    else:
        signal.wait(flag, 1, 1, ctx)
        tl.store(out + at, tl.load(data + at))


@triton.jit
def no_release_wrong(x, data, out, flag, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if rank == 0:
        memory.store(data + at, tl.load(x + at), 2, ctx)
        signal.signal(flag, 1, 1, ctx)
    elif rank == 1:
        signal.wait(flag, 0, 1, ctx)
        # wrong: the rank in the middle does not hand on what it acquired
        memory.atomic_xchg(flag, 1, 2, ctx, sem="relaxed")
    else:
        signal.wait(flag, 1, 1, ctx)
        tl.store(out + at, tl.load(data + at))


@triton.jit
def relay_fixed(x, data, out, flag, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if rank == 0:
        memory.store(data + at, tl.load(x + at), 2, ctx)
        signal.signal(flag, 1, 1, ctx)
    elif rank == 1:
        # a scalar acquire and a scalar release need no CTA barrier to hand on what was learnt
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        memory.atomic_xchg(flag, 1, 2, ctx, sem="release")
    else:
        signal.wait(flag, 1, 1, ctx)
        tl.store(out + at, tl.load(data + at))


@triton.jit
def tensor_middle_wrong(x, data, out, flag, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, 2)
    if rank == 0:
        memory.store(data + at, tl.load(x + at), 2, ctx)
        signal.signal(flag, 1, 1, ctx)
    elif rank == 1:
        while tl.max(tl.atomic_add(flag + lane, lane * 0, sem="acquire", scope="sys"), 0) < 1:
            pass
        # wrong: no CTA barrier hands the lanes' acquires on to the thread that releases
        memory.atomic_xchg(flag, 1, 2, ctx, sem="release")
    else:
        signal.wait(flag, 1, 1, ctx)
        tl.store(out + at, tl.load(data + at))


@triton.jit
def tensor_middle_fixed(x, data, out, flag, rank, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    lane = tl.arange(0, 2)
    if rank == 0:
        memory.store(data + at, tl.load(x + at), 2, ctx)
        signal.signal(flag, 1, 1, ctx)
    elif rank == 1:
        while tl.max(tl.atomic_add(flag + lane, lane * 0, sem="acquire", scope="sys"), 0) < 1:
            pass
        tl.debug_barrier()
        memory.atomic_xchg(flag, 1, 2, ctx, sem="release")
    else:
        signal.wait(flag, 1, 1, ctx)
        tl.store(out + at, tl.load(data + at))


def relay(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    data = world.empty((BLOCK,), name="data")
    flag = world.signals((2,), "flag")
    world.barrier()
    kernel[(1,)](x, data, out, flag, world.rank, world.ctx, BLOCK)
    if world.rank == 2:
        assert torch.equal(out, values(0, BLOCK))


@triton.jit
def two_scopes(x, data, out, near, far, rank, ctx, SCOPE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if rank == 1:
        signal.wait(far, 0, 1, ctx)
        tl.store(out + at, tl.load(data + at))
    elif tl.program_id(0) == 0:
        memory.store(data + at, tl.load(x + at), 1, ctx)
        tl.debug_barrier()
        tl.atomic_xchg(near, 1, sem="release", scope="gpu")  # enough: the next link is in this rank
    else:
        while tl.atomic_add(near, 0, sem="acquire", scope="gpu") < 1:
            pass
        tl.atomic_xchg(memory.translate(far, 1, ctx), 1, sem="release", scope=SCOPE)


def relay_by_program(scope: str, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    data = world.empty((BLOCK,), name="data")
    near, far = world.signals((1,), "near"), world.signals((1,), "far")
    world.barrier()
    grid = (2 - world.rank,)
    two_scopes[grid](x, data, out, near, far, world.rank, world.ctx, scope, BLOCK)
    if world.rank == 1:
        assert torch.equal(out, values(0, BLOCK))


def _pair(family: str, name: str, wrong: Kernel, fixed: Kernel, rule: Rule) -> Pair:
    return Pair(family, name, partial(relay, wrong), partial(relay, fixed), 3, rule)


ACQUIRE, RELEASE = "missing middle acquire in a chain", "missing middle release in a chain"
PAIRS = [
    _pair(ACQUIRE, "relaxed poll", no_acquire_wrong, relay_fixed, RELAXED_ACQUIRE),
    _pair(ACQUIRE, "tensor poll", tensor_middle_wrong, tensor_middle_fixed, BARRIER_AFTER),
    _pair(RELEASE, "relaxed signal", no_release_wrong, relay_fixed, RELAXED_RELEASE),
    Pair(
        RELEASE,
        "gpu scope on the last link",  # wrong: what the other program published stays in this rank
        partial(relay_by_program, "gpu"),
        partial(relay_by_program, "sys"),
        2,
        SCOPE,
    ),
]
