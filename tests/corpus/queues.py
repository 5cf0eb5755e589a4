"""Queues: a ticket says where an item goes, and only a release says that it is there."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.findings import Rule
from sundog.checker.races import NO_ORDER, RELAXED_RELEASE
from sundog.device import memory

from .pair import Kernel, Pair, everyone, values

__all__ = ["PAIRS"]

BLOCK = 8
ITEMS = 3
FAMILY = "queue without a release"


@triton.jit
def ticket_wrong(x, slots, out, tail, ready, ITEMS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    if part < ITEMS:
        slot = tl.atomic_add(tail, 1, sem="acq_rel", scope="gpu")
        # wrong: the item is stored after the ticket that is to publish it
        tl.store(slots + slot * BLOCK + at, tl.load(x + part * BLOCK + at))
    else:
        while tl.atomic_add(tail, 0, sem="acquire", scope="gpu") < ITEMS:
            pass
        for item in range(ITEMS):
            tl.store(out + item * BLOCK + at, tl.load(slots + item * BLOCK + at))


@triton.jit
def relaxed_ready_wrong(x, slots, out, tail, ready, ITEMS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    if part < ITEMS:
        slot = tl.atomic_add(tail, 1, sem="acq_rel", scope="gpu")
        tl.store(slots + slot * BLOCK + at, tl.load(x + part * BLOCK + at))
        tl.debug_barrier()
        # wrong: the ticket has release semantics, but the flag after the item has not
        tl.atomic_xchg(ready + slot, 1, sem="relaxed", scope="gpu")
    else:
        for item in range(ITEMS):
            while tl.atomic_add(ready + item, 0, sem="acquire", scope="gpu") == 0:
                pass
            tl.store(out + item * BLOCK + at, tl.load(slots + item * BLOCK + at))


@triton.jit
def ready_fixed(x, slots, out, tail, ready, ITEMS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    if part < ITEMS:
        slot = tl.atomic_add(tail, 1, sem="relaxed", scope="gpu")  # a ticket orders nothing
        tl.store(slots + slot * BLOCK + at, tl.load(x + part * BLOCK + at))
        tl.debug_barrier()
        tl.atomic_xchg(ready + slot, 1, sem="release", scope="gpu")
    else:
        for item in range(ITEMS):
            while tl.atomic_add(ready + item, 0, sem="acquire", scope="gpu") == 0:
                pass
            tl.store(out + item * BLOCK + at, tl.load(slots + item * BLOCK + at))


def _sorted(rows: torch.Tensor) -> list[list[float]]:
    return sorted(rows.tolist())


def queue(kernel: Kernel, world: sundog.World) -> None:
    x, slots, out = values(0, ITEMS, BLOCK), torch.zeros(ITEMS, BLOCK), torch.zeros(ITEMS, BLOCK)
    tail, ready = torch.zeros(1, dtype=torch.int32), torch.zeros(ITEMS, dtype=torch.int32)
    kernel[(ITEMS + 1,)](x, slots, out, tail, ready, ITEMS, BLOCK)
    assert _sorted(out) == _sorted(x)  # items come in any order


@triton.jit
def send_all_wrong(x, slots, out, tail, ready, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    slot = memory.atomic_add(tail, 1, 0, ctx, sem="relaxed")
    memory.store(slots + slot * BLOCK + at, tl.load(x + at), 0, ctx)
    if rank == 0:
        # wrong: all tickets are drawn, which does not mean that all items have come
        while tl.atomic_add(tail, 0, sem="acquire", scope="sys") < WORLD:
            pass
        for item in range(WORLD):
            tl.store(out + item * BLOCK + at, tl.load(slots + item * BLOCK + at))


@triton.jit
def send_all_fixed(x, slots, out, tail, ready, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    slot = memory.atomic_add(tail, 1, 0, ctx, sem="relaxed")
    memory.store(slots + slot * BLOCK + at, tl.load(x + at), 0, ctx)
    tl.debug_barrier()
    memory.atomic_add(ready, 1, 0, ctx, sem="release")
    if rank == 0:
        while tl.atomic_add(ready, 0, sem="acquire", scope="sys") < WORLD:
            pass
        for item in range(WORLD):
            tl.store(out + item * BLOCK + at, tl.load(slots + item * BLOCK + at))


def mailbox(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(world.size, BLOCK)
    slots = world.zeros((world.size, BLOCK), name="slots")
    tail, ready = world.signals((1,), "tail"), world.signals((1,), "ready")
    world.barrier()
    kernel[(1,)](x, slots, out, tail, ready, world.rank, world.ctx, world.size, BLOCK)
    if world.rank == 0:
        assert _sorted(out) == _sorted(everyone(world, BLOCK))


def _pair(name: str, host: Kernel, wrong: Kernel, fixed: Kernel, size: int, rule: Rule) -> Pair:
    return Pair(FAMILY, name, partial(host, wrong), partial(host, fixed), size, rule)


PAIRS = [
    _pair("item after the ticket", queue, ticket_wrong, ready_fixed, 1, NO_ORDER),
    _pair(
        "relaxed flag after the item", queue, relaxed_ready_wrong, ready_fixed, 1, RELAXED_RELEASE
    ),
    _pair(
        "tickets counted, not items", mailbox, send_all_wrong, send_all_fixed, 2, RELAXED_RELEASE
    ),
]
