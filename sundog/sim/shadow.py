"""Shadow memory: for every granule of an allocation, who has to be ordered before the next access.

One int32 per granule, the number of an interned state. Tiles have few different states, so an
access handles each state once, however large the tile. A granule is as large as the accesses were
so far; the first smaller or odd one refines it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .clocks import Stamp
from .findings import Event

__all__ = ["CLEAN", "UNWRITTEN", "Mark", "Shadow", "State", "States"]


class Mark(NamedTuple):
    """An access that later ones are compared with."""

    stamp: Stamp
    event: Event


class State(NamedTuple):
    written: bool
    write: Mark | None = None  # the last plain write
    reads: tuple[Mark, ...] = ()  # plain reads that may still race, the latest of each component
    atomics: tuple[Mark, ...] = ()


UNWRITTEN, CLEAN = 0, 1  # nobody wrote it; written before everything that we watch


class States:
    """Interned states: equal ones have one number."""

    def __init__(self) -> None:
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        assert self.number(State(written=False)) == UNWRITTEN
        assert self.number(State(written=True)) == CLEAN

    def number(self, state: State) -> int:
        found = self._numbers.setdefault(state, len(self._states))
        if found == len(self._states):
            self._states.append(state)
        return found

    def __getitem__(self, number: int) -> State:
        return self._states[number]


class Shadow:
    def __init__(self, start: int, end: int, itemsize: int, number: int) -> None:
        self.start, self.end = start, end
        self.granule = itemsize if (end - start) % itemsize == 0 else 1
        self.numbers = np.full((end - start) // self.granule, number, np.int32)

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Which granules these accesses touch."""
        offsets = (addresses.ravel() - np.uint64(self.start)).astype(np.int64)
        if size != self.granule or (offsets % self.granule).any():
            self._refine(offsets, size)
        places = offsets // self.granule
        parts = size // self.granule
        if parts > 1:
            places = (places[:, None] + np.arange(parts)).ravel()
        return places

    def _refine(self, offsets: np.ndarray, size: int) -> None:
        finer = math.gcd(self.granule, size, int(np.gcd.reduce(offsets)))
        self.numbers = np.repeat(self.numbers, self.granule // finer)
        self.granule = finer
