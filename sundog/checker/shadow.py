"""Shadow memory: for every granule of an allocation, what must come before the next access.

One int32 per granule, the number of an interned state. Tiles have few different states, so an
access handles each state once, however large the tile. A granule is as large as the accesses were
so far; the first smaller or odd one refines it. `Shadows` has those of all memory that kernels and
hosts touch, as long as it lives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..machine.accesses import Touch
from ..machine.regions import Memory, Region
from .clocks import Clocks, Stamp
from .findings import AccessEvent


@dataclass(eq=False, slots=True)  # compared by identity: `made_now` makes equal ones once
class PastAccess:
    """An access that later ones are compared with."""

    stamp: Stamp
    event: AccessEvent
    step: int  # of its actor, for the report: before or after a signal?


def made_now(event: AccessEvent) -> PastAccess:
    """Return an access that is made now, as later ones will see it."""
    actor, past = event.actor, event.latest
    stamp = actor.stamp(event.tensor, event.proxy and event.writes)
    if past is None or past.step != actor.steps or past.stamp != stamp:
        past = event.latest = PastAccess(stamp, event, actor.steps)
    return past


class State(NamedTuple):
    written: bool
    writes: tuple[PastAccess, ...] = ()  # the last plain write, and what it does not imply
    reads: tuple[
        PastAccess, ...
    ] = ()  # plain reads that may still race, the latest of each component
    atomics: tuple[PastAccess, ...] = ()


FEW = 16  # elements or granules: up to this many, numpy takes longer to begin
_DIARY = 256  # entries
UNWRITTEN, CLEAN = 0, 1  # nobody wrote it; written before everything that we watch


class States:
    """Interned states: equal ones have one number."""

    def __init__(self) -> None:
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}
        self.plain: list[bool] = []  # by number: it is written, and not by a descriptor
        assert self.number(State(written=False)) == UNWRITTEN
        assert self.number(State(written=True)) == CLEAN

    def number(self, state: State) -> int:
        found = self._numbers.get(state)
        if found is None:
            found = self._numbers[state] = len(self._states)
            self._states.append(state)
            self.plain.append(state.written and not any([w.event.proxy for w in state.writes]))
        return found

    def __getitem__(self, number: int) -> State:
        return self._states[number]


class Shadow:
    def __init__(self, start: int, end: int, itemsize: int, number: int) -> None:
        self.start, self.end = start, end
        self.granule = itemsize if (end - start) % itemsize == 0 else 1
        self.numbers = np.full((end - start) // self.granule, number, np.int32)

    def place(self, address: int, size: int) -> int:
        """Return the granule that one access touches; -1 if it does not touch just one, whole."""
        place, rest = divmod(address - self.start, self.granule)
        return -1 if rest or size != self.granule else place

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray | slice:
        """Return the granules that these accesses touch; a slice where they lie side by side."""
        flat = addresses.ravel()
        first = int(flat[0]) - self.start
        if _is_side_by_side(flat, size):
            if first % self.granule or size % self.granule:
                self._refine(first, size)
            start = first // self.granule
            return slice(start, start + addresses.size * size // self.granule)
        offsets = (flat - np.uint64(self.start)).astype(np.int64)
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


def distinct(numbers: np.ndarray) -> list[int]:
    """Return the different ones in order. Neighbours are mostly equal: np.unique would sort all."""
    heads = numbers[1:][numbers[1:] != numbers[:-1]].tolist()
    return sorted({numbers.item(0), *heads})


def _is_side_by_side(flat: np.ndarray, size: int) -> bool:
    if flat.size <= FEW:
        at = flat.tolist()
        return bool(at == [*range(at[0], at[0] + len(at) * size, size)])
    return np.count_nonzero(flat[1:] - flat[:-1] != size) == 0


Places = np.ndarray | list[int] | slice
Span = tuple[Region, Shadow, Places]  # the granules that an access touches


def each_place(places: Places) -> Iterable[int]:
    return range(places.start, places.stop) if isinstance(places, slice) else map(int, places)


@dataclass
class Diary:
    """What one host did to an ordinary tensor that nobody else has touched yet.

    Nothing can be wrong with that, and most such tensors never meet a kernel. So it is only written
    down; the tensor gets a shadow when another one touches it.
    """

    number: int  # of the state that its bytes had at first
    entries: list[tuple[PastAccess, Touch]] = field(default_factory=list)

    def takes(self, past: PastAccess) -> bool:
        same = not self.entries or self.entries[0][0].event.actor is past.event.actor
        return same and len(self.entries) < _DIARY


def after(clocks: Clocks, state: State, new: PastAccess) -> State:
    """Return what later accesses are compared with: nothing that the new access implies."""
    _, writes, reads, atomics = state
    if new.event.atomic:
        rank = new.event.actor.rank
        others = [m for m in atomics if m.event.actor.rank != rank or not _replaces(clocks, new, m)]
        return State(True, writes, reads, (*others, new))
    if new.event.writes:
        kept = [
            _outliving(clocks, new, marks) if marks else () for marks in (writes, reads, atomics)
        ]
        return State(True, (*kept[0], new), kept[1], kept[2])
    if new in reads:
        return state
    if reads:
        actor, stamp = new.event.actor, new.stamp
        reads = tuple([m for m in reads if not clocks.implies(actor, stamp, m.stamp)])
    return State(True, writes, (*reads, new), atomics)


def _outliving(
    clocks: Clocks, new: PastAccess, marks: tuple[PastAccess, ...]
) -> tuple[PastAccess, ...]:
    """Return a program's own tiles that its later scalar store does not publish."""
    actor = new.event.actor
    own = [mark for mark in marks if mark.event.actor is actor]
    return tuple([m for m in own if not clocks.implies(actor, new.stamp, m.stamp)])


