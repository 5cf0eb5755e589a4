"""Workers that carry: with every few blocks that it multiplies, a program copies a piece of A.

For `carry` > 0 of hbm_buffer. A piece is loaded into registers in the loop over K and stored
`carry` blocks later, when it has long arrived: no program, and no time of a tensor core, is given
away for copying. The unit that a flag stands for is `k_per_flag` pieces; program p has the units p,
p + P, ... in the order in which workers want them. It tells what it has stored between two tiles,
since a loop with a barrier in it would not be pipelined.

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
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    rows, cols = working.grid(a, out, F, S)
    far, _, groups = fetching.remote(a, F, S)
    mine = tl.maximum(tl.cdiv(far * groups - program, tl.num_programs(0)), 0)
    # The peers' A is complete, as program 0 of each of them says.
    point = trace.wait_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
    # `next` is the piece to load next; the one before it is in registers. `told`: flags set.
    piece, next, told = _load(a, 0, rank, away, F, S), 1, 0
    before = (epoch - 1) * (rows * cols + tl.num_programs(0))  # as in `working.work`
    tile = gemm.ticket(flags.tickets) - before
    while tile < rows * cols:
        i, j = gemm.swizzle(tile.to(tl.int32), rows, cols, S.group_m)
        row, _, _, wanted = working.needs(a, i, F, S)
        last = tl.where(wanted > 0, _unit_of(row, groups - 1, far, groups, S), -1)
        point, piece, next, told = _fetch_up_to(
            point, last, piece, next, told, a, rank, away, flags, epoch, ctx, F, S
        )
        point, acc, piece, next = _product(
            point, piece, next, mine, a, parts, b, i, j * S.tile_n, away, flags, epoch, ctx, F, S
        )
        working.emit(a, out, to, bias, acc, i, j * S.tile_n, ctx, F, S)
        point, told = _tell(point, told, next - 1, a, rank, flags, epoch, ctx, F, S)
        tile = gemm.ticket(flags.tickets) - before
    point, piece, next, told = _fetch_up_to(
        point, far * groups - 1, piece, next, told, a, rank, away, flags, epoch, ctx, F, S
    )
    if mine > 0:
        # My loads of the peers' A before the flags: they may overwrite it when their kernel, which
        # waits for this, has ended.
        done = flags.done + program * F.size
        point = trace.signal_all(point, done, epoch, ctx, F.lanes, F.trace)
    return point, mine


@triton.jit
def _product(point, piece, next, mine, a, parts, b, i, col, away, flags, epoch, ctx, F, S):
    """An output tile, of row of tiles `i`; and which piece is on its way then."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    _, _, total, _ = working.needs(a, i, F, S)
    acc = tl.zeros((S.tile_m, S.tile_n), tl.float32)
    end = 0
    while end < total:
        begin = end
        point, end = working.available(point, a, i, begin, flags, epoch, ctx, F, S)
        point = trace.begin(point, trace.COMPUTE, i, 0, rank, ctx, F.trace)
        if S.a_kind == "view":  # two loops: what is missing is fetched before the next tile
            acc = working.multiply(acc, a, parts, b, i, col, begin, end, rank, F, S)
        else:
            for block in tl.range(begin, end):
                x, y = working.blocks(a, parts, b, i, block, col, rank, F, S)
                acc = tl.dot(x, y, acc, input_precision="ieee")
                if (block % F.carry == 0) & (next <= mine * F.per_flag):
                    _store(piece, a, next - 1, F, S)
                    piece = _load(a, next, rank, away, F, S)
                    next += 1
        point = trace.end(point, trace.COMPUTE, i, 0, rank, ctx, F.trace)
    return point, acc, piece, next


