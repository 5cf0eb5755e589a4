"""Fetchers: programs that pull the peers' parts of a sharded matrix into a staging buffer.

The remote part is a grid of tiles, rows by blocks along K. The peers' shards are side by side where
the matrix is sharded along K, and one below the other where it is sharded along M. The next rank's
part comes first, so every rank begins with a different peer. Between two units a fetcher has no
loads in flight, for Triton does not pipeline a loop with a barrier in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from ..device import context, local, signal, tiles, trace
from . import _gemm

if TYPE_CHECKING:
    import torch


class Flags(NamedTuple):
    """Epochs by which the programs of a call, on all ranks, wait for each other."""

    ready: torch.Tensor  # by rank: its part of A may be read
    done: torch.Tensor  # by fetcher and rank: it has read all that it will of this rank's A
    staged: torch.Tensor  # by row and group of blocks: it is in the staging buffer
    tickets: torch.Tensor  # how many output tiles were asked for, by all calls
    epochs: torch.Tensor  # by program: how often it has run


class Sharded(NamedTuple):
    """A view of this rank's shard of a matrix, and the staging buffer: a shard per other rank."""

    ptr: torch.Tensor
    rows: int
    cols: int
    row_stride: int  # in elements, like all distances here
    col_stride: int
    staged: torch.Tensor  # the first of the staged shards, which is the next rank's
    staged_row_stride: int
    staged_col_stride: int
    apart: int  # between two staged shards
    own_at: int  # where this rank's shard is in a descriptor of both (_workers.py)


class Fetch(NamedTuple):
    """Constants of the fetching. Blocks are tile_k columns of a shard."""

    size: tl.constexpr  # ranks
    by_k: tl.constexpr  # A is sharded along K, else along M
    per_shard: tl.constexpr  # blocks; dividing by a variable costs 4 % of a product's time
    cols: tl.constexpr  # of a shard, without padding
    per_flag: tl.constexpr  # blocks of a row of tiles that one flag stands for
    wide: tl.constexpr  # blocks that are copied together
    fetchers: tl.constexpr  # programs that fetch ...
    first_fetchers: tl.constexpr  # ... and that fetch the first of `stages` parts of the rows
    most_fetchers: tl.constexpr  # the larger of the two
    stages: tl.constexpr
    ahead: tl.constexpr  # tiles that a fetcher has in flight at once
    hint: tl.constexpr  # see tiles.hinted
    scope: tl.constexpr  # of the flags' wait: "gpu"; "sys" where the copy engine fetches
    trace: tl.constexpr  # the clock of trace points, or 0


@triton.jit
def remote(a, cfg, shape):
    """Return the rows of remote tiles, and the blocks and flags of such a row."""
    rows, blocks = tl.cdiv(a.rows, shape.tile_m), cfg.per_shard
    if cfg.by_k:
        blocks *= cfg.size - 1
    else:
        rows *= cfg.size - 1
    return rows, blocks, tl.cdiv(blocks, cfg.per_flag)


