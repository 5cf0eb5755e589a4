"""RMSNorm of one row by one program, and its FP8 scales: what the algorithms of all_reduce_rms_norm
share. A row is a tuple of tiles, its parts, which its program holds in registers.

The order in which `tl.sum` adds depends on warps, block and layout, which the compiler chooses for
each kernel. So squares are added as integers, which have no order: relative to the row's largest
power of two, in units of 2^-29. Divisions and the root are those of IEEE 754. So a row's bits are
the same wherever it is computed, also by `expected`, on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..collectives import _reduce
from . import _gemm

PROGRAMS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # that a tuner may try
GROUP = tl.constexpr(128)  # columns that share an FP8 scale
_UNIT = tl.constexpr(2.0**29)  # of a sum of squares, each below 4
_TOO_LARGE = tl.constexpr(254 << 23)  # bits of 2^127: the square of its power of two is no number
_INFINITE = tl.constexpr(255 << 23)
_LEAST_SCALE = tl.constexpr(2.0**-100)  # of rows of zeros
_LEAST_BLOCK, _LARGEST_BLOCK = 256, 4096  # of the least, two halves are whole groups
_MANTISSA = tl.constexpr(23)
_MOST_EXPONENT = tl.constexpr(127 + 60)  # of smaller rows the squares are nothing beside any eps


class Given(NamedTuple):
    """What all ranks have alike; None where there is none."""

    residual: Any
    weight: Any
    bias: Any
    scale: Any


class Outputs(NamedTuple):
    """Rows in x's dtype, rows in FP8 and their scales; None where there is none."""

    normed: Any
    residual: Any
    quantised: Any
    scales: Any


class RowConstants(NamedTuple):
    """What a kernel is compiled for: constants, as one argument."""

    hidden: tl.constexpr
    block: tl.constexpr  # elements of a part, a power of two
    padded: tl.constexpr  # elements of all parts, `hidden` or more
    eps: tl.constexpr
    gemma: tl.constexpr
    quant: tl.constexpr  # what an FP8 scale is for; "": no FP8
    normed: tl.constexpr  # are rows in x's dtype wanted?
    groups: tl.constexpr  # FP8 scales of a row
    limit: tl.constexpr  # the largest number of FP8
    size: tl.constexpr  # ranks
    trace: tl.constexpr


def block_of(hidden: int) -> int:
    """Count a part's elements. They and the warps follow from the size of a row alone.

    All ranks' loads of a part are on their way at once: with 8 ranks and 4096 elements they take 64
    registers of a thread. A row of 7168 in one part would spill them.
    """
    return min(max(triton.next_power_of_2(hidden), _LEAST_BLOCK), _LARGEST_BLOCK)


