"""`sundog bench OP --link pcie`: the link's rate, the limit over it, and what else one would do.

Rank 0 is measured; the others are passive (docs/gpu.md). The limit is the larger of two times that
could overlap: the bytes that must cross, at the rate of one large copy in the same run, and the
matrix product by cuBLAS on data that is already there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ...backends._link import on_host
from ...world.world import World
from ..baselines import Baseline, Call
from .limits import Rates, time_of

if TYPE_CHECKING:
    from .run import Row

__all__ = ["BASELINES", "limited", "link_rate"]

_BYTES = 256 << 20
_WARM = 150  # copies before: in a process's first second the link was seen a fifth slower
_GEMM = "cuBLAS alone"


def link_rate(device: torch.device) -> float:
    """Bytes per second from pinned host memory by the copy engine, in one copy."""
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_WARM):
        here.copy_(host, non_blocking=True)
    return _BYTES / time_of(lambda: here.copy_(host, non_blocking=True))


def limited(rows: list[Row], rates: Rates) -> list[Row]:
    """The rows of one problem, with the limit that was measured."""
    alone = [row.times.median for row in rows if row.variant == _GEMM and row.times is not None]
    return [
        dataclasses.replace(row, limit=max(row.cost.link_bytes / rates.link, *alone, 0.0))
        for row in rows
    ]


def _parts(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    """All ranks' tensors: the peers' as the host sees them, so that copies take the engine."""
    peers = [world.peer(tensor, rank) for rank in range(world.size)]
    return [part if rank == 0 else on_host(part) for rank, part in enumerate(peers)]


def _nothing() -> None:
    """A passive rank only waits for its turn."""


def _gather(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    if world.passive:
        return _nothing
    return _copies(_parts(world, inputs[0]), list(out.chunk(world.size)))


def _gather_then_gemm(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Copies into one matrix, then one product. A part of columns goes through a buffer, by torch:
    what crosses the link lies side by side on both sides."""
    if world.passive:
        return _nothing
    whole, places = _whole(world, problem)
    gather = _copies(_parts(world, inputs[0]), places)

    def call() -> None:
        gather()
        torch.mm(whole, inputs[1], out=out)

    return call


def _gemm(world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Call:
    if world.passive:
        return _nothing
    whole, places = _whole(world, problem)
    _copies(_parts(world, inputs[0]), places)()
    return lambda: torch.mm(whole, inputs[1], out=out)


def _whole(world: World, problem: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    whole = torch.empty((problem.m, problem.k), dtype=problem.dtype, device=world.device)
    return whole, list(whole.chunk(world.size, dim=1 if problem.shard == "k" else 0))


def _copies(parts: list[torch.Tensor], places: list[torch.Tensor]) -> Call:
    def call() -> None:
        for part, place in zip(parts, places, strict=True):
            place.copy_(part, non_blocking=True)

    return call


BASELINES: dict[str, dict[str, Baseline]] = {
    "all_gather": {"copy engine": Baseline(_gather)},
    "all_gather_matmul": {
        "copy engine, then cuBLAS": Baseline(_gather_then_gemm), _GEMM: Baseline(_gemm),
    },
}  # fmt: skip
