"""One byte per element on the wire: groups of 128 elements that share a float32 scale.

    scale = largest / limit      limit: 127 of int8, 448 of float8_e4m3fn, 240 of float8_e4m3fnuz
    byte  = round(x * limit / largest), ties to even

The error of an element (docs/quantized.md adds the errors up):

    int8    at most largest / 254, whatever the element
    FP8     at most 1/16 of the element, and largest / 2^10 / limit of the smallest (1/8, fnuz)

If a group has a NaN or an infinity, none of its elements is finite afterwards. Zeros stay zeros.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..device import chunks
from ..ops.op import World
from . import _reduce

GROUP = tl.constexpr(128)  # elements that share a scale
WIRES = (torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LEAST = tl.constexpr(2.0**-100)  # of a group's largest element, so that zeros have a scale
_ROUND = tl.constexpr(1.5 * 2**23)  # added and taken away, it leaves a whole number
_MOST = 64  # groups of a tile


@dataclass(frozen=True)
class Config:
    """Tiles and programs of a quantised op."""

    groups: int = 16  # of a tile
    programs: int = 16
    num_warps: int = 4


def wire_of(op: str, wire: str | torch.dtype) -> torch.dtype:
    """Return the dtype on the wire for "int8", "fp8" (what this GPU converts to), or a dtype."""
    if wire == "fp8":
        return gpu_limits.here().fp8
    kind = torch.int8 if wire == "int8" else wire
    if kind not in WIRES:
        raise ValueError(
            f"{op}: wire {wire!r}: expected 'int8', 'fp8', torch.int8, torch.float8_e4m3fn or "
            "torch.float8_e4m3fnuz"
        )
    assert isinstance(kind, torch.dtype)
    return kind


def refused(problem: Any, config: Config) -> str | None:
    if problem.dtype not in _DTYPES:
        return f"{problem.dtype}: expected one of bfloat16, float16 and float32"
    if problem.wire not in WIRES:
        return f"{problem.wire} on the wire: expected int8, float8_e4m3fn or float8_e4m3fnuz"
    if config.groups > _MOST:
        return f"groups {config.groups}: a tile has at most {_MOST}"
    return _reduce.refused(config.groups, config.programs, config.num_warps)


def space(problem: Any) -> list[Config]:
    fields = (4, 8, 16, 32, 64), (4, 8, 16, 32, 64, 128), (4, 8, 16)
    return [Config(*each) for each in itertools.product(*fields)]


def default(numel: int, num_sms: int) -> Config:
    """Choose one tile per program, of up to 32 groups, and 16 elements per thread."""
    share = triton.next_power_of_2(triton.cdiv(max(groups_of(numel), 1), num_sms))
    least = gpu_limits.here().warp_size * chunks.WIDE.value // GROUP.value
    groups = min(max(share, least), 32)
    programs = max(min(triton.cdiv(groups_of(numel), groups), num_sms), 1)
    threads = groups * GROUP.value // chunks.WIDE.value
    return Config(groups, programs, max(threads // gpu_limits.here().warp_size, 1))


def groups_of(numel: int) -> int:
    return int(triton.cdiv(numel, GROUP.value))


def random_input(world: World, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return normal elements and, where there is room, a group of zeros."""
    torch.manual_seed(seed * 1000 + world.rank)
    x = world.empty((numel,), dtype, "x").normal_()
    if numel > 4 * GROUP.value:
        x[GROUP.value : 2 * GROUP.value] = 0.0
    return x


# what torch computes: exactly the same bits


def _grouped(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten().float()
    missing = groups_of(flat.numel()) * GROUP.value - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, GROUP.value)


def take(x: torch.Tensor, wire: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor's bytes [groups, 128] and scales [groups], as the kernel computes them."""
    most = 127.0 if wire == torch.int8 else float(torch.finfo(wire).max)
    rows, limit = _grouped(x), torch.tensor(most, device=x.device)
    peak = rows.abs().amax(1).clamp(min=_LEAST.value)
    peak = torch.where(rows.isnan().any(1), torch.nan, peak)
    inverse, scales = limit / peak, peak / limit
    if wire == torch.int8:  # from the exact product, since the kernel rounds once
        whole = torch.round(rows.double() * inverse.double()[:, None])
        return whole.nan_to_num(0.0).to(wire), scales
    return (rows * inverse[:, None]).to(wire), scales


def expected(x: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """Return what arrives, in float32."""
    bits, scales = take(x, wire)
    return (bits.float() * scales[:, None]).flatten()[: x.numel()]


def summed(parts: list[torch.Tensor], wire: torch.dtype) -> torch.Tensor:
    """Return the sum of what arrives, in rank order. Each product and its addition round once."""
    total = expected(parts[0], wire)
    for part in parts[1:]:
        bits, scales = take(part, wire)
        product = (bits.double() * scales.double()[:, None]).flatten()[: part.numel()]
        total = (total.double() + product).float()
    return total


# in kernels


@triton.jit
def elements(row, ROWS: tl.constexpr):
    """Return the elements of a tile of groups, from group `row` on."""
    return (row + tl.arange(0, ROWS)).to(tl.int64)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def spread(places, tables, values, row, groups, COUNT: tl.constexpr):
    """Quantise groups of float32 [rows, 128], and store bytes and scales to COUNT ranks."""
    KIND: tl.constexpr = places[0].dtype.element_ty
    LIMIT: tl.constexpr = 127.0 if tl.int8 == KIND else 448.0 if tl.float8e4nv == KIND else 240.0
    limit = tl.full((values.shape[0],), LIMIT, tl.float32)
    peak = tl.maximum(tl.max(tl.abs(values), 1), _LEAST)
    # The maximum may ignore a NaN.
    peak = tl.where(tl.max((values != values).to(tl.int32), 1) > 0, float("nan"), peak)
    scale, inverse = tl.div_rn(peak, limit), tl.div_rn(limit, peak)
    if tl.int8 == KIND:
        wide = tl.broadcast_to(inverse[:, None], values.shape)
        whole = tl.fma(values, wide, tl.full(values.shape, _ROUND, tl.float32)) - _ROUND
        bits = whole.to(tl.int8)
    else:
        bits = (values * inverse[:, None]).to(KIND)
    number = row + tl.arange(0, values.shape[0])
    at = elements(row, values.shape[0])
    for i in tl.static_range(COUNT):
        # On the tile, not on its base: a hint on a function's argument is lost.
        place = tl.multiple_of(places[i] + at, [1, chunks.WIDE])
        tl.store(place, bits, mask=(number < groups)[:, None])
        tl.store(tables[i] + number, scale, mask=number < groups)


@triton.jit
def dequantised(place, table, row, groups, ROWS: tl.constexpr):
    """Return bytes [rows, 128] as float32, and their scales, which the caller multiplies by."""
    number = row + tl.arange(0, ROWS)
    mask = number < groups
    place = tl.multiple_of(place + elements(row, ROWS), [1, chunks.WIDE])
    bits = tl.load(place, mask=mask[:, None])
    return bits.to(tl.float32), tl.load(table + number, mask=mask, other=0.0)[:, None]
