"""What an entry of the corpus is, and the data that its hosts use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import sundog
from sundog.checker.findings import Rule

__all__ = ["Kernel", "Pair", "everyone", "neighbour", "values"]

Kernel = Any  # a jit function, to be launched as kernel[grid](...)


@dataclass(frozen=True)
class Pair:
    """A wrong host function with its kernel, the corrected twin, and what the checker must say."""

    family: str
    name: str
    wrong: Callable[[sundog.World], None]
    fixed: Callable[[sundog.World], None]
    world_size: int
    rule: Rule
    num_sms: int = 0  # 0: the number of resident programs varies

    @property
    def kind(self) -> str:
        return self.rule.kind

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def values(rank: int, *shape: int, call: int = 0) -> torch.Tensor:
    """Return what a rank sends in a call. Small integers: every sum is exact."""
    numbers = random.Random(1000 * call + rank).choices(range(-99, 100), k=math.prod(shape))
    return torch.tensor(numbers, dtype=torch.float32).view(shape)


def everyone(world: sundog.World, n: int) -> torch.Tensor:
    """Return what all ranks send, a row per rank."""
    return torch.stack([values(rank, n) for rank in range(world.size)])


def neighbour(world: sundog.World, step: int = 1) -> int:
    return (world.rank + step) % world.size