def _replaces(clocks: Clocks, new: PastAccess, old: PastAccess) -> bool:
    """Return whether what must come after the old atomic must come after the new one too."""
    a, b = new.event, old.event
    same = a.scope == b.scope and a.writes >= b.writes  # both are of one rank
    program = a.scope != "cta" or a.actor is b.actor
    return same and program and clocks.implies(a.actor, new.stamp, old.stamp)


def bounds(span: Span) -> tuple[int, int]:
    """Return the addresses [lo, hi) that an access touched."""
    _, shadow, places = span
    if isinstance(places, slice):
        first, last = places.start, places.stop - 1
    else:
        first, last = int(min(places)), int(max(places))
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
        self._diaries: dict[int, Diary] = {}
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

    def write_down(self, past: PastAccess, touch: Touch) -> bool:
        """Take a host's access to an ordinary tensor into its diary; False if others touched it."""
        assert touch.region is not None
        start = touch.region.start
        diary = self._diaries.get(start)
        if diary is None:
            if start in self._shadows:
                return False
            diary = self._diaries[start] = Diary(CLEAN)
        if diary.takes(past):
            diary.entries.append((past, touch))
            return True
        return False

    def has_diary(self, region: Region) -> bool:
        return region.start in self._diaries

    def read_diary(self, region: Region) -> Diary:
        """Return what must be done to the region first, once, and make its shadow."""
        diary = self._diaries.pop(region.start)
        self.allocated(region, diary.number)
        return diary

    def meet(self, storage: torch.UntypedStorage, unwritten: int) -> None:
        """Forget what was known of an ordinary tensor's memory if it belonged to another tensor.

        Torch may hand out freed memory again without our seeing either, for an unpickled tensor for
        example. `unwritten` is the element size of a tensor that was made just now and not filled.
        """
        start = storage.data_ptr()
        owner = self._owners.get(start)
        if owner is not None and not owner.expired():
            return
        end = start + storage.nbytes()
        if start == end or self._memory.is_heap(start, end):
            return
        self.freed(start)
        self._owners[start] = StorageWeakRef(storage)
        if unwritten:
            self._diaries[start] = Diary(UNWRITTEN)

    def freed(self, start: int) -> None:
        self._diaries.pop(start, None)
        shadow = self._shadows.pop(start, None)
        if shadow is not None:
            self._forget(shadow.start, shadow.end)
