"""RMSNorm of rows and their FP8 scales in torch, with the bits of the kernels in _rms_norm.py."""

from __future__ import annotations

import torch

from ._rms_norm import (
    FINER,
    GROUP,
    INFINITE,
    LEAST_SCALE,
    LOWER,
    NO_NUMBER,
    ROW_UNIT,
    TOO_LARGE,
    UNIT,
    most_exponent,
)


def expected(added: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    """Normalise and scale rows in float32, with the bits of the kernels."""
    wide, columns = added.float(), added.shape[-1]
    grouped = torch.nn.functional.pad(wide, (0, -columns % GROUP.value))
    most = most_exponent(eps)
    levels, sums = _measured(grouped.view(len(added), -1, GROUP.value), most)
    level = levels.amax(-1, keepdim=True)
    shifts = (2 * (_exponent(levels, most) - _exponent(level, most))).clamp(max=63)
    lower = sums & LOWER.value
    halves = (half << FINER.value >> shifts for half in (lower, sums - lower))
    total = sum(halves, torch.zeros_like(sums)).sum(-1, keepdim=True)
    # By a tensor: on a GPU torch would multiply by the inverse of a Python number.
    mean = total.to(torch.float32) / ROW_UNIT.value
    mean = mean / torch.full_like(mean, columns)
    # In float64, since torch's root of float32 is sometimes off by a bit on a CPU.
    power = _power(level, most)
    root = (mean + torch.full_like(mean, eps) * power * power).double().sqrt().float()
    inverse = torch.where(level < TOO_LARGE.value, torch.ones_like(root) / root, 1.0)
    inverse = torch.where(level == NO_NUMBER.value, torch.nan, inverse)
    factor = weight.float() + 1 if gemma else weight.float()
    return wide * power * inverse * factor


def _measured(grouped: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the level of each group, and the sum of its squares."""
    peak = _bits(grouped).amax(-1)
    levels = torch.where(peak > INFINITE.value, NO_NUMBER.value, peak >> 23)
    scaled = grouped * _power(levels, most).unsqueeze(-1)
    is_number = (levels < TOO_LARGE.value).unsqueeze(-1)
    squares = torch.where(is_number, scaled * scaled * UNIT.value + 0.5, 0.0)
    return levels, squares.to(torch.int64).sum(-1)


def _exponent(level: torch.Tensor, most: int) -> torch.Tensor:
    return (255 - level).clamp(0, most)


def _power(level: torch.Tensor, most: int) -> torch.Tensor:
    """Return the power of two that scales numbers of a level to between 2 and 4.

    For between 1 and 2, the power of the largest level would not be a normal number.
    """
    return (_exponent(level, most) << 23).view(torch.float32)


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
        scale = torch.where(scale < LEAST_SCALE.value, LEAST_SCALE.value, scale)
    ratio = grouped / (scale.view(-1, 1, 1) if scale.numel() == 1 else scale.unsqueeze(-1))
    ratio = torch.where(ratio > limit, limit, torch.where(ratio < -limit, -limit, ratio))
    return ratio.view(len(value), -1)[:, :columns].to(dtype), scale


def _bits(wide: torch.Tensor) -> torch.Tensor:
    """View absolute values as integers in the same order, with a NaN the largest."""
    return wide.abs().contiguous().view(torch.int32)
