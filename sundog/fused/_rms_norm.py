"""What the algorithms of all_reduce_rms_norm share: RMSNorm of rows, and FP8 scales. A program
holds its parts of a row in registers, as a tuple of tiles.

The order in which `tl.sum` adds depends on warps, block and layout, which the compiler chooses for
each kernel. So squares are added as integers, whose sum does not depend on the order: first in each
group of 128 columns, in units of 2^-22 of the group's largest power of two, squared; then over the
row, in units of 2^-44 of the row's. Any program can measure a group, so several may share a row.
Divisions and the root are those of IEEE 754. So a row's bits are the same wherever it is computed,
also in torch, by _rms_norm_reference.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..collectives import _reduce
from . import _gemm

PROGRAMS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # that a tuner may try
GROUP = tl.constexpr(128)  # columns whose squares are added together, and that share an FP8 scale
UNIT = tl.constexpr(2.0**20)  # of a group's sum of squares, each below 16: 128 are below 2^31
FINER = tl.constexpr(22)  # bits by which a row's unit is finer: 512 groups are below 2^63
ROW_UNIT = tl.constexpr(2.0**42)
INFINITE = tl.constexpr(255 << 23)  # bits; those of a NaN are more
# The level of numbers is the exponent of the largest, as float32 stores it; a NaN has one that no
# number has.
TOO_LARGE = tl.constexpr(255)
NO_NUMBER = tl.constexpr(256)
HALF = tl.constexpr(16)  # bits of each half of a group's sum
LOWER = tl.constexpr((1 << 16) - 1)
LEAST_SCALE = tl.constexpr(2.0**-100)  # of rows of zeros
_LEAST_BLOCK, _LARGEST_BLOCK = 256, 4096  # both halves of the least are whole groups
MANTISSA = tl.constexpr(23)


class Given(NamedTuple):
    """The inputs that are the same on all ranks; None for one that is missing."""

    residual: Any
    weight: Any
    bias: Any
    scale: Any


class Outputs(NamedTuple):
    """Rows in x's dtype, rows in FP8 and their scales; None for one that is missing."""

    normed: Any
    residual: Any
    quantised: Any
    scales: Any


class RowConstants(NamedTuple):
    """The constants that a kernel is compiled for, as one argument."""

    hidden: tl.constexpr
    block: tl.constexpr  # elements of a part, a power of two
    parts: tl.constexpr  # that a program has of a row
    stride: tl.constexpr  # columns from one of its parts to the next
    eps: tl.constexpr
    most: tl.constexpr  # exponent, as float32 has it, of the power that scales the smallest rows
    gemma: tl.constexpr
    quant: tl.constexpr  # what an FP8 scale is for; "": no FP8
    normed: tl.constexpr  # rows in x's dtype are wanted
    groups: tl.constexpr  # FP8 scales of a row
    limit: tl.constexpr  # the largest number of FP8
    size: tl.constexpr  # ranks
    trace: tl.constexpr


def block_of(hidden: int) -> int:
    """Count a part's elements. They and the warps depend on the size of a row alone.

    All ranks' loads of a part are in flight at once: with 8 ranks and 4096 elements they take 64
    registers of a thread. A row of 7168 in one part would spill.
    """
    return min(max(triton.next_power_of_2(hidden), _LEAST_BLOCK), _LARGEST_BLOCK)


