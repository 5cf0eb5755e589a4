"""Pairs of a wrong kernel and its corrected twin, with what the checker must say of the wrong one.

The families come from the public record of multi-GPU kernels. A file holds one kind of mistake; a
wrong kernel says in one comment what is wrong with it. The twins compare their results with torch:
they are right, not only silent. `PAIRS` is the table behind `sundog check --corpus`.
"""

from __future__ import annotations

from . import (
    atomics,
    barrier_after,
    barrier_before,
    bounds,
    chains,
    deadlocks,
    epochs,
    flags,
    hosts,
    locks,
    pipelined,
    proxies,
    queues,
    reuse,
    scopes,
    semantics,
    unwritten,
)
from .pair import Pair

__all__ = ["PAIRS", "Pair"]

_FILES = [
    barrier_before, barrier_after, scopes, semantics, chains, flags, epochs, reuse, locks, atomics,
    queues, deadlocks, bounds, unwritten, hosts, proxies, pipelined,
]  # fmt: skip
PAIRS: list[Pair] = [pair for file in _FILES for pair in file.PAIRS]
