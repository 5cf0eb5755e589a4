"""Shadow memory: for every granule of an allocation, what must come before the next access.

One int32 per granule, the number of an interned state. Tiles have few different states, so an
access handles each state once, however large the tile. A granule is as large as the accesses were
so far; the first smaller or odd one refines it. `Shadows` has those of all memory that kernels and
hosts touch, as long as it lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..machine.regions import Memory, Region
from .clocks import Clocks, Stamp
from .findings import AccessEvent

__all__ = [
    "CLEAN",
    "UNWRITTEN",
    "PastAccess",
    "Shadow",
    "Shadows",
    "Span",
    "State",
    "States",
    "after",
    "bounds",
    "index_range",
]


class PastAccess(NamedTuple):
    """An access that later ones are compared with."""

    stamp: Stamp
    event: AccessEvent
    step: int  # of its actor, for the report: before or after a signal?


class State(NamedTuple):
    written: bool
    writes: tuple[PastAccess, ...] = ()  # the last plain write, and what it does not imply
    reads: tuple[
        PastAccess, ...
    ] = ()  # plain reads that may still race, the latest of each component
    atomics: tuple[PastAccess, ...] = ()


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

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray | slice:
        """Return the granules that these accesses touch; a slice where they lie side by side."""
        first = int(addresses.flat[0]) - self.start
        if addresses.size == 1 or (np.diff(addresses.ravel()) == size).all():
            if first % self.granule or size % self.granule:
                self._refine(first, size)
            start = first // self.granule
            return slice(start, start + addresses.size * size // self.granule)
        offsets = (addresses.ravel() - np.uint64(self.start)).astype(np.int64)
        if size % self.granule or (offsets % self.granule).any():
            self._refine(int(np.gcd.reduce(offsets)), size)
        places = offsets // self.granule
        parts = size // self.granule
        if parts > 1:
            places = (places[:, None] + np.arange(parts)).ravel()
        return places

    def _refine(self, offset: int, size: int) -> None:
        finer = math.gcd(self.granule, size, offset)
        self.numbers = np.repeat(self.numbers, self.granule // finer)
        self.granule = finer


Span = tuple[Region, Shadow, np.ndarray | slice]  # the granules that an access touches


def after(clocks: Clocks, state: State, new: PastAccess) -> State:
    """Return what later accesses are compared with: nothing that the new access implies."""
    if new.event.atomic:
        others = [m for m in state.atomics if not _replaces(clocks, new, m)]
        return State(True, state.writes, state.reads, (*others, new))
    if new.event.writes:
        writes, reads, atomics = (
            tuple([m for m in marks if _outlives(clocks, new, m)]) if marks else ()
            for marks in (state.writes, state.reads, state.atomics)
        )
        return State(True, (*writes, new), reads, atomics)
    if new in state.reads:
        return state
    kept = [m for m in state.reads if not _implies(clocks, new, m)]
    return State(True, state.writes, (*kept, new), state.atomics)


def _implies(clocks: Clocks, new: PastAccess, old: PastAccess) -> bool:
    return clocks.implies(new.event.actor, new.stamp, old.stamp)


def _outlives(clocks: Clocks, new: PastAccess, old: PastAccess) -> bool:
    """Return whether it is a program's own tile that its later scalar store does not publish."""
    return old.event.actor is new.event.actor and not _implies(clocks, new, old)


def _replaces(clocks: Clocks, new: PastAccess, old: PastAccess) -> bool:
    """Return whether what must come after the old atomic must come after the new one too."""
    a, b = new.event, old.event
    same = a.actor.rank == b.actor.rank and a.scope == b.scope and a.writes >= b.writes
    program = a.scope != "cta" or a.actor is b.actor
    return same and program and _implies(clocks, new, old)


def bounds(span: Span) -> tuple[int, int]:
    """Return the addresses [lo, hi) that an access touched."""
    _, shadow, places = span
    if isinstance(places, slice):
        first, last = places.start, places.stop - 1
    else:
        first, last = int(places.min()), int(places.max())
    return shadow.start + first * shadow.granule, shadow.start + (last + 1) * shadow.granule


def index_range(span: Span) -> str:
    region = span[0]
    lo, hi = ((address - region.start) for address in bounds(span))
    first, last = lo // region.itemsize, (hi - 1) // region.itemsize
    return f"[{first}]" if first == last else f"[{first}:{last + 1}]"


class Shadows:
    """One per allocation or ordinary tensor's storage. `forget` is called for memory that ended."""

    def __init__(self, memory: Memory, forget: Callable[[int, int], None]) -> None:
        self._memory = memory
        self._forget = forget
        self._shadows: dict[int, Shadow] = {}
        self._owners: dict[int, StorageWeakRef] = {}  # whose memory an ordinary tensor's shadow is

    def __iter__(self) -> Iterator[Shadow]:
        return iter(self._shadows.values())

    def of(self, region: Region) -> Shadow:
        shadow = self._shadows.get(region.start)
        if shadow is None or shadow.end != region.end:
            shadow = self.allocated(region, CLEAN)  # made before we looked
        return shadow

    def get(self, start: int) -> Shadow | None:
        """Return the shadow of what starts there, if anything there was touched."""
        return self._shadows.get(start)

    def allocated(self, region: Region, number: int) -> Shadow:
        """Make the shadow of a region, all of it in the state with this number."""
        shadow = Shadow(region.start, region.end, region.itemsize, number)
        self._shadows[region.start] = shadow
        return shadow

    def meet(self, storage: torch.UntypedStorage, unwritten: int) -> None:
        """Forget what was known of an ordinary tensor's memory if it belonged to another tensor.

        Torch may hand out freed memory again without our seeing either, for an unpickled tensor for
        example. `unwritten` is the element size of a tensor that was made just now and not filled.
        """
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if start == end or self._memory.is_heap(start, end):
            return
        owner = self._owners.get(start)
        if owner is None or owner.expired():
            self.freed(start)
            self._owners[start] = StorageWeakRef(storage)
            if unwritten:
                region = Region(start, end, "tensor", -1, unwritten, is_heap=False)
                self.allocated(region, UNWRITTEN)

    def freed(self, start: int) -> None:
        shadow = self._shadows.pop(start, None)
        if shadow is not None:
            self._forget(shadow.start, shadow.end)