@triton.jit
def fetch(a, flags, epoch, ctx, cfg, shape):
    """Copy this program's share of the remote tiles, in the order in which workers need them.

    Return how many units it copied, which is the same on all ranks.
    """
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    rows, blocks, groups = remote(a, cfg, shape)
    # The peers' A is complete, as program 0 of each peer signals.
    signal.wait_all(flags.ready, epoch, ctx, cfg.size, cfg.trace)
    units = rows * groups
    first = tl.cdiv(rows, cfg.stages) * groups  # units of the first stage
    mine = tl.where(program < cfg.first_fetchers, first - program + cfg.first_fetchers - 1, 0)
    mine = tl.maximum(mine, 0) // cfg.first_fetchers
    more = tl.where(program < cfg.fetchers, units - first - program + cfg.fetchers - 1, 0)
    more = tl.maximum(more, 0) // cfg.fetchers
    away = tiles.distances(ctx, cfg.size)
    for n in range(mine + more):
        later = first + program + (n - mine) * cfg.fetchers
        unit = tl.where(n < mine, program + n * cfg.first_fetchers, later)
        # A band of rows flag by flag, in the order in which `swizzle` takes the workers over its
        # columns.
        row, group = _gemm.swizzle(unit, rows, groups, shape.group_m)
        last = tl.minimum((group + 1) * cfg.per_flag, blocks)
        trace.begin(trace.FETCH, unit, 0, rank, ctx, cfg.trace)
        # By tiles of cfg.wide blocks and as many times fewer rows, since long rows suit the memory.
        for step in tl.range(group * cfg.per_flag, last, num_stages=cfg.ahead):
            part, block = step % cfg.wide, step // cfg.wide * cfg.wide
            _fetch_tile(a, row, part, block, rank, away, cfg, shape)
        trace.end(trace.FETCH, unit, 0, rank, ctx, cfg.trace)
        # The tiles of this group, stored by all warps, before the flag that workers wait for.
        flag = flags.staged + row * groups + group
        local.signal(flag, epoch, ctx, cfg.trace)
        if n == mine + more - 1:
            # My loads of the peers' A, before the barrier of that signal, before these flags: the
            # peers may overwrite it when their kernel, which waits for this, has ended.
            done = flags.done + program * cfg.size
            tell_all(done, epoch, ctx, cfg)
    return mine + more


@triton.jit
def tell_all(flags, epoch, ctx, cfg):
    """Set `flags[my rank]` to `epoch` at every rank.

    Like signal.signal_all without its CTA barrier. Use it for what came before this kernel, or
    right after another signal: there the barrier would order nothing.
    """
    lane = tl.arange(0, triton.next_power_of_2(cfg.size))
    trace.begin(trace.SIGNAL, flags, epoch, trace.ALL, ctx, cfg.trace)
    # Releases that to the programs of all ranks that wait for these flags.
    signal._set_lanes(flags, lane, epoch, ctx, cfg.trace)


@triton.jit
def _fetch_tile(a, row, part, block, rank, away, cfg, shape):
    """Fetch part `part` of cfg.wide of the rows of cfg.wide blocks, all of one rank."""
    ROWS: tl.constexpr = shape.tile_m // cfg.wide
    COLS: tl.constexpr = shape.tile_k * cfg.wide
    if cfg.by_k:
        step, i, k = block // cfg.per_shard, row, block % cfg.per_shard
    else:
        per_peer = tl.cdiv(a.rows, shape.tile_m)
        step, i, k = row // per_peer, row % per_peer, block
    row, col = i * shape.tile_m + part * ROWS, k * shape.tile_k
    peer = (rank + 1 + step) % cfg.size
    there = tiles.of_rank(tiles.hinted(a, cfg.hint), peer, away)
    tile = tiles.load(there, row, col, ROWS, COLS)
    tiles.store(staged_part(a, step), row, col, tile)


@triton.jit
def staged_part(a, step):
    """Return the staged shard of the rank that is `step` + 1 after this one."""
    ptr = a.staged + tl.full((), 1, tl.int64) * step * a.apart
    return tiles.View(ptr, a.rows, a.cols, a.staged_row_stride, a.staged_col_stride)


@triton.jit
def arrived(flags, count, epoch, SCOPE: tl.constexpr, LANES: tl.constexpr):
    """Count the flags that are set, of `count`, up to the first that is not; at most LANES.

    Orders what the fetchers of those flags stored before all that this program does afterwards.
    """
    lane = tl.arange(0, LANES)
    zero = tl.zeros((LANES,), tl.int64)
    # Acquires what the fetchers of these flags stored.
    seen = tl.atomic_add(flags + lane, zero, mask=lane < count, sem="acquire", scope=SCOPE)
    late = tl.where((lane < count) & (seen < epoch), lane, tl.minimum(count, LANES))
    tl.debug_barrier()  # the lanes' acquires before all warps' loads
    return tl.min(late, 0)
