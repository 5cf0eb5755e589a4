"""What the hierarchical algorithms share: where a rank is, and chunks that overlap.

A chunk goes through stages: a kernel inside the machine, a transfer between machines, a kernel
again. While the network has one chunk, kernels work on the next one. All ranks go through the
stages in one order, so transfers match without being named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..world.world import World
from .between import Between

__all__ = ["Chunk", "Levels", "NodesConfig", "chunks", "padded", "pipelined"]


@dataclass(frozen=True)
class NodesConfig:
    """How a hierarchical op runs. Its bits do not depend on it."""

    chunk_bytes: int = 4 << 20  # that are between two machines at a time, of one rank's tensor
    one_shot: bool = False  # all_reduce: every machine gets all partial sums and adds them itself


@dataclass(frozen=True)
class Levels:
    """A world over machines, for the algorithms: what is inside, and what is between."""

    local: World
    between: Between

    @property
    def shape(self) -> tuple[int, int]:
        """Machines, and ranks of each."""
        return self.between.count, self.local.size

    @property
    def size(self) -> int:
        return self.between.count * self.local.size


class Chunk(NamedTuple):
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def chunks(numel: int, item: int, chunk_bytes: int, multiple: int = 1) -> list[Chunk]:
    """Cut `numel` elements into chunks whose lengths are multiples, but for the last."""
    step = max(chunk_bytes // item // multiple, 1) * multiple
    return [Chunk(at, min(at + step, numel)) for at in range(0, numel, step)]


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Add zeros at the end until `multiple` divides its length."""
    missing = -x.numel() % multiple
    return F.pad(x, (0, missing)) if missing else x


def pipelined(parts: list[Chunk], *stages: Callable[[Chunk, Any], Any]) -> None:
    """Run every stage on every chunk; each gets the chunk and what its stage before returned.

    A stage of a chunk comes after the stage before it of the next chunk: what that one started is
    on its way meanwhile.
    """
    values: dict[int, Any] = {}
    for step in range(len(parts) + len(stages) - 1):
        for number, stage in enumerate(stages):
            at = step - number
            if 0 <= at < len(parts):
                values[at] = stage(parts[at], values.pop(at, None))