@triton.jit
def _fetch_up_to(point, last, piece, next, told, a, rank, away, flags, epoch, ctx, F, S):
    """Fetch this program's units up to `last`, as far as it has not, and do nothing else."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    end = tl.maximum(last - program + programs, 0) // programs * F.per_flag
    if next <= end:
        point = trace.begin(point, trace.FETCH, last, 0, rank, ctx, F.trace)
        _store(piece, a, next - 1, F, S)
        for n in tl.range(next, end, num_stages=F.ahead):
            _store(_load(a, n, rank, away, F, S), a, n, F, S)
        piece, next = _load(a, end, rank, away, F, S), end + 1
        point = trace.end(point, trace.FETCH, last, 0, rank, ctx, F.trace)
    point, told = _tell(point, told, next - 1, a, rank, flags, epoch, ctx, F, S)
    return point, piece, next, told


@triton.jit
def _tell(point, told, stored, a, rank, flags, epoch, ctx, F, S):
    """Set the flags of the units of which all pieces are stored."""
    rows, _, groups = fetching.remote(a, F, S)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for n in range(told, stored // F.per_flag):
        row, group = gemm.swizzle(program + n * programs, rows, groups, S.group_m)
        # The unit's pieces, stored by all warps, before the flag: workers wait for it.
        flag = flags.staged + row * groups + group
        point = trace.begin(point, trace.SIGNAL, flag, epoch, rank, ctx, F.trace)
        local.signal(flag, epoch, ctx)
    return point, tl.maximum(told, stored // F.per_flag)


@triton.jit
def _unit_of(row, group, rows, groups, S):
    """The number of a unit: the other way round than `swizzle`."""
    first = row // S.group_m * S.group_m
    height = tl.minimum(rows - first, S.group_m)
    return first * groups + group * height + row - first


@triton.jit
def _load(a, n, rank, away, F, S):
    """This program's piece `n`, of which nothing is loaded that lies outside of A."""
    shard, row, col = _place(a, n, F, S)
    matrix = tiles.hinted(a, F.hint) if F.per_word == 1 else _words(a, F)
    there = tiles.of_rank(matrix, (rank + 1 + shard) % F.size, away)
    return tiles.load(there, row, col, S.tile_m // F.wide, S.tile_k * F.wide // F.per_word)


@triton.jit
def _store(piece, a, n, F, S):
    shard, row, col = _place(a, n, F, S)
    matrix = fetching.staged_part(a, shard)
    tiles.store(matrix if F.per_word == 1 else _words(matrix, F), row, col, piece)


@triton.jit
def _place(a, n, F, S):
    """Where this program's piece `n` is: shard, row, and column in words; behind A if it has none.

    A piece has F.wide blocks and as many times fewer rows than a tile: long rows suit the memory.
    """
    ROWS: tl.constexpr = S.tile_m // F.wide
    rows, blocks, groups = fetching.remote(a, F, S)
    unit = tl.program_id(0) + n // F.per_flag * tl.num_programs(0)
    row, group = gemm.swizzle(tl.minimum(unit, rows * groups - 1), rows, groups, S.group_m)
    step = group * F.per_flag + n % F.per_flag
    part, k = step % F.wide, step // F.wide * F.wide
    if F.by_k:
        shard, i, k = k // F.per_shard, row, k % F.per_shard
    else:
        per_peer = tl.cdiv(a.rows, S.tile_m)
        shard, i = row // per_peer, row % per_peer
    there_is = (unit < rows * groups) & (step < blocks)
    first = tl.where(there_is, i * S.tile_m + part * ROWS, a.rows)
    return tl.where(there_is, shard, 0), first, k * S.tile_k // F.per_word


@triton.jit
def _words(matrix, F):
    """Rows as words of 32 bits: values of 16 would be sorted into registers, and so waited for,
    where they are loaded."""
    MANY: tl.constexpr = F.hint[1]
    WORDS: tl.constexpr = F.hint[1] // F.per_word
    ptr = matrix.ptr.to(tl.pointer_type(tl.int32))
    cols, stride = matrix.cols // MANY * WORDS, matrix.row_stride // MANY * WORDS
    return tiles.View(ptr, matrix.rows, cols, stride, 1)
