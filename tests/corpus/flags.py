"""A good flag at the wrong place: another tile's, too few, too early, the wrong rank's."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import BAD_ACCESS
from sundog.checker.races import NO_ORDER
from sundog.device import memory, signal

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16
TILES = 3
SIZE = 41  # the last tile is ragged


@triton.jit
def other_tile_wrong(x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flags + tile, peer, 1, ctx, mask=at < n)
    # wrong: waits for the flag of another tile than it reads
    signal.wait(flags + TILES - 1 - tile, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def own_tile_fixed(x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flags + tile, peer, 1, ctx, mask=at < n)
    signal.wait(flags + tile, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def acquire_once_wrong(
    x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    for tile in range(TILES):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        signal.put_signal(inbox + at, x + at, flags + tile, peer, 1, ctx, mask=at < n)
    # wrong: one wait, for the first tile, where every tile has its own flag
    signal.wait(flags, peer, 1, ctx)
    for tile in range(TILES):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def acquire_each_fixed(
    x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    for tile in range(TILES):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        signal.put_signal(inbox + at, x + at, flags + tile, peer, 1, ctx, mask=at < n)
    for tile in range(TILES):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        signal.wait(flags + tile, peer, 1, ctx)
        tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def first_program_signals_wrong(
    x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at, mask=at < n), peer, ctx, mask=at < n)
    # wrong: program 0 signals for all, but a signal carries only what its own program did
    if tl.program_id(0) == 0:
        signal.signal(flags, peer, 1, ctx)
    signal.wait(flags, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def signal_first_wrong(
    x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr
):
    tile = tl.program_id(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    # wrong: the signal stands before the store that it announces
    signal.signal(flags + tile, peer, 1, ctx)
    memory.store(inbox + at, tl.load(x + at, mask=at < n), peer, ctx, mask=at < n)
    signal.wait(flags + tile, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def signal_self_wrong(x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at, mask=at < n), peer, ctx, mask=at < n)
    # wrong: the data goes to the peer, the flag to this rank itself (two ranks: 1 - peer)
    signal.signal(flags + tile, 1 - peer, 1, ctx)
    signal.wait(flags + tile, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def by_peer_fixed(x, inbox, out, flags, peer, n, ctx, TILES: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    signal.put_signal(inbox + at, x + at, flags + peer * TILES + tile, peer, 1, ctx, mask=at < n)
    signal.wait(flags + (1 - peer) * TILES + tile, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


def exchange(kernel: Kernel, programs: int, num_flags: int, world: sundog.World) -> None:
    x, out = values(world.rank, SIZE), torch.empty(SIZE)
    inbox = world.empty((SIZE,), name="inbox")
    flags = world.signals((num_flags,), "flags")
    world.barrier()
    peer = neighbour(world)
    kernel[(programs,)](x, inbox, out, flags, peer, SIZE, world.ctx, TILES, BLOCK)
    assert torch.equal(out, values(peer, SIZE))


@triton.jit
def wrong_stride_wrong(x, inbox, out, flags, peer, ctx, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1)
    at = (row * COLS + col) * 4 + tl.arange(0, 4)
    signal.put_signal(inbox + at, x + at, flags + row * COLS + col, peer, 1, ctx)
    # wrong: the waiter multiplies by the number of rows, the signaller by that of columns
    signal.wait(flags + row * ROWS + col, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def same_stride_fixed(x, inbox, out, flags, peer, ctx, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.program_id(0), tl.program_id(1)
    at = (row * COLS + col) * 4 + tl.arange(0, 4)
    signal.put_signal(inbox + at, x + at, flags + row * COLS + col, peer, 1, ctx)
    signal.wait(flags + row * COLS + col, peer, 1, ctx)
    tl.store(out + at, tl.load(inbox + at))


def matrix(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, 2, 3, 4), torch.empty(2, 3, 4)
    inbox = world.empty((2, 3, 4), name="inbox")
    flags = world.signals((2, 3), "flags")
    world.barrier()
    kernel[(2, 3)](x, inbox, out, flags, neighbour(world), world.ctx, 2, 3)
    assert torch.equal(out, values(neighbour(world), 2, 3, 4))


def _pair(family: str, name: str, wrong: Kernel, fixed: Kernel, programs: int) -> Pair:
    hosts = partial(exchange, wrong, programs, TILES), partial(exchange, fixed, programs, TILES)
    return Pair(family, name, *hosts, 2, NO_ORDER)


WRONG_TILE, SMALL = "flag of the wrong tile", "flag array too small"
PAIRS = [
    _pair(WRONG_TILE, "mirrored index", other_tile_wrong, own_tile_fixed, TILES),
    _pair(WRONG_TILE, "one acquire for several tiles", acquire_once_wrong, acquire_each_fixed, 1),
    _pair(
        WRONG_TILE, "program 0 signals for all", first_program_signals_wrong, own_tile_fixed, TILES
    ),
    Pair(
        WRONG_TILE,
        "rows and columns mixed up",
        partial(matrix, wrong_stride_wrong),
        partial(matrix, same_stride_fixed),
        2,
        NO_ORDER,
    ),
    _pair("signal before the store", "swapped lines", signal_first_wrong, own_tile_fixed, TILES),
    _pair("off-by-one peer", "signals itself", signal_self_wrong, own_tile_fixed, TILES),
    Pair(
        SMALL,
        "ragged tail not counted",  # wrong: SIZE // BLOCK flags, and a tile more than that
        partial(exchange, own_tile_fixed, TILES, SIZE // BLOCK),
        partial(exchange, own_tile_fixed, TILES, TILES),
        2,
        BAD_ACCESS,
    ),
    Pair(
        SMALL,
        "one row of flags for two ranks",  # wrong: the kernel has a row of flags per peer
        partial(exchange, by_peer_fixed, TILES, TILES),
        partial(exchange, by_peer_fixed, TILES, 2 * TILES),
        2,
        BAD_ACCESS,
    ),
]
