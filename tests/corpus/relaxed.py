"""Protocols made of atomics only: no two accesses race, and still an old value is read."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import WRONG_RESULT
from sundog.device import memory

from .pair import Kernel, Pair, neighbour

__all__ = ["PAIRS"]


@triton.jit
def message_wrong(data, flag, out, rank, ctx):
    if rank == 0:
        memory.atomic_xchg(data, 7, 1, ctx, sem="relaxed")
        # wrong: a relaxed flag does not carry the data, although both are atomic
        memory.atomic_xchg(flag, 1, 1, ctx, sem="relaxed")
    else:
        while tl.atomic_add(flag, 0, sem="relaxed", scope="sys") < 1:
            pass
        tl.store(out, tl.atomic_add(data, 0, sem="relaxed", scope="sys"))


@triton.jit
def message_fixed(data, flag, out, rank, ctx):
    if rank == 0:
        memory.atomic_xchg(data, 7, 1, ctx, sem="relaxed")
        # orders the data before the flag, for rank 1, which waits for the flag
        memory.atomic_xchg(flag, 1, 1, ctx, sem="release")
    else:
        # an acquire: the data comes before the read below
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.store(out, tl.atomic_add(data, 0, sem="relaxed", scope="sys"))


def message(kernel: Kernel, world: sundog.World) -> None:
    data, flag = world.signals((1,), "data"), world.signals((1,), "flag")
    out = torch.zeros(1, dtype=torch.int64)
    world.barrier()
    kernel[(1,)](data, flag, out, world.rank, world.ctx)
    assert out.item() == 7 * world.rank


@triton.jit
def arrivals_wrong(parts, counter, out, ARRIVALS: tl.constexpr):
    tl.atomic_xchg(parts + tl.program_id(0), 1, sem="relaxed", scope="gpu")
    # wrong: the last one to arrive has not learnt what the others wrote before they arrived
    if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == ARRIVALS - 1:
        for part in range(ARRIVALS):
            tl.store(out + part, tl.atomic_add(parts + part, 0, sem="relaxed", scope="gpu"))


@triton.jit
def arrivals_fixed(parts, counter, out, ARRIVALS: tl.constexpr):
    tl.atomic_xchg(parts + tl.program_id(0), 1, sem="relaxed", scope="gpu")
    # releases this program's part; the last one to arrive acquires all parts
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == ARRIVALS - 1:
        for part in range(ARRIVALS):
            tl.store(out + part, tl.atomic_add(parts + part, 0, sem="relaxed", scope="gpu"))


def arrivals(kernel: Kernel, world: sundog.World) -> None:
    parts, counter = torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    out = torch.zeros(3, dtype=torch.int64)
    kernel[(3,)](parts, counter, out, 3)
    assert out.tolist() == [1, 1, 1]


@triton.jit
def lock_wrong(wants, inside, out, rank, peer, ctx):
    memory.atomic_xchg(wants + rank, 1, 0, ctx, sem="relaxed")
    # wrong: both may read that the other does not want to enter (store buffering)
    if memory.atomic_add(wants + peer, 0, 0, ctx, sem="relaxed") == 0:
        tl.store(out, memory.atomic_add(inside, 1, 0, ctx, sem="relaxed"))


@triton.jit
def lock_fixed(wants, inside, out, rank, peer, ctx):
    # read-modify-writes that acquire and release: the later one of each word learns of the other
    memory.atomic_xchg(wants + rank, 1, 0, ctx, sem="acq_rel")
    if memory.atomic_add(wants + peer, 0, 0, ctx, sem="acq_rel") == 0:
        tl.store(out, memory.atomic_add(inside, 1, 0, ctx, sem="relaxed"))


def lock(kernel: Kernel, world: sundog.World) -> None:
    wants, inside = world.signals((2,), "wants"), world.signals((1,), "inside")
    out = torch.zeros(1, dtype=torch.int64)
    world.barrier()
    kernel[(1,)](wants, inside, out, world.rank, neighbour(world), world.ctx)
    assert out.item() == 0, "both ranks are inside"


def _pair(name: str, run: Kernel, wrong: Kernel, fixed: Kernel, world_size: int = 2) -> Pair:
    family = "relaxed protocol"
    return Pair(family, name, partial(run, wrong), partial(run, fixed), world_size, WRONG_RESULT)


PAIRS = [
    _pair("message", message, message_wrong, message_fixed),
    _pair("last one to arrive", arrivals, arrivals_wrong, arrivals_fixed, 1),
    _pair("both enter", lock, lock_wrong, lock_fixed),
]
