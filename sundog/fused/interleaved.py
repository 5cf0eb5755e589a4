"""Workers that fetch: with every block along K that it multiplies, a program moves a piece of A.

For `fetchers` 0 of hbm_buffer. A program of its own that copies is bound by what one SM's load and
store units move (measured: 36 to 40 GB/s, busy or idle), and they have nothing else to do while the
tensor cores work. A unit is what one flag stands for; program p has the units p, p + P, ... in the
order in which workers want them, and fetches one while it multiplies what has arrived.

Measured on 8 ranks of one GPU (M=4096, N=3584, K=8192): 2,822 us, as if all programs fetched first
(2,829 us); gather, then GEMM 2,616 us, GEMM alone 2,366 us. Pieces were asked for two blocks ahead,
1.3 us, which is less than the memory takes when eight products share it.

Whoever has to wait fetches its own units up to the one it waits for first: of all units that are
not there, the first one's program never waits, so there is no circle.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import context, local, proxy, tiles, trace
from . import fetching, gemm, working

__all__ = ["interleaved_kernel"]

_PER_TILE = tl.constexpr(2)  # units that are fetched with a tile which has all that it needs


@triton.jit
def interleaved_kernel(a, parts, b, out, to, bias, flags, ctx, F, S):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(flags.epochs + program) + 1
    point, mine, away = 0, program, tiles.distances(ctx, F.lanes)
    if program == 0:
        # My part of A is complete: what wrote it came before this kernel on the stream. The peers
        # read it only when they have seen this.
        point = trace.signal_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
    # The peers' A is complete.
    point = trace.wait_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
    rows, cols = working.grid(a, out, F, S)
    # Every program asks once too often, so this is what former calls have asked.
    before = (epoch - 1) * (rows * cols + programs)
    tile = gemm.ticket(flags.tickets) - before
    while tile < rows * cols:
        i, j = gemm.swizzle(tile.to(tl.int32), rows, cols, S.group_m)
        point, mine, acc = _product(
            point, mine, a, parts, b, i, j * S.tile_n, away, flags, epoch, ctx, F, S
        )
        working.emit(a, out, to, bias, acc, i, j * S.tile_n, ctx, F, S)
        tile = gemm.ticket(flags.tickets) - before
    point, mine = _fetch_up_to(point, mine, 1 << 30, a, away, flags, epoch, ctx, F, S)
    # My loads of the peers' A before the flags, and theirs, of programs with my number, of mine: it
    # is free when this kernel has ended.
    point = trace.barrier_ranks(
        point, flags.done + program * F.size, epoch, ctx, F.lanes, F.trace
    )  # fmt: skip
    trace.finish(point, ctx, F.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call, behind this one on the stream


@triton.jit
def _product(point, mine, a, parts, b, i, col, away, flags, epoch, ctx, F, S):
    """An output tile, of row of tiles `i`; and the next unit that this program has to fetch."""
    STEPS: tl.constexpr = S.tile_m // F.rows
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    rows, _, groups = fetching.remote(a, F, S)
    row, here, total, wanted = working.needs(a, i, F, S)
    acc = tl.zeros((S.tile_m, S.tile_n), tl.float32)
    end, fetched = 0, 0
    while end < total:
        begin, group = end, tl.maximum(end - here, 0) // F.per_flag
        first = flags.staged + row * groups + group
        group += fetching.arrived(first, wanted - group, epoch, working.LANES)
        end = tl.minimum(here + group * F.per_flag, total)
        if end == begin:
            last = fetching.unit_of(row, group, rows, groups, S)
            point, mine = _fetch_up_to(point, mine, last, a, away, flags, epoch, ctx, F, S)
            point = trace.begin(point, trace.WAIT, first, epoch, rank, ctx, F.trace)
            # The stores of whoever fetched it before my loads of what this flag stands for.
            local.wait(first, epoch, ctx)
            point = trace.end(point, trace.WAIT, first, epoch, rank, ctx, F.trace)
            end = tl.minimum(begin + F.per_flag, total)
        if S.a_kind != "view":
            proxy.fence()  # and before those by descriptor
        point = trace.begin(point, trace.COMPUTE, i, 0, rank, ctx, F.trace)
        if (mine < rows * groups) & ((end < total) | (fetched < _PER_TILE)):
            if S.a_kind == "view":  # own and staged blocks have a loop each: one after the other
                point, mine = _fetch_up_to(point, mine, mine, a, away, flags, epoch, ctx, F, S)
                acc = working.multiply(acc, a, parts, b, i, col, begin, end, rank, F, S)
            else:
                end = tl.minimum(end, begin + STEPS)
                acc = _multiply(acc, mine, a, parts, b, i, col, begin, end, rank, away, F, S)
                point = _publish(point, mine, rows, groups, rank, flags, epoch, ctx, F, S)
                mine += tl.num_programs(0)
            fetched += 1
        else:
            acc = working.multiply(acc, a, parts, b, i, col, begin, end, rank, F, S)
        point = trace.end(point, trace.COMPUTE, i, 0, rank, ctx, F.trace)
    return point, mine, acc


@triton.jit
def _multiply(acc, unit, a, parts, b, i, col, begin, end, rank, away, F, S):
    """acc + A @ B, blocks `begin` to `end`; with each, a piece of the unit is stored that was
    loaded three blocks before."""
    STEPS: tl.constexpr = S.tile_m // F.rows
    there, place, row, k = fetching.unit_at(a, unit, rank, away, F, S)
    for block in tl.range(begin, end, num_stages=F.loop_stages):
        x, y = working.blocks(a, parts, b, i, block, col, rank, F, S)
        piece = _piece(there, row, k, block - begin, F, S)
        acc = tl.dot(x, y, acc, input_precision="ieee")
        _put(place, row, k, block - begin, piece, F, S)
    for n in range(end - begin, STEPS):
        _put(place, row, k, n, _piece(there, row, k, n, F, S), F, S)
    return acc


@triton.jit
def _piece(there, row, k, n, F, S):
    """Piece `n` of a unit, of its rows from `row` on; behind the last one nothing is loaded."""
    COLS: tl.constexpr = F.per_flag * S.tile_k
    at = tl.where(n * F.rows < S.tile_m, row + n * F.rows, there.rows)
    return tiles.load(there, at, k, F.rows, COLS)


@triton.jit
def _put(place, row, k, n, piece, F, S):
    at = tl.where(n * F.rows < S.tile_m, row + n * F.rows, place.rows)
    tiles.store(place, at, k, piece)


@triton.jit
def _fetch_up_to(point, mine, last, a, away, flags, epoch, ctx, F, S):
    """Fetch this program's units up to `last`, and do nothing else."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    rows, _, groups = fetching.remote(a, F, S)
    while mine <= tl.minimum(last, rows * groups - 1):
        there, place, row, k = fetching.unit_at(a, mine, rank, away, F, S)
        point = trace.begin(point, trace.FETCH, mine, 0, rank, ctx, F.trace)
        for n in tl.range(0, S.tile_m // F.rows, num_stages=F.ahead):
            _put(place, row, k, n, _piece(there, row, k, n, F, S), F, S)
        point = trace.end(point, trace.FETCH, mine, 0, rank, ctx, F.trace)
        point = _publish(point, mine, rows, groups, rank, flags, epoch, ctx, F, S)
        mine += tl.num_programs(0)
    return point, mine


@triton.jit
def _publish(point, unit, rows, groups, rank, flags, epoch, ctx, F, S):
    """A unit, stored by all warps, before the flag: workers wait for it."""
    row, group = gemm.swizzle(unit, rows, groups, S.group_m)
    flag = flags.staged + row * groups + group
    point = trace.begin(point, trace.SIGNAL, flag, epoch, rank, ctx, F.trace)
    local.signal(flag, epoch, ctx)
    return point
