"""Choose the tiles of a product, where nothing was tuned: those that should finish first.

On a whole GPU and for up to 1,024 rows, a tile's time is a line that was fitted to measurements of
one H200: a product starts in `start` us, a wave of tiles takes `each` us and `per_k` us for 1,000
of K, and B takes `per_mb` us per megabyte, since with few rows the memory sets the pace. Each line
was fitted to 6 x 6 shapes (16 to 1,024 rows; N x K from 8192 x 1024 to 14336 x 4096). For a shape
that is left out of the fit the choice takes at most 1.04 times the fastest of these tiles in 16
bits. For more rows, and where ranks share a GPU, only the speed of a tile relative to the largest
is known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from .. import gpu_limits
from . import _gemm

FEW_SMS = 64  # of a rank, which then has a part of a GPU
_FEW_ROWS = 64  # up to which tiles of 16 rows were measured
_MOST_ROWS = 1024  # up to which times were


class _Product(NamedTuple):
    shards: int
    rows: int  # of a shard of A
    cols: int
    k: int
    itemsize: int
    num_sms: int

    def tiles(self, m: int, n: int) -> int:
        """Count the tiles. A tile has rows of one shard only."""
        return int(self.shards * triton.cdiv(self.rows, m) * triton.cdiv(self.cols, n))


class _Timed(NamedTuple):
    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    start: float  # us, as are the others
    each: float
    per_k: float
    per_mb: float

    def seconds(self, product: _Product) -> float:
        """Estimate when a product has ended, in units that all tiles of a list share."""
        count = product.tiles(self.m, self.n)
        k = self.per_k * triton.cdiv(product.k, self.k) * self.k / 1000
        if self.m > product.rows and count > product.num_sms // 2:
            k *= 2  # TMA fills what lies beyond A with zeros, at a rate that all SMs share
        weights = self.per_mb * product.itemsize * product.k * product.cols / 1e6
        return self.start + triton.cdiv(count, product.num_sms) * (self.each + k) + weights


class _Relative(NamedTuple):
    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    speed: float  # of an SM, relative to the largest tile

    def seconds(self, product: _Product) -> float:
        waves = triton.cdiv(product.tiles(self.m, self.n), product.num_sms)
        return waves * self.m * self.n / self.speed


_WIDE = (  # of 16 bits
    _Timed(16, 32, 256, 2, 6, 3.47, 0.28, 1.45, 0.0539),
    _Timed(16, 64, 256, 4, 5, 3.53, 0.20, 1.48, 0.0971),
    _Timed(64, 32, 128, 4, 6, 2.75, 0.17, 1.65, 0.120),
    _Timed(64, 64, 128, 4, 6, 2.78, 0.35, 1.63, 0.130),
    _Timed(64, 128, 64, 4, 9, 1.03, 2.62, 2.16, 0.130),
    _Timed(64, 128, 128, 4, 4, 1.94, 0.97, 2.40, 0.144),
    _Timed(128, 128, 64, 4, 6, 1.67, 1.84, 4.35, 0.0808),
    _Timed(128, 256, 64, 8, 4, 0.0, 4.98, 8.95, 0.0313),
)
_FP8 = (
    _Timed(16, 32, 512, 4, 3, 3.08, 0.47, 1.38, 0.0458),
    _Timed(64, 32, 256, 4, 6, 3.00, 0.40, 0.726, 0.163),
    _Timed(64, 128, 256, 4, 4, 2.45, 0.91, 1.23, 0.154),
    _Timed(128, 128, 128, 4, 6, 2.48, 1.77, 2.15, 0.0920),
    _Timed(128, 256, 128, 8, 4, 1.33, 4.46, 4.37, 0.0437),
)
_MANY_ROWS = (_Relative(128, 256, 64, 8, 3, 1.0), _Relative(128, 128, 64, 4, 4, 0.98))
_MANY_ROWS_FP8 = (_Relative(128, 256, 128, 8, 4, 1.0), _Relative(128, 128, 128, 4, 6, 0.93))
# Where ranks share a GPU. The largest and 128 x 128 were measured in 16 bits; the others are rough,
# fitted so that the tiles that were fastest with 16, 64 and 256 rows are chosen.
_SHARED = (
    _Relative(128, 256, 64, 8, 3, 1.0),
    _Relative(128, 128, 64, 4, 4, 0.70),
    _Relative(64, 256, 64, 4, 4, 0.90),
    _Relative(64, 128, 64, 4, 5, 0.60),
    _Relative(64, 64, 128, 4, 4, 0.40),
    _Relative(64, 32, 128, 4, 4, 0.22),
    _Relative(16, 32, 128, 2, 5, 0.03),
)


def fitting(
    rows: int, shard_rows: int, cols: int, k: int, dtype: torch.dtype, num_sms: int
) -> dict[str, Any]:
    """Choose the tiles that should finish first: the last wave may leave most SMs without work."""
    if not gpu_limits.here().has_tma or dtype.itemsize > 2:
        return _halved(rows, shard_rows, cols, k, dtype, num_sms)
    shards = rows // max(shard_rows, 1)
    product = _Product(shards, shard_rows, cols, k, dtype.itemsize, num_sms)
    tile = min(_known(product), key=lambda tile: tile.seconds(product))
    made = dict(
        tile_m=tile.m, tile_n=tile.n, tile_k=_tile_k(tile.k, k, dtype), num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return _within(made, dtype)


def _known(product: _Product) -> tuple[_Timed | _Relative, ...]:
    """Return the tiles of which something is known for these rows."""
    is_fp8 = product.itemsize == 1
    if product.num_sms <= FEW_SMS:
        return _SHARED
    if product.shards * product.rows > _MOST_ROWS:
        return _MANY_ROWS_FP8 if is_fp8 else _MANY_ROWS
    tiles = _FP8 if is_fp8 else _WIDE
    return tuple(each for each in tiles if each.m > 16 or product.rows <= _FEW_ROWS)


def _within(made: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Take as many stages as there is shared memory for: every target has room for one."""
    while _gemm.shared_bytes(_gemm.Tiles(**made), dtype.itemsize) > gpu_limits.here().shared:
        made["num_stages"] -= 1
    return made


def _tile_k(usual: int, k: int, dtype: torch.dtype) -> int:
    """Bound a tile along K by what a short K needs. FP8 has as many bytes there as 16 bits."""
    least, wanted = (32, max(usual, 128)) if dtype.itemsize == 1 else (16, usual)
    return int(min(wanted, max(least, triton.next_power_of_2(k))))


def _halved(
    rows: int, shard_rows: int, cols: int, k: int, dtype: torch.dtype, num_sms: int
) -> dict[str, Any]:
    """Choose tiles that do not spill, halved until every SM has one. AMD, float32: not measured."""
    here, wide = gpu_limits.here(), dtype.itemsize > 2
    is_amd = here.is_amd
    tile_m, tile_n = (64, 64) if wide else (128, 128 if is_amd else 256)  # wide: no tensor cores
    tile_m = min(tile_m, max(16, triton.next_power_of_2(shard_rows)))
    while triton.cdiv(rows, tile_m) * triton.cdiv(cols, tile_n) < num_sms and tile_n > 16:
        if tile_n > tile_m or tile_m == 16:
            tile_n //= 2
        else:
            tile_m //= 2
    made: dict[str, Any] = dict(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=_tile_k(16 if wide else 64, k, dtype),
        descriptors=here.has_tma,
        num_warps=8 if tile_m * tile_n >= 128 * 128 else 4,
        num_stages=2 if is_amd else 3,
    )
    return _within(made, dtype)
