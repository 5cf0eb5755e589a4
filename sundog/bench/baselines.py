"""What a user would call instead of an op, on the same ranks and memory. By the op's name.

On ranks that share a GPU, NCCL refuses to run, and gloo goes through the CPU: torch's own kernels
on the peers' tensors are what is left to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..world import World

__all__ = ["BASELINES", "Baseline"]

Baseline = Callable[[World, tuple[torch.Tensor, ...], torch.Tensor], Callable[[], Any]]


def _cat(world: World, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Callable[[], Any]:
    parts = [world.peer(inputs[0], rank) for rank in range(world.size)]
    return lambda: torch.cat(parts, out=out)


def _copies(world: World, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Callable[[], Any]:
    """A pull of each part by torch's copy: on one GPU a kernel, between GPUs the copy engine."""
    parts = [world.peer(inputs[0], rank) for rank in range(world.size)]
    places = out.chunk(world.size)

    def launch() -> None:
        for place, part in zip(places, parts, strict=True):
            place.copy_(part)

    return launch


BASELINES: dict[str, dict[str, Baseline]] = {"all_gather": {"torch.cat": _cat, "copy_": _copies}}
