"""Workers that carry: while it multiplies a tile, a program copies a unit of A.

For `carry` > 0 of hbm_buffer. With every `carry` blocks along K a small piece is loaded into
registers, and stored when the next one is: it has long arrived then, and no program is given away
for copying. A unit, for which a flag stands, is a part of a row of tiles, of one peer; program p
has the units p, p + P, ... in the order in which workers want them. It tells what it has stored
before the next tile, since a loop with a barrier in it would not be pipelined.

Before a tile a program makes sure of its own units up to the last that the tile needs: so the first
band of rows is fetched, by all programs at once, and so there is no circle, since of all units that
are not there the first one's program never waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import context, local, tiles, trace
from . import fetching, gemm, working

__all__ = ["work"]


@triton.jit
def work(point, a, parts, b, out, to, bias, flags, epoch, ctx, F, S):
    """Compute output tiles from the queue, and fetch. The next trace point, and units fetched."""
    program, away = tl.program_id(0), tiles.distances(ctx, F.lanes)
    rows, cols = working.grid(a, out, F, S)
    far, _, groups = fetching.remote(a, F, S)
    mine = tl.maximum(tl.cdiv(far * groups - program, tl.num_programs(0)), 0)
    # The peers' A is complete, as program 0 of each of them says.
    point = trace.wait_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
    stored, told = 0, 0  # of its units
    before = (epoch - 1) * (rows * cols + tl.num_programs(0))  # as in `working.work`
    tile = gemm.ticket(flags.tickets) - before
    while tile < rows * cols:
        i, j = gemm.swizzle(tile.to(tl.int32), rows, cols, S.group_m)
        row, _, _, wanted = working.needs(a, i, F, S)
        last = tl.where(wanted > 0, _unit_of(row, groups - 1, far, groups, S), -1)
        point, stored = _fetch_up_to(point, last, stored, a, away, ctx, F, S)
        point, told = _tell(point, told, stored, a, flags, epoch, ctx, F, S)
        point, acc = _product(
            point, stored, mine, a, parts, b, i, j * S.tile_n, away, flags, epoch, ctx, F, S
        )
        if F.piece_rows > 0:
            stored = tl.minimum(stored + 1, mine)
        tile = gemm.ticket(flags.tickets) - before  # the answer comes while this one is written
        working.emit(a, out, to, bias, acc, i, j * S.tile_n, ctx, F, S)
    point, stored = _fetch_up_to(point, far * groups - 1, stored, a, away, ctx, F, S)
    point, told = _tell(point, told, stored, a, flags, epoch, ctx, F, S)
    if mine > 0:
        # My loads of the peers' A before the flags: they may overwrite it when their kernel, which
        # waits for this, has ended.
        done = flags.done + program * F.size
        point = trace.signal_all(point, done, epoch, ctx, F.lanes, F.trace)
    return point, mine


@triton.jit
def _product(point, unit, mine, a, parts, b, i, col, away, flags, epoch, ctx, F, S):
    """An output tile, of row of tiles `i`; meanwhile this program's unit `unit` is copied."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    _, _, total, _ = working.needs(a, i, F, S)
    acc = tl.zeros((S.tile_m, S.tile_n), tl.float32)
    end = 0
    if F.piece_rows > 0:
        PIECES: tl.constexpr = S.tile_m // F.piece_rows
        source, apart_there, place, apart = _ends(a, unit, rank, away, F, S)
        piece = tl.zeros(place.shape, place.dtype.element_ty)
    while end < total:
        begin = end
        point, end = working.available(point, a, i, begin, flags, epoch, ctx, F, S)
        point = trace.begin(point, trace.COMPUTE, i, 0, rank, ctx, F.trace)
        if F.piece_rows > 0:
            for block in tl.range(begin, end):
                x, y = working.blocks(a, parts, b, i, block, col, rank, F, S)
                acc = tl.dot(x, y, acc, input_precision="ieee")
                n = block // F.carry
                if (block % F.carry == 0) & (n < PIECES) & (unit < mine):
                    tl.store(place + (n - 1) * apart, piece, mask=n > 0)
                    piece = tl.load(source + n * apart_there)
        else:
            acc = working.multiply(acc, a, parts, b, i, col, begin, end, rank, F, S)
        point = trace.end(point, trace.COMPUTE, i, 0, rank, ctx, F.trace)
    if F.piece_rows > 0:
        tl.store(place + (PIECES - 1) * apart, piece, mask=unit < mine)
    return point, acc