def warps_of(hidden: int) -> int:
    """8 elements a thread of short rows, 16 of long ones."""
    return min(max(block_of(hidden) // (32 * 8), 1), 8)


def constants(problem: Any, block: int, trace: Any) -> RowConstants:
    """Return the constants for parts of `block` elements."""
    padded = triton.cdiv(problem.hidden, block) * block
    return _gemm.constants(
        RowConstants, hidden=problem.hidden, block=block, padded=padded, eps=problem.eps,
        gemma=problem.gemma, quant=problem.quant, normed=not problem.quant or problem.both,
        groups=problem.groups, limit=float(torch.finfo(problem.fp8).max),
        size=problem.size, trace=trace,
    )  # fmt: skip


def given(problem: Any, tensors: tuple[torch.Tensor, ...]) -> Given:
    """Residual, weight, and then those of bias and scale that the problem has."""
    residual, weight, *rest = tensors
    bias = rest.pop(0) if problem.has_bias else None
    return Given(residual, weight, bias, rest[0] if problem.is_static else None)


# the same arithmetic, by torch


def expected(added: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    """Normalise and scale rows in float32, to the bits of the kernels."""
    wide = added.float()
    peak = _bits(wide).amax(-1, keepdim=True)
    exponent = (254 - (peak >> 23)).clamp(0, _MOST_EXPONENT.value)
    power = (exponent << 23).view(torch.float32)
    scaled, is_number = wide * power, peak < _TOO_LARGE.value
    squares = torch.where(is_number, scaled * scaled * _UNIT.value, 0.0).to(torch.int64)
    # By a tensor: of a number, torch multiplies by the inverse on a GPU.
    mean = squares.sum(-1, keepdim=True).to(torch.float32) / _UNIT.value
    mean = mean / torch.full_like(mean, wide.shape[-1])
    # In float64: torch's root of float32 is off by a bit now and then, on a CPU.
    root = (mean + torch.full_like(mean, eps) * power * power).double().sqrt().float()
    inverse = torch.where(is_number, torch.ones_like(root) / root, 1.0)
    inverse = torch.where(peak > _INFINITE.value, torch.nan, inverse)
    factor = weight.float() + 1 if gemma else weight.float()
    return scaled * inverse * factor


def expected_fp8(
    value: torch.Tensor, scale: torch.Tensor | None, quant: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in FP8 and their scales."""
    limit, columns = torch.finfo(dtype).max, value.shape[-1]
    width = GROUP.value if quant == "group" else columns
    padded = torch.nn.functional.pad(value, (0, -columns % width))
    grouped = padded.view(len(value), -1, width)
    if scale is None:
        peak = _bits(grouped).amax(-1).view(torch.float32)
        scale = peak / torch.full_like(peak, limit)
        scale = torch.where(scale < _LEAST_SCALE.value, _LEAST_SCALE.value, scale)
    ratio = grouped / (scale.view(-1, 1, 1) if scale.numel() == 1 else scale.unsqueeze(-1))
    ratio = torch.where(ratio > limit, limit, torch.where(ratio < -limit, -limit, ratio))
    return ratio.view(len(value), -1)[:, :columns].to(dtype), scale


def _bits(wide: torch.Tensor) -> torch.Tensor:
    """View as integers: they are in the same order, and a NaN is the largest."""
    return wide.abs().contiguous().view(torch.int32)


# in a kernel


@triton.jit
def here(out):
    """Return this rank's outputs, as `finish_row` takes them."""
    normed, quantised, scales = _others(out)
    return ((normed,), (out.residual,), (quantised,), (scales,))


@triton.jit
def there(out, first, ctx, SIZE: tl.constexpr):
    """Return every rank's outputs, from rank `first` on: each rank begins with another peer."""
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
def fetch_row(rows, token, tokens, cfg):
    """Load the parts of a row; zeros for a row after the last."""
    parts = ()
    for start in tl.static_range(0, cfg.padded, cfg.block):
        column = start + tl.arange(0, cfg.block)
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
    for start in tl.static_range(0, cfg.padded, cfg.block):
        column = start + tl.arange(0, cfg.block)
        inside = column < cfg.hidden
        at = token.to(tl.int64) * cfg.hidden + column
        # All loads first: they wait for memory together.
        residual = tl.load(given.residual + at, mask=inside, other=0.0)
        tiles = ()
        for peer in tl.static_range(cfg.size):
            tiles = tiles + (tl.load(rows[peer] + skip + at, mask=inside),)
        total = _reduce.widen(tiles[0])
        for peer in tl.static_range(1, cfg.size):
            total = _reduce.combine(total, _reduce.widen(tiles[peer]), "sum")
        total = total.to(residual.dtype)
        parts = parts + (add(total, residual, given.bias, start, cfg),)
    return parts


@triton.jit
def add(total, residual, bias, start, cfg):
    """Add a part of a sum, bias and residual like torch: rounded to the dtype after each."""
    if bias is not None:
        column = start + tl.arange(0, cfg.block)
        more = tl.load(bias + column, mask=column < cfg.hidden, other=0.0)
        total = (total.to(tl.float32) + more.to(tl.float32)).to(total.dtype)
    return (total.to(tl.float32) + residual.to(tl.float32)).to(total.dtype)


@triton.jit
def finish_row(added, token, to, given, cfg, RANKS: tl.constexpr):
    """Normalise and scale a row of the new residual; store both at RANKS ranks. Orders nothing."""
    first = token.to(tl.int64) * cfg.hidden
    # Now, so that they come while the threads exchange what they have of the row.
    weights = fetch_row(given.weight, token * 0, 1, cfg)
    parts = ()
    for n in tl.static_range(len(added)):
        column = n * cfg.block + tl.arange(0, cfg.block)
        inside = column < cfg.hidden
        _store(to[1], first + column, added[n], inside, RANKS)
        parts = parts + (tl.where(inside, added[n].to(tl.float32), 0.0),)  # type: ignore[assignment]
    values = _normalise(parts, weights, cfg)
    for n in tl.static_range(len(added)):
        column = n * cfg.block + tl.arange(0, cfg.block)
        if cfg.normed:
            normed = values[n].to(to[0][0].dtype.element_ty)
            _store(to[0], first + column, normed, column < cfg.hidden, RANKS)
    if cfg.quant != "":
        _store_fp8(values, token, to, given.scale, cfg, RANKS)


@triton.jit
def _store(pointers, at, tile, mask, RANKS: tl.constexpr):
    for n in tl.static_range(RANKS):
        tl.store(pointers[n] + at, tile, mask=mask)


@triton.jit
def _normalise(parts, weights, cfg):
    """Normalise and scale the parts of a row, in float32. `expected` does the same.

    Parts are joined element by element before the threads compare or add: one exchange for each.
    """
    peak = _peak(parts)
    exponent = tl.minimum(tl.maximum(254 - (peak >> _MANTISSA), 0), _MOST_EXPONENT)
    power = (exponent << _MANTISSA).to(tl.float32, bitcast=True)
    squares = _squares(parts[0], peak, power)
    for n in tl.static_range(1, len(parts)):
        squares += _squares(parts[n], peak, power)
    total = tl.sum(squares, 0)
    mean = total.to(tl.float32) * (1.0 / _UNIT)  # by a power of two: as exact as a division
    mean = tl.div_rn(mean, tl.full((), cfg.hidden, tl.float32))
    # By powers of two: a fused multiplication and addition has the same bits.
    root = tl.sqrt_rn(mean + tl.full((), cfg.eps, tl.float32) * power * power)
    inverse = tl.where(peak < _TOO_LARGE, tl.div_rn(tl.full((), 1.0, tl.float32), root), 1.0)
    inverse = tl.where(peak > _INFINITE, float("nan"), inverse)
    values = ()
    for n in tl.static_range(len(parts)):
        factor = weights[n].to(tl.float32)
        if cfg.gemma:
            factor += 1.0
        values = values + (parts[n] * power * inverse * factor,)
    return values


@triton.jit
def _squares(part, peak, power):
    """Integers, which have no order when they are added."""
    scaled = part * power
    square = tl.where(peak < _TOO_LARGE, scaled * scaled * _UNIT, 0.0)
    return square.to(tl.int32).to(tl.int64)


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
def _store_fp8(values, token, to, scale, cfg, RANKS: tl.constexpr):
    """Store a row in FP8 and its scales, which are given or those of its largest elements."""
    first = token.to(tl.int64) * cfg.hidden
    if cfg.quant != "group":
        whole = _scale_of_row(values, token, to[3], scale, cfg, RANKS)
    for n in tl.static_range(len(values)):
        grouped = tl.reshape(values[n], (cfg.block // GROUP, GROUP))
        if cfg.quant == "group":
            used = _scales_of_groups(grouped, n * cfg.block, token, to[3], scale, cfg, RANKS)
            ratio = tl.div_rn(grouped, tl.broadcast_to(used[:, None], grouped.shape))
        else:
            ratio = tl.div_rn(grouped, tl.broadcast_to(whole, grouped.shape))
        ratio = tl.where(ratio > cfg.limit, cfg.limit, ratio)
        ratio = tl.where(ratio < -cfg.limit, -cfg.limit, ratio)
        column = n * cfg.block + tl.arange(0, cfg.block)
        tile = tl.reshape(ratio, (cfg.block,)).to(to[2][0].dtype.element_ty)
        _store(to[2], first + column, tile, column < cfg.hidden, RANKS)


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
    return tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)
