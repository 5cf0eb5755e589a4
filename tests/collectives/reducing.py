"""Shared by the tests of reductions: random parts, and an oracle that never rounds on the way."""

from __future__ import annotations

import torch

__all__ = ["BOTH_KINDS", "exact", "oracle", "random"]

BOTH_KINDS = ("sum", "avg", "min", "max", "prod")


def random(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random per element, all magnitudes a sum of floats can trip over."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-(1 << 62), 1 << 62, (numel,), generator=generator).to(dtype)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 8).to(dtype)


def exact(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: no order of summing or multiplying 8 of them rounds in any dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-2, -1, 1, 2]) if dtype != torch.bool else torch.tensor([0, 1])
    return values[torch.randint(0, len(values), (numel,), generator=generator)].to(dtype)


def oracle(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """By torch over the stacked parts, in float64 or int64."""
    dtype = parts[0].dtype
    wide = torch.stack([p.double() if dtype.is_floating_point else p.long() for p in parts])
    if op == "avg":
        mode = None if dtype.is_floating_point else "trunc"
        return torch.div(wide.sum(0), len(parts), rounding_mode=mode).to(dtype)
    answer = {"sum": wide.sum, "min": wide.amin, "max": wide.amax, "prod": wide.prod}[op](0)
    return (answer != 0) if dtype == torch.bool else answer.to(dtype)