def warps_of(hidden: int) -> int:
    """Choose the warps: 8 elements per thread for short rows, 16 for long ones."""
    return min(max(block_of(hidden) // (32 * 8), 1), 8)


def constants(problem: Any, block: int, trace: Any, stride: int = 0) -> RowConstants:
    """Return the constants for parts of `block` elements, `stride` columns apart."""
    stride = stride or block
    return _gemm.constants(
        RowConstants, hidden=problem.hidden, block=block, stride=stride,
        parts=triton.cdiv(problem.hidden, stride), eps=problem.eps,
        most=most_exponent(problem.eps), gemma=problem.gemma,
        quant=problem.quant, normed=not problem.quant or problem.both,
        groups=problem.groups, limit=float(torch.finfo(problem.fp8).max), size=problem.size,
        trace=trace,
    )  # fmt: skip


def most_exponent(eps: float) -> int:
    """Bound the power of two that scales a row, so that eps times its square is a float32.

    The squares of smaller rows are nothing beside eps.
    """
    return min(127 + (126 - math.frexp(eps)[1]) // 2, 254) if eps else 254


def given(problem: Any, tensors: tuple[torch.Tensor, ...]) -> Given:
    """Return residual, weight, and then bias and scale where the problem has them."""
    residual, weight, *rest = tensors
    bias = rest.pop(0) if problem.has_bias else None
    return Given(residual, weight, bias, rest[0] if problem.is_static else None)


@triton.jit
def here(out):
    """Return this rank's outputs, as `finish_row` takes them."""
    normed, quantised, scales = _others(out)
    return ((normed,), (out.residual,), (quantised,), (scales,))


@triton.jit
def there(out, first, ctx, SIZE: tl.constexpr):
    """Return every rank's outputs, from rank `first` on: each rank begins with a different peer."""
    normed, quantised, scales = _others(out)
    return (
        _reduce.everywhere(normed, first, ctx, SIZE),
        _reduce.everywhere(out.residual, first, ctx, SIZE),
        _reduce.everywhere(quantised, first, ctx, SIZE),
        _reduce.everywhere(scales, first, ctx, SIZE),
    )


@triton.jit
def _others(out):
    """Return the outputs beside the residual, which stands in for one that is missing: Triton 3.6
    returns no None. The constants say which there are.
    """
    normed = out.residual if out.normed is None else out.normed
    quantised = out.residual if out.quantised is None else out.quantised
    scales = out.residual if out.scales is None else out.scales
    return normed, quantised, scales


@triton.jit
def fetch_row(rows, token, tokens, first, cfg):
    """Load parts of a row, from column `first` on; zeros for a row after the last."""
    parts = ()
    for n in tl.static_range(cfg.parts):
        column = first + n * cfg.stride + tl.arange(0, cfg.block)
        at = token.to(tl.int64) * cfg.hidden + column
        mask = (column < cfg.hidden) & (token < tokens)
        parts = parts + (tl.load(rows + at, mask=mask, other=0.0),)
    return parts


@triton.jit
def add_row(rows, skip, token, given, cfg):
    """Add a new residual's parts: a sum over ranks, in their order, plus bias, plus the old one.

    `skip`: elements before the first row, at every rank.
    """
    parts = ()
    for n in tl.static_range(cfg.parts):
        column = n * cfg.stride + tl.arange(0, cfg.block)
        inside = column < cfg.hidden
        at = token.to(tl.int64) * cfg.hidden + column
        parts = parts + (add_part(rows, skip, at, column, inside, given, cfg),)
    return parts


@triton.jit
def add_part(rows, skip, at, column, inside, given, cfg, TOGETHER: tl.constexpr = False):
    """Add elements `at` of the new residual, zeros outside the mask.

    TOGETHER: use none before all are loaded. It takes instructions, and pays where a thread has one
    load of each rank: ptxas has only four of those in flight, and goes on when the first arrive.
    """
    # All loads first, to be in flight together.
    residual = tl.load(given.residual + at, mask=inside, other=0.0)
    tiles = ()
    for peer in tl.static_range(cfg.size):
        tiles = tiles + (tl.load(rows[peer] + skip + at, mask=inside),)  # type: ignore[assignment]
    total = _reduce.widen(tiles[0])  # type: ignore[misc]
    if TOGETHER:
        total = _after_all(total, residual, tiles, column >= 0)
    for peer in tl.static_range(1, cfg.size):
        total = _reduce.combine(total, _reduce.widen(tiles[peer]), "sum")
    part = add(total.to(residual.dtype), residual, given.bias, column, cfg)
    return tl.where(inside, part, 0.0).to(part.dtype)


@triton.jit
def _after_all(first, residual, tiles, always):
    """Return the first tile. `always` is true, but the compiler must take all tiles into account,
    which are loaded by then.
    """
    mixed = _reduce.widen(residual).to(tl.int32, bitcast=True)
    for n in tl.static_range(1, len(tiles)):
        mixed = mixed ^ _reduce.widen(tiles[n]).to(tl.int32, bitcast=True)
    return tl.where(always, first, mixed.to(tl.float32, bitcast=True))


@triton.jit
def add(total, residual, bias, column, cfg):
    """Add elements of a sum, bias and residual like torch: rounded to the dtype after each."""
    if bias is not None:
        more = tl.load(bias + column, mask=column < cfg.hidden, other=0.0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(total.dtype)
    return (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)


@triton.jit
def finish_whole(added, token, to, given, cfg, RANKS: tl.constexpr):
    """Finish a row of the new residual that this program has whole."""
    # Now, so that they come while the threads exchange what they have of the row.
    weights = fetch_row(given.weight, token * 0, 1, 0, cfg)
    store_row(added, token, 0, to[1], cfg, RANKS)
    levels, sums = (), ()
    for n in tl.static_range(cfg.parts):
        level, total = measure(added[n], cfg)
        levels, sums = levels + (level,), sums + (total,)  # type: ignore[assignment]
    level, total = join(levels, sums, cfg)
    finish_row(added, weights, level, total, token, 0, to, given, cfg, RANKS)


@triton.jit
def measure(part, cfg):
    """Return the level of each group of a part, and the sum of its squares."""
    GROUPS: tl.constexpr = part.shape[0] // GROUP
    grouped = tl.reshape(part.to(tl.float32), (GROUPS, GROUP))
    peak = tl.max(_absolute(grouped), 1)
    level = tl.where(peak > INFINITE, NO_NUMBER, peak >> MANTISSA)
    scaled = grouped * tl.broadcast_to(_power_of(level, cfg)[:, None], grouped.shape)
    is_number = tl.broadcast_to((level < TOO_LARGE)[:, None], grouped.shape)
    # Rounded. A product by a power of two is exact, so a fused addition has the same bits.
    squares = tl.where(is_number, scaled * scaled * UNIT + 0.5, 0.0)
    return level, tl.sum(squares.to(tl.int32), 1)


@triton.jit
def join(levels, sums, cfg):
    """Return the level of a row and the sum of its squares, from those of its groups.

    Tiles are joined element by element before the threads exchange what they have.
    """
    highest = levels[0]
    for n in tl.static_range(1, len(levels)):
        highest = tl.maximum(highest, levels[n])
    level = tl.max(highest, 0)
    total = _lowered(levels[0], sums[0], level, cfg)
    for n in tl.static_range(1, len(levels)):
        total += _lowered(levels[n], sums[n], level, cfg)
    return level, tl.sum(total, 0)


@triton.jit
def _lowered(levels, sums, level, cfg):
    """Return sums of squares in the row's units instead of their own.

    Each half on its own: low_latency has them in two words.
    """
    shift = tl.minimum(2 * (_exponent_of(levels, cfg) - _exponent_of(level, cfg)), 63)
    lower, upper = (sums & LOWER).to(tl.int64), (sums & ~LOWER).to(tl.int64)
    return (lower << FINER >> shift) + (upper << FINER >> shift)


@triton.jit
def _exponent_of(level, cfg):
    return tl.minimum(tl.maximum(255 - level, 0), cfg.most)


@triton.jit
def _power_of(level, cfg):
    """Return the power of two that brings numbers of a level to between 2 and 4."""
    return (_exponent_of(level, cfg) << MANTISSA).to(tl.float32, bitcast=True)


@triton.jit
def finish_row(added, weights, level, total, token, first, to, given, cfg, RANKS: tl.constexpr):
    """Normalise and scale parts of the new residual; store them at RANKS ranks. Orders nothing.

    `level`, `total`: of the whole row.
    """
    values = _normalise(added, weights, level, total, cfg)
    if cfg.normed:
        store_row(values, token, first, to[0], cfg, RANKS)
    if cfg.quant != "":
        _store_fp8(values, token, first, to, given.scale, cfg, RANKS)


@triton.jit
def store_row(parts, token, first, to, cfg, RANKS: tl.constexpr):
    """Store parts of a row at RANKS ranks, from column `first` on. Orders nothing."""
    begin = token.to(tl.int64) * cfg.hidden
    for n in tl.static_range(cfg.parts):
        column = first + n * cfg.stride + tl.arange(0, cfg.block)
        tile = parts[n].to(to[0].dtype.element_ty)
        _store(to, begin + column, tile, column < cfg.hidden, RANKS)


@triton.jit
def _store(pointers, at, tile, mask, RANKS: tl.constexpr):
    for n in tl.static_range(RANKS):
        tl.store(pointers[n] + at, tile, mask=mask)


@triton.jit
def _normalise(added, weights, level, total, cfg):
    """Normalise and scale parts of a row, in float32. The reference does the same."""
    power = _power_of(level, cfg)
    mean = total.to(tl.float32) * (1.0 / ROW_UNIT)  # by a power of two: as exact as a division
    mean = tl.div_rn(mean, tl.full((), cfg.hidden, tl.float32))
    # By powers of two: a fused multiplication and addition has the same bits.
    root = tl.sqrt_rn(mean + tl.full((), cfg.eps, tl.float32) * power * power)
    inverse = tl.where(level < TOO_LARGE, tl.div_rn(tl.full((), 1.0, tl.float32), root), 1.0)
    inverse = tl.where(level == NO_NUMBER, float("nan"), inverse)
    values = ()
    for n in tl.static_range(cfg.parts):
        factor = weights[n].to(tl.float32)
        if cfg.gemma:
            factor += 1.0
        values = values + (added[n].to(tl.float32) * power * inverse * factor,)
    return values


@triton.jit
def _absolute(tile):
    """Return the bits of absolute values: integers in the same order, with a NaN the largest."""
    return tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _peak(parts):
    """Return the bits of the largest absolute value of a row."""
    largest = _absolute(parts[0])
    for n in tl.static_range(1, len(parts)):
        largest = tl.maximum(largest, _absolute(parts[n]))
    return tl.max(largest, 0)


@triton.jit
def _store_fp8(values, token, first, to, scale, cfg, RANKS: tl.constexpr):
    """Store a row in FP8 and its scales, which are given or those of its largest elements.

    A scale of the whole row that is not given takes a program that has the whole row.
    """
    begin = token.to(tl.int64) * cfg.hidden
    if cfg.quant != "group":
        whole = _scale_of_row(values, token, to[3], scale, cfg, RANKS)
    for n in tl.static_range(len(values)):
        grouped = tl.reshape(values[n], (cfg.block // GROUP, GROUP))
        start = first + n * cfg.stride
        if cfg.quant == "group":
            used = _scales_of_groups(grouped, start, token, to[3], scale, cfg, RANKS)
            ratio = tl.div_rn(grouped, tl.broadcast_to(used[:, None], grouped.shape))
        else:
            ratio = tl.div_rn(grouped, tl.broadcast_to(whole, grouped.shape))
        ratio = tl.where(ratio > cfg.limit, cfg.limit, ratio)
        ratio = tl.where(ratio < -cfg.limit, -cfg.limit, ratio)
        column = start + tl.arange(0, cfg.block)
        tile = tl.reshape(ratio, (cfg.block,)).to(to[2][0].dtype.element_ty)
        _store(to[2], begin + column, tile, column < cfg.hidden, RANKS)


@triton.jit
def _scale_of_row(values, token, to, scale, cfg, RANKS: tl.constexpr):
    """Return the scale of all parts of a row, and store it if it was not given."""
    if scale is not None:
        used = tl.load(scale + (token if cfg.quant == "token" else 0))
    else:
        used = _scale(_peak(values), cfg.limit)
        _store(to, token.to(tl.int64), used, None, RANKS)
    return used


@triton.jit
def _scales_of_groups(grouped, start, token, to, scale, cfg, RANKS: tl.constexpr):
    """Return a scale for each row of `grouped`, and store them if they were not given."""
    group = start // GROUP + tl.arange(0, grouped.shape[0])
    at = token.to(tl.int64) * cfg.groups + group
    if scale is not None:
        used = tl.load(scale + at, mask=group < cfg.groups, other=1.0)
    else:
        used = _scale(tl.max(_absolute(grouped), 1), cfg.limit)
        _store(to, at, used, group < cfg.groups, RANKS)
    return used


@triton.jit
def _scale(peak, limit):
    """Return the scale that makes the largest element, with bits `peak`, the largest FP8."""
    value = peak.to(tl.float32, bitcast=True)
    scale = tl.div_rn(value, tl.full(value.shape, limit, tl.float32))
    return tl.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
