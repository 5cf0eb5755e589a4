"""Waits that never end: who should signal waits too, has not started, or does not exist."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import DEADLOCK, NOT_RESIDENT
from sundog.device import memory, signal

from .pair import Kernel, Pair, everyone, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 8


@triton.jit
def later_wrong(x, out, flags, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = tl.program_id(0)
    # wrong: a scan from the right; the first programs wait for ones that are not resident yet
    if part < PARTS - 1:
        while tl.atomic_add(flags + part + 1, 0, sem="acquire", scope="gpu") == 0:
            pass
    total = tl.load(x + part * BLOCK + at)
    if part < PARTS - 1:
        total += tl.load(out + (part + 1) * BLOCK + at)
    tl.store(out + part * BLOCK + at, total)
    tl.debug_barrier()
    tl.atomic_xchg(flags + part, 1, sem="release", scope="gpu")


@triton.jit
def earlier_fixed(x, out, flags, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    part = PARTS - 1 - tl.program_id(0)  # the first program takes the last part
    if part < PARTS - 1:
        while tl.atomic_add(flags + part + 1, 0, sem="acquire", scope="gpu") == 0:
            pass
    total = tl.load(x + part * BLOCK + at)
    if part < PARTS - 1:
        total += tl.load(out + (part + 1) * BLOCK + at)
    tl.store(out + part * BLOCK + at, total)
    tl.debug_barrier()
    tl.atomic_xchg(flags + part, 1, sem="release", scope="gpu")


def scan(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(0, 4, BLOCK), torch.empty(4, BLOCK)
    kernel[(4,)](x, out, torch.zeros(4, dtype=torch.int64), 4, BLOCK)
    assert torch.equal(out, x.flip(0).cumsum(0).flip(0))


@triton.jit
def mirror(x, middle, out, counter, ctx, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for part in range(tl.program_id(0), PARTS, tl.num_programs(0)):
        tl.store(middle + part * BLOCK + at, tl.load(x + part * BLOCK + at))
    signal.barrier_programs(counter, ctx)
    for part in range(tl.program_id(0), PARTS, tl.num_programs(0)):
        tl.store(out + part * BLOCK + at, tl.load(middle + (PARTS - 1 - part) * BLOCK + at))


def grid_barrier(fits: bool, world: sundog.World) -> None:
    x, middle, out = values(0, 5, BLOCK), torch.empty(5, BLOCK), torch.empty(5, BLOCK)
    counter = world.signals((1,), "counter")
    # wrong if it does not fit: a grid barrier of more programs than are resident at once
    programs = min(5, world.num_sms) if fits else 5
    mirror[(programs,)](x, middle, out, counter, world.ctx, 5, BLOCK)
    assert torch.equal(out, x.flip(0))


@triton.jit
def wait_first_wrong(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # wrong: every rank waits for its neighbour before it sends anything
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)


@triton.jit
def send_first_fixed(x, inbox, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flag, peer, 1, ctx)
    signal.wait(flag, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


def ring(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox, flag = world.empty((BLOCK,), name="inbox"), world.signals((1,), "flag")
    world.barrier()
    kernel[(1,)](x, inbox, out, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world, -1), BLOCK))


@triton.jit
def short_loop_wrong(x, inbox, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = inbox + rank * BLOCK + at
    # wrong: the loop over the peers ends one early, and the last rank never hears
    for peer in range(WORLD - 1):
        signal.put_signal(mine, x + at, flags + rank, peer, 1, ctx)
    for source in range(WORLD):
        signal.wait(flags + source, source, 1, ctx)
        tl.store(out + source * BLOCK + at, tl.load(inbox + source * BLOCK + at))


@triton.jit
def full_loop_fixed(x, inbox, out, flags, rank, ctx, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mine = inbox + rank * BLOCK + at
    for peer in range(WORLD):
        signal.put_signal(mine, x + at, flags + rank, peer, 1, ctx)
    for source in range(WORLD):
        signal.wait(flags + source, source, 1, ctx)
        tl.store(out + source * BLOCK + at, tl.load(inbox + source * BLOCK + at))


def gather(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(world.size, BLOCK)
    inbox = world.empty((world.size, BLOCK), name="inbox")
    flags = world.signals((world.size,), "flags")
    world.barrier()
    kernel[(1,)](x, inbox, out, flags, world.rank, world.ctx, world.size, BLOCK)
    assert torch.equal(out, everyone(world, BLOCK))


@triton.jit
def persistent(x, inbox, out, flags, peer, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr):
    first, programs = tl.program_id(0), tl.num_programs(0)
    for tile in range(first, TILES, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        memory.store(inbox + at, tl.load(x + at), peer, ctx)
    signal.signal(flags + first, peer, 1, ctx)  # a flag per program, not per tile
    signal.wait(flags + first, peer, 1, ctx)
    for tile in range(first, TILES, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(inbox + at))


def grids(programs: tuple[int, int], world: sundog.World) -> None:
    x, out = values(world.rank, 3, BLOCK), torch.empty(3, BLOCK)
    inbox, flags = world.empty((3, BLOCK), name="inbox"), world.signals((3,), "flags")
    world.barrier()
    grid = (programs[world.rank],)
    persistent[grid](x, inbox, out, flags, neighbour(world), world.ctx, 3, BLOCK)
    assert torch.equal(out, values(neighbour(world), 3, BLOCK))


@triton.jit
def grouped_wrong(place, TILES_M: tl.constexpr, TILES_N: tl.constexpr, GROUP: tl.constexpr):
    group, inside = place // (GROUP * TILES_N), place % (GROUP * TILES_N)
    # wrong: takes the last group to be full, so some tiles come twice and some never
    return group * GROUP + inside % GROUP, inside // GROUP


@triton.jit
def grouped_fixed(place, TILES_M: tl.constexpr, TILES_N: tl.constexpr, GROUP: tl.constexpr):
    group, inside = place // (GROUP * TILES_N), place % (GROUP * TILES_N)
    height = tl.minimum(TILES_M - group * GROUP, GROUP)
    return group * GROUP + inside % height, inside // height


@triton.jit
def fetch_and_work(
    x, staged, out, flags,
    ORDER: tl.constexpr, TILES_M: tl.constexpr, TILES_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        for place in range(TILES_M * TILES_N):
            m, n = ORDER(place, TILES_M, TILES_N, 2)
            if m < TILES_M:
                tile = m * TILES_N + n
                tl.store(staged + tile * BLOCK + at, tl.load(x + tile * BLOCK + at))
                tl.debug_barrier()
                tl.atomic_xchg(flags + tile, 1, sem="release", scope="gpu")
    else:
        for tile in range(TILES_M * TILES_N):
            while tl.atomic_add(flags + tile, 0, sem="acquire", scope="gpu") == 0:
                pass
            tl.store(out + tile * BLOCK + at, tl.load(staged + tile * BLOCK + at))


def grouped_order(order: Kernel, world: sundog.World) -> None:
    x, staged, out = values(0, 3, 2, BLOCK), torch.empty(3, 2, BLOCK), torch.empty(3, 2, BLOCK)
    flags = torch.zeros(3, 2, dtype=torch.int64)
    fetch_and_work[(2,)](x, staged, out, flags, order, 3, 2, BLOCK)
    assert torch.equal(out, x)


@triton.jit
def swap_wrong(totals, locks, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    first = tl.program_id(0)
    # wrong: program 0 takes lock 0 and then lock 1, program 1 the other way round
    while tl.atomic_cas(locks + first, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    while tl.atomic_cas(locks + 1 - first, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    zero, one = tl.load(totals + at), tl.load(totals + BLOCK + at)
    tl.store(totals + at, one)
    tl.store(totals + BLOCK + at, zero)
    tl.debug_barrier()
    tl.atomic_xchg(locks + 1 - first, 0, sem="release", scope="gpu")
    tl.atomic_xchg(locks + first, 0, sem="release", scope="gpu")


@triton.jit
def swap_fixed(totals, locks, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    while tl.atomic_cas(locks, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    while tl.atomic_cas(locks + 1, 0, 1, sem="acquire", scope="gpu") == 1:
        pass
    zero, one = tl.load(totals + at), tl.load(totals + BLOCK + at)
    tl.store(totals + at, one)
    tl.store(totals + BLOCK + at, zero)
    tl.debug_barrier()
    tl.atomic_xchg(locks + 1, 0, sem="release", scope="gpu")
    tl.atomic_xchg(locks, 0, sem="release", scope="gpu")


def swap_twice(kernel: Kernel, world: sundog.World) -> None:
    totals = values(0, 2, BLOCK)
    kernel[(2,)](totals, torch.zeros(2, dtype=torch.int32), BLOCK)
    assert torch.equal(totals, values(0, 2, BLOCK))


def barrier_between(wrong: bool, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox, flag = world.empty((BLOCK,), name="inbox"), world.signals((1,), "flag")
    world.barrier()
    # wrong: rank 1 meets rank 0 at a barrier that waits for the kernel, which waits for rank 1
    if wrong and world.rank == 1:
        world.barrier()
    send_first_fixed[(1,)](x, inbox, out, flag, neighbour(world), world.ctx, BLOCK)
    if not (wrong and world.rank == 1):
        world.barrier()
    assert torch.equal(out, values(neighbour(world), BLOCK))


def _pair(family: str, name: str, wrong: partial, fixed: partial, world_size: int) -> Pair:
    rule = NOT_RESIDENT if family == RESIDENT else DEADLOCK
    return Pair(family, name, wrong, fixed, world_size, rule)


RESIDENT = "waiting for a program that is not resident"
PAIRS = [
    _pair(RESIDENT, "a later one", partial(scan, later_wrong), partial(scan, earlier_fixed), 1),
    _pair(RESIDENT, "grid barrier", partial(grid_barrier, False), partial(grid_barrier, True), 1),
    _pair(
        "circular wait",
        "between ranks",
        partial(ring, wait_first_wrong),
        partial(ring, send_first_fixed),
        3,
    ),
    _pair(
        "circular wait",
        "two locks in two orders",
        partial(swap_twice, swap_wrong),
        partial(swap_twice, swap_fixed),
        1,
    ),
    _pair(
        "circular wait",
        "kernel and host barrier",
        partial(barrier_between, True),
        partial(barrier_between, False),
        2,
    ),
    _pair(
        "rank that never signals",
        "loop over peers too short",
        partial(gather, short_loop_wrong),
        partial(gather, full_loop_fixed),
        2,
    ),
    # wrong: program 2 of rank 0 waits for one that rank 1 did not launch
    _pair(
        "different grids", "a flag per program", partial(grids, (3, 2)), partial(grids, (3, 3)), 2
    ),
    _pair(
        "grouped tile order",
        "count not a multiple of the group",
        partial(grouped_order, grouped_wrong),
        partial(grouped_order, grouped_fixed),
        1,
    ),
]
