"""`run` and `init`: from a backend's name to a world per rank."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import knobs
from .backends._link import LINKS
from .backends.sim import Sim
from .errors import SundogError
from .target import GPU_HEAP, has_gpu
from .world.world import World

__all__ = ["GPU_HEAP", "init", "run"]

_CPU_HEAP = 64 << 20


def run(
    fn: Callable[[World], Any],
    world_size: int,
    backend: str | None = None,
    *,
    heap_size: int = 0,
    timeout: float = 0,
    link: str = "",
    sim: Sim | None = None,
) -> list[Any]:
    """Run `fn(world)` once per rank and return the results by rank.

    Without a backend's name: the GPU if there is one (`virtual`), else the simulator. `sim` says
    how to simulate (schedule, SMs, whether waits run out) and is for that backend alone. With
    link="pcie" all ranks but the first are passive (docs/gpu.md): on `virtual` their data lies in
    host memory; on `sim` it lies apart from their flags, as it does there.
    """
    if not callable(fn):
        raise ValueError(f"fn {fn!r}: expected a function of a world")
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size {world_size!r}: a world has at least one rank")
    asked = backend or (None if sim is None else "sim")
    name = _backend(asked, "virtual" if has_gpu() else "sim")
    _check_link(link, name)
    seconds = _seconds(timeout)
    if name == "virtual":
        from .backends import virtual

        _no_sim(sim, name)
        return virtual.run(fn, world_size, _gpu_heap_size(heap_size), seconds, link)
    if name == "symm":
        from .backends import _processes, symm

        _no_sim(sim, name)
        symm.check_can_fork()
        size = _gpu_heap_size(heap_size)
        return _processes.run(
            fn, world_size, lambda r, n, store: symm.open_alone(r, n, store, size, seconds)
        )
    nbytes = _heap_size(heap_size, world_size)
    if name == "sim":
        from .backends import sim as simulated

        return simulated.run(fn, world_size, nbytes, sim or Sim(), link)
    from .backends import _processes, shm

    _no_sim(sim, name)
    return _processes.run(
        fn, world_size, lambda r, n, store: shm.open_world(r, n, store, nbytes, seconds)
    )


def init(backend: str | None = None, *, heap_size: int = 0, timeout: float = 0) -> World:
    """The world of this process, which torchrun started as one of several ranks.

    Without a backend's name: `symm` if there is a GPU, else `shm`. Uses the default group of
    torch.distributed, or makes one with gloo.
    """
    name = _backend(backend, "symm" if has_gpu() else "shm", allowed=("shm", "symm"))
    _check_no_other()
    from .backends._rendezvous import join

    seconds = _seconds(timeout)
    rank, size, store = join(seconds)
    if name == "symm":
        from .backends import symm

        world = symm.open_world(rank, size, store, _gpu_heap_size(heap_size), seconds)
    else:
        from .backends import shm

        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        world = shm.open_world(rank, size, store, _heap_size(heap_size, local), seconds)
    if not _initialized:
        atexit.register(_say_why)
    _initialized[:] = [world]
    return world


_initialized: list[World] = []  # the world that `init` returned last, if any


def _say_why() -> None:
    """At the end of a process whose world is open: the other ranks hear what happened."""
    if not _initialized[0]._closed:
        _initialized[0]._backend.fail(getattr(sys, "last_value", None) or SystemExit())


def _check_no_other() -> None:
    """A process has one world at a time: a second one would take over its launches."""
    if _initialized and not _initialized[0]._closed:
        raise SundogError(
            f"sundog.init: this process already has {_initialized[0]!r}. Use that one "
            "(world.group makes worlds of some of its ranks), or close it first: world.close()."
        )


def _check_link(link: str, name: str) -> None:
    if link not in LINKS:
        raise ValueError(f"link {link!r}: expected 'pcie', or none")
    if link and name not in ("virtual", "sim"):
        raise ValueError(
            f"link={link!r} puts a real link between ranks on one GPU: it is for backend "
            f"'virtual', and for 'sim', which proves it on a CPU, not {name!r}"
        )


def _no_sim(sim: Sim | None, name: str) -> None:
    if sim is not None:
        raise ValueError(f"sim=... is for backend 'sim', not {name!r}")


def _backend(name: str | None, default: str, allowed: tuple[str, ...] = knobs.BACKENDS) -> str:
    chosen = name or knobs.backend.get() or default
    if chosen not in allowed:
        raise ValueError(f"backend {chosen!r}: expected one of {', '.join(allowed)}")
    return chosen


def _heap_size(asked: int, local_ranks: int) -> int:
    """Bytes per rank; refused if the ranks of this machine together can't have them."""
    nbytes = _at_least(asked or knobs.heap_size.get() or _CPU_HEAP)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes * local_ranks > memory:
        raise ValueError(
            f"heap_size {nbytes:,} for {local_ranks} ranks is {nbytes * local_ranks:,} bytes, and "
            f"this machine has {memory:,}. Ask for at most {memory // local_ranks:,} each."
        )
    return nbytes


def _gpu_heap_size(asked: int) -> int:
    nbytes = _at_least(asked or knobs.heap_size.get() or GPU_HEAP)
    # On AMD Triton takes offsets in storage below 2 GiB as 32-bit numbers, which cuts the distance
    # to a peer's heap (`sundog isa` marks it).
    return max(nbytes, 2 << 30) if torch.version.hip else nbytes


def _at_least(nbytes: int) -> int:
    if not isinstance(nbytes, int) or nbytes < 1 << 16:
        raise ValueError(f"heap_size {nbytes!r}: a heap has at least {1 << 16} bytes")
    return nbytes


def _seconds(timeout: float) -> float:
    if not 0 <= timeout < math.inf:
        raise ValueError(f"timeout {timeout}: expected seconds, or 0 for SUNDOG_TIMEOUT's")
    return timeout or knobs.timeout.get()