@triton.jit
def _fetch_up_to(point, last, stored, a, away, ctx, F, S):
    """Copy this program's units up to number `last` of all, as far as it has not."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    end = tl.maximum(last - program + programs, 0) // programs
    if stored < end:
        ROWS: tl.constexpr = S.tile_m // F.wide
        COLS: tl.constexpr = S.tile_k * F.wide // F.per_word
        point = trace.begin(point, trace.FETCH, last, 0, rank, ctx, F.trace)
        for n in tl.range(stored * F.per_flag, end * F.per_flag, num_stages=F.ahead):
            there, here, row, col = _place(a, n, rank, away, F, S)
            tiles.store(here, row, col, tiles.load(there, row, col, ROWS, COLS))
        point = trace.end(point, trace.FETCH, last, 0, rank, ctx, F.trace)
    return point, tl.maximum(stored, end)


@triton.jit
def _tell(point, told, stored, a, flags, epoch, ctx, F, S):
    """Set the flags of what was stored."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    rows, _, groups = fetching.remote(a, F, S)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for n in range(told, stored):
        row, group = gemm.swizzle(program + n * programs, rows, groups, S.group_m)
        # The unit, stored by all warps, before the flag: workers wait for it.
        flag = flags.staged + row * groups + group
        point = trace.begin(point, trace.SIGNAL, flag, epoch, rank, ctx, F.trace)
        local.signal(flag, epoch, ctx)
    return point, stored


@triton.jit
def _unit_of(row, group, rows, groups, S):
    """The number of a unit: the other way round than `swizzle`."""
    first = row // S.group_m * S.group_m
    height = tl.minimum(rows - first, S.group_m)
    return first * groups + group * height + row - first


@triton.jit
def _ends(a, unit, rank, away, F, S):
    """Pointers to the first piece of a unit, there and here, and how far apart pieces are."""
    COLS: tl.constexpr = F.per_flag * S.tile_k // F.per_word
    there, here, row, col = _place(a, unit * F.per_flag, rank, away, F, S)
    source = tiles.at(there, row, col, F.piece_rows, COLS)
    place = tiles.at(here, row, col, F.piece_rows, COLS)
    rows = tl.full((), F.piece_rows, tl.int64)
    return source, rows * there.row_stride, place, rows * here.row_stride


@triton.jit
def _place(a, n, rank, away, F, S):
    """Tile `n` of those that this program copies: the peer's matrix, the staged one, row, column.

    It has F.wide blocks and as many times fewer rows than a tile: long rows suit the memory.
    """
    rows, _, groups = fetching.remote(a, F, S)
    unit = tl.program_id(0) + n // F.per_flag * tl.num_programs(0)
    row, group = gemm.swizzle(tl.minimum(unit, rows * groups - 1), rows, groups, S.group_m)
    step = group * F.per_flag + n % F.per_flag
    part, k = step % F.wide, step // F.wide * F.wide
    if F.by_k:
        shard, i, k = k // F.per_shard, row, k % F.per_shard
    else:
        per_peer = tl.cdiv(a.rows, S.tile_m)
        shard, i = row // per_peer, row % per_peer
    here = fetching.staged_part(a, shard)
    if F.per_word > 1:
        there, here = _words(a, F), _words(here, F)
    else:
        there = tiles.hinted(a, F.hint)
    there = tiles.of_rank(there, (rank + 1 + shard) % F.size, away)
    return there, here, i * S.tile_m + part * (S.tile_m // F.wide), k * S.tile_k // F.per_word


@triton.jit
def _words(matrix, F):
    """Rows as words of 32 bits: values of 16 would be sorted into registers, and so waited for,
    where they are loaded."""
    MANY: tl.constexpr = F.hint[1]
    WORDS: tl.constexpr = F.hint[1] // F.per_word
    ptr = matrix.ptr.to(tl.pointer_type(tl.int32))
    cols, stride = matrix.cols // MANY * WORDS, matrix.row_stride // MANY * WORDS
    return tiles.View(ptr, matrix.rows, cols, stride, 1)
