"""All-reduce and RMSNorm, two shots, with the norm after them: ranks own slices of the columns.

Rank r adds its slice of every row, and stores the new residual's slice to all ranks, with its
measures: the level and the sum of squares of each group. Then every rank normalises whole rows,
from its own memory. So each byte crosses once each way, as in all_reduce.two_shot, whereas two_shot
sends every output. But each rank normalises all rows, and ranks that share a GPU share its memory.

Token t belongs to the programs with number t % programs. Two barriers of these programs, one before
each shot, suffice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..collectives import _reduce
from ..device import context, signal, trace
from ..ops.op import Plan, agree, barrier_flags
from . import _rms_norm
from .all_reduce_rms_norm import (
    OP,
    Config,
    Problem,
    cases,
    cost,
    default,
    inputs,
    planned,
    programs_of,
    reference,
    space,
    valid,
)

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("x", "out")
_MOST_WARPS = 16
_LEAST_TILE = 256  # elements: whole groups
_LEVEL = tl.constexpr(32)  # bit where a measure's level begins, above the sum


def _warps(hidden: int) -> int:
    """Choose the warps, by the size of a row alone: 32 elements of it for each thread, or more."""
    return int(min(max(triton.next_power_of_2(hidden) // 1024, 1), _MOST_WARPS))


def _tile(problem: Problem, warps: int) -> int:
    """Count the elements that are added at once: a thread has 16 bytes of each rank in flight."""
    return max(warps * _reduce.warp_bytes() // problem.dtype.itemsize, _LEAST_TILE)


def _slice(problem: Problem) -> int:
    """Count a rank's columns: whole groups. The last ranks may have fewer, or none."""
    group = _rms_norm.GROUP.value
    return int(triton.cdiv(triton.cdiv(problem.hidden, problem.size), group) * group)


@triton.jit
def _two_shot_sliced_kernel(
    x, given, out, measures, ready, done, epochs, ctx, tokens, cfg,
    SLICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = triton.next_power_of_2(SLICE)
    # A tile has slices of several rows, or a slice has several tiles.
    ROWS: tl.constexpr = TILE // WIDE if TILE > WIDE else 1
    PIECES: tl.constexpr = WIDE // TILE if TILE < WIDE else 1
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(epochs + program) + 1
    xs = _reduce.everywhere(x, 0, ctx, cfg.size)
    sums = _reduce.everywhere(out.residual, rank, ctx, cfg.size)  # each rank begins elsewhere
    tables = _reduce.everywhere(measures, rank, ctx, cfg.size)
    # My x is written, since all earlier work on the stream has ended; and nobody here reads my out
    # or my measures: the last call's programs, which did, have ended too. The peers' programs with
    # this number read my x, and store to the other two, only after this barrier.
    signal.barrier_ranks(ready + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, cfg.trace)
    for token in range(program, tokens, programs * ROWS):
        for piece in range(PIECES):
            _add_tile(xs, sums, tables, given, token, piece * TILE, rank, tokens, cfg, SLICE, TILE)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, cfg.trace)
    # My loads of the peers' x, which they may overwrite once this kernel of theirs has ended, and
    # my stores to them, before the flags: their programs with this number read what I stored. Their
    # stores before my loads, of this rank's copies alone.
    signal.signal_all(done + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    weights = _rms_norm.fetch_row(given.weight, program * 0, 1, 0, cfg)  # while the flags cross
    signal.wait_all(done + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    trace.begin(trace.COMPUTE, program, 0, trace.ALL, ctx, cfg.trace)
    for token in range(program, tokens, programs):
        # All loads first: the threads exchange what they know of the measures while the row comes.
        words = _fetch_measures(measures, token, cfg)
        added = _rms_norm.fetch_row(out.residual, token, tokens, 0, cfg)
        level, total = _joined(words, cfg)
        to = _rms_norm.here(out)
        _rms_norm.finish_row(added, weights, level, total, token, 0, to, given, cfg, 1)
        # Again, since the compiler would convert what stays the same before it loads a row.
        left = tokens - token - programs
        weights = _rms_norm.fetch_row(given.weight, program * 0, left, 0, cfg)
    trace.end(trace.COMPUTE, program, 0, trace.ALL, ctx, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _add_tile(
    xs, sums, tables, given, token, start, rank, tokens, cfg,
    SLICE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add my slices of this program's rows from `token` on, or that row's from `start` on.

    Store the new residual, and what was measured of its groups, at all ranks.
    """
    GROUPS: tl.constexpr = triton.cdiv(cfg.hidden, _rms_norm.GROUP)
    lane = tl.arange(0, TILE)
    row, column, inside = _place(token, start, lane, rank, tokens, cfg, SLICE)
    at = row.to(tl.int64) * cfg.hidden + column
    added = _rms_norm.add_part(xs, 0, at, column, inside, given, cfg, TOGETHER=True)
    for n in tl.static_range(cfg.size):
        tl.store(sums[n] + at, added, mask=inside)
    level, squares = _rms_norm.measure(added, cfg)
    word = (level.to(tl.int64) << _LEVEL) | squares
    lane = tl.arange(0, TILE // _rms_norm.GROUP) * _rms_norm.GROUP
    row, column, inside = _place(token, start, lane, rank, tokens, cfg, SLICE)
    at = row.to(tl.int64) * GROUPS + column // _rms_norm.GROUP
    for n in tl.static_range(cfg.size):
        tl.store(tables[n] + at, word, mask=inside)


@triton.jit
def _place(token, start, lane, rank, tokens, cfg, SLICE: tl.constexpr):
    """Return rows and columns of a tile's elements, and which of them exist.

    A slice takes a power of two of them: a division by another number would delay the loads.
    """
    WIDE: tl.constexpr = triton.next_power_of_2(SLICE)
    row = token + lane // WIDE * tl.num_programs(0)
    column = start + lane % WIDE  # of my slice
    inside = (row < tokens) & (column < tl.minimum(SLICE, cfg.hidden - rank * SLICE))
    return row, rank * SLICE + column, inside


@triton.jit
def _fetch_measures(measures, token, cfg):
    """Load what was measured of a row's groups."""
    GROUPS: tl.constexpr = triton.cdiv(cfg.hidden, _rms_norm.GROUP)
    group = tl.arange(0, triton.next_power_of_2(GROUPS))
    at = token.to(tl.int64) * GROUPS + group
    return tl.load(measures + at, mask=group < GROUPS, other=0)


@triton.jit
def _joined(words, cfg):
    """Return the level of a row and the sum of its squares, from its groups' words."""
    return _rms_norm.join(((words >> _LEVEL).to(tl.int32),), (words.to(tl.int32),), cfg)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate measures and flags. The plan takes a symmetric x and out; the others may be any."""
    agree(world, f"{OP}.two_shot_sliced", problem, config, valid(problem, config))
    programs, warps = programs_of(config, problem.tokens), _warps(problem.hidden)
    groups = triton.cdiv(problem.hidden, _rms_norm.GROUP.value)
    measures = world.empty((problem.tokens, groups), torch.int64, f"{OP}.measures")
    flags = barrier_flags(world, OP, programs, "ready", "done")
    tile = _tile(problem, warps)
    block = tile * problem.dtype.itemsize if problem.quant else tile  # FP8 too is 16 bytes a thread
    return planned(
        world, problem, config, _two_shot_sliced_kernel, programs, (measures, *flags),
        block=block, num_warps=warps, SLICE=_slice(problem), TILE=tile,
    )  # fmt: skip
