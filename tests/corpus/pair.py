"""What an entry of the corpus is, and the data that its hosts use."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import sundog

__all__ = [
    "BARRIER_AFTER", "BARRIER_BEFORE", "NO_FENCE", "NO_ORDER", "PIPELINED", "PLAIN",
    "RELAXED_ACQUIRE", "RELAXED_RELEASE", "SCOPE", "Kernel", "Pair", "everyone", "neighbour",
    "values",
]  # fmt: skip

Kernel = Any  # a jit function, to be launched as kernel[grid](...)

# The edge that is missing, as a finding names it.
BARRIER_BEFORE = "no CTA barrier before the release"
BARRIER_AFTER = "no CTA barrier after the acquire"
SCOPE = "scope does not reach"
RELAXED_ACQUIRE = "relaxed acquire"
RELAXED_RELEASE = "relaxed release"
PLAIN = "plain access to a flag"
NO_ORDER = "no order"
NO_FENCE = "no proxy fence"
PIPELINED = "no CTA barrier in a pipelined loop"


@dataclass(frozen=True)
class Pair:
    """A wrong host function with its kernel, the corrected twin, and what the checker must say."""

    family: str
    name: str
    wrong: Callable[[sundog.World], None]
    fixed: Callable[[sundog.World], None]
    world_size: int
    kind: str
    rule: str = ""  # "": the kind says it all
    num_sms: int = 16

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


def values(rank: int, *shape: int, call: int = 0) -> torch.Tensor:
    """What a rank sends in a call, for whoever asks. Small integers: every sum is exact."""
    numbers = random.Random(1000 * call + rank).choices(range(-99, 100), k=math.prod(shape))
    return torch.tensor(numbers, dtype=torch.float32).view(shape)


def everyone(world: sundog.World, n: int) -> torch.Tensor:
    """What all ranks send, a row per rank."""
    return torch.stack([values(rank, n) for rank in range(world.size)])


def neighbour(world: sundog.World, step: int = 1) -> int:
    return (world.rank + step) % world.size
