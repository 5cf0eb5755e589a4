"""Where ranks and memory come from: one backend, one file. Files named `_x.py` are shared parts.

A backend is a module of this folder that is named in `knobs.BACKENDS`. It has

    CAPABILITIES                                  what it can do
    run(fn, world_size, options)                  start the ranks, return their results by rank

and, if its ranks are processes, for `sundog.init` in a process that torchrun started,

    facts(rank, heap_size)                        what a rank tells the others before they open it
    open_world(rank, size, store, heap_size, timeout, group, everyone)

Each rank's World gets an object with the surface of `sundog.world.backend.Backend`. Other code asks
for capabilities, never for a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from ..world.world import World
    from .sim import Sim


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do."""

    on_gpu: bool  # kernels are compiled and run on a GPU; else they are simulated
    processes: bool  # a rank is a process, of `sundog.run` or torchrun; else part of this one
    links: tuple[str, ...] = ("",)  # values of `link`: what may connect ranks
    takes_sim: bool = False  # `sim` says how to simulate


@dataclass(frozen=True)
class WorldOptions:
    """The arguments of `sundog.run`, complete and checked."""

    heap_size: int  # bytes per rank
    timeout: float  # seconds
    link: str = ""
    sim: Sim | None = None


class Module(Protocol):
    """A file of this folder."""

    CAPABILITIES: Capabilities

    def run(
        self, fn: Callable[[World], Any], world_size: int, options: WorldOptions
    ) -> list[Any]: ...

    def facts(self, rank: int, heap_size: int) -> Any: ...

    def open_world(
        self,
        rank: int,
        size: int,
        store: Any,
        heap_size: int,
        timeout: float,
        group: str = "",
        everyone: Sequence[Any] = (),
    ) -> World: ...


def load(name: str) -> Module:
    """Import the backend of this name, only when it is used, since most need torch or Triton."""
    return cast(Module, importlib.import_module(f".{name}", __name__))
