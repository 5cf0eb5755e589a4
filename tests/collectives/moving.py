"""For the tests of ops that only move data: random bytes of any dtype, compared as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sundog.collectives._copy import Config

__all__ = ["DTYPES", "SMALL", "joined", "part", "same"]

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
SMALL = Config(block=256, programs=2, num_warps=1)  # several tiles and programs of a small tensor


def part(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes; NaNs too."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == torch.bool else 256
    shape = (numel * dtype.itemsize,)
    return torch.randint(0, most, shape, dtype=torch.uint8, generator=generator).view(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of one dtype and with the same bytes, whatever the shape."""
    flat = [each.cpu().reshape(-1).view(torch.uint8) for each in (a, b)]
    return a.dtype == b.dtype and torch.equal(*flat)


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """torch.cat, for float8 too."""
    dtype = parts[0].dtype
    return torch.cat([each.reshape(-1).view(torch.uint8) for each in parts]).view(dtype)
