"""sundog: multi-GPU Triton kernels that you can prove on a laptop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import knobs
from .backends.sim import Sim
from .world import World

__all__ = ["Sim", "World", "run"]
__version__ = "0.1.0"

_CPU_HEAP = 64 << 20


def run(
    fn: Callable[[World], Any],
    world_size: int,
    backend: str | None = None,
    *,
    heap_size: int = 0,
    timeout: float | None = None,
    sim: Sim | None = None,
) -> list[Any]:
    """Run `fn(world)` once per rank and return the results by rank."""
    if world_size < 1:
        raise ValueError(f"world_size {world_size}: a world has at least one rank")
    from .backends import sim as sim_backend

    return sim_backend.run(fn, world_size, heap_size or knobs.heap_size.get() or _CPU_HEAP, sim or Sim())
