"""Fetchers: programs that pull the peers' parts of a sharded matrix into a staging buffer.

The remote part is a grid of tiles, rows by blocks along K: of all peers side by side where the
matrix is sharded along K, one below the other along M. The next rank's part comes first, so every
rank begins with another peer.

Over PCIe (docs/measured.md) a kernel reads 50.8 GB/s, with two programs or thirty, by pointers or
by TMA, and the copy engine 54.7: fetching takes 1.077 times as long as its copy at best. Three
fetchers do it beside a product; a fourth is a worker less, and 1,024 tiles are 8 rounds of 128
workers but 9 of 127. Between two units a fetcher has nothing on its way, for Triton pipelines no
loop with a barrier in it. Two pieces in registers, loaded before the last unit's flag is set, were
no remedy: 12 GB/s from each fetcher, it seems since the flag's release waits for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device import context, local, signal, tiles, trace
from . import _gemm

__all__ = ["Fetch", "Flags", "Sharded", "arrived", "fetch", "remote", "staged_part", "tell_all"]


class Flags(NamedTuple):
    ready: Any  # by rank: its part of A may be read
    done: Any  # by fetcher and rank: has read all that it will of this rank's A
    staged: Any  # by row and group of blocks: is in the staging buffer
    tickets: Any  # how many output tiles were asked for, by all calls
    epochs: Any  # by program: how often it has run


class Sharded(NamedTuple):
    """This rank's shard of a matrix, as a view, and the staging buffer: a shard per other rank."""

    ptr: Any
    rows: Any
    cols: Any
    row_stride: Any
    col_stride: Any
    staged: Any  # the first of the staged shards, which is the next rank's
    staged_row_stride: Any
    staged_col_stride: Any
    apart: Any  # elements between two of them
    own_at: Any  # where this rank's is in a descriptor of both (_workers.py)


class Fetch(NamedTuple):
    """Constants of the fetching."""

    size: Any
    lanes: Any
    by_k: Any
    per_shard: Any  # blocks; a constant, since dividing by another costs 4 % of a product's time
    per_flag: Any  # blocks
    wide: Any  # blocks that are copied together
    fetchers: Any
    first_fetchers: Any
    most_fetchers: Any
    stages: Any
    ahead: Any  # tiles that are on their way at once
    hint: Any
    trace: Any  # the clock of trace points, or 0


@triton.jit
def remote(a, F, S):
    """Rows of remote tiles, blocks in such a row, and flags of such a row."""
    rows, blocks = tl.cdiv(a.rows, S.tile_m), F.per_shard
    if F.by_k:
        blocks *= F.size - 1
    else:
        rows *= F.size - 1
    return rows, blocks, tl.cdiv(blocks, F.per_flag)


@triton.jit
def fetch(a, flags, epoch, ctx, F, S):
    """Copy this program's share of the remote tiles, in the order in which workers want them.

    Return its number of units, which is the same on all ranks.
    """
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    rows, blocks, groups = remote(a, F, S)
    # The peers' A is complete, as program 0 of each of them says.
    signal.wait_all(flags.ready, epoch, ctx, F.lanes, F.trace)
    units = rows * groups
    first = tl.cdiv(rows, F.stages) * groups  # units of the first stage
    mine = tl.where(program < F.first_fetchers, first - program + F.first_fetchers - 1, 0)
    mine = tl.maximum(mine, 0) // F.first_fetchers
    more = tl.where(program < F.fetchers, units - first - program + F.fetchers - 1, 0)
    more = tl.maximum(more, 0) // F.fetchers
    away = tiles.distances(ctx, F.lanes)
    for n in range(mine + more):
        later = first + program + (n - mine) * F.fetchers
        unit = tl.where(n < mine, program + n * F.first_fetchers, later)
        # A band of rows flag by flag, as `swizzle` lets the workers go over its columns.
        row, group = _gemm.swizzle(unit, rows, groups, S.group_m)
        last = tl.minimum((group + 1) * F.per_flag, blocks)
        trace.begin(trace.FETCH, unit, 0, rank, ctx, F.trace)
        # By tiles of F.wide blocks and as many times fewer rows: long rows suit the memory.
        for step in tl.range(group * F.per_flag, last, num_stages=F.ahead):
            part, block = step % F.wide, step // F.wide * F.wide
            _fetch_tile(a, row, part, block, rank, away, F, S)
        trace.end(trace.FETCH, unit, 0, rank, ctx, F.trace)
        # The tiles of this group, stored by all warps, before the flag: workers wait for it.
        flag = flags.staged + row * groups + group
        local.signal(flag, epoch, ctx, F.trace)
        if n == mine + more - 1:
            # My loads of the peers' A, before the barrier of that signal, before these flags: the
            # peers may overwrite it when their kernel, which waits for this, has ended.
            done = flags.done + program * F.size
            tell_all(done, epoch, ctx, F)
    return mine + more


@triton.jit
def tell_all(flags, epoch, ctx, F):
    """Set `flags[my rank]` to `epoch` at every rank.

    As signal.signal_all without its CTA barrier, for what came before this kernel, or before a
    signal right before this: there it would order nothing, so no check could miss it.
    """
    lane = tl.arange(0, F.lanes)
    mine = signal._translate_all(flags, lane, F.size, ctx)
    trace.begin(trace.SIGNAL, flags, epoch, trace.ALL, ctx, F.trace)
    tl.atomic_xchg(mine, lane * 0 + epoch, mask=lane < F.size, sem="release", scope="sys")


@triton.jit
def _fetch_tile(a, row, part, block, rank, away, F, S):
    """Part `part` of F.wide of the rows of F.wide blocks, which are of one rank."""
    ROWS: tl.constexpr = S.tile_m // F.wide
    COLS: tl.constexpr = S.tile_k * F.wide
    if F.by_k:
        step, i, k = block // F.per_shard, row, block % F.per_shard
    else:
        per_peer = tl.cdiv(a.rows, S.tile_m)
        step, i, k = row // per_peer, row % per_peer, block
    row, col = i * S.tile_m + part * ROWS, k * S.tile_k
    peer = (rank + 1 + step) % F.size
    there = tiles.of_rank(tiles.hinted(a, F.hint), peer, away)
    tile = tiles.load(there, row, col, ROWS, COLS)
    tiles.store(staged_part(a, step), row, col, tile)


@triton.jit
def staged_part(a, step):
    """What was staged of the rank that is `step` + 1 after this one."""
    ptr = a.staged + tl.full((), 1, tl.int64) * step * a.apart
    return tiles.View(ptr, a.rows, a.cols, a.staged_row_stride, a.staged_col_stride)


@triton.jit
def arrived(flags, count, epoch, LANES: tl.constexpr):
    """How many of `count` flags have been set, up to the first that has not; of LANES at most.

    Orders: what the fetchers of those stored before, before all that this program does after.
    """
    lane = tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.int64)
    seen = tl.atomic_add(flags + lane, zero, mask=lane < count, sem="acquire", scope="gpu")
    late = tl.where((lane < count) & (seen < epoch), lane, tl.minimum(count, LANES))
    tl.debug_barrier()  # the lanes' acquires before all warps' loads
    return tl.min(late, 0)
