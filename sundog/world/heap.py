"""The symmetric allocator: a pure function of the sequence of calls.

Ranks that make the same calls get the same offsets, so allocating needs no communication. The
algorithm is two-level segregated fit (TLSF, known from real-time allocators): free blocks are kept
in classes of nearly equal size, a bitmap finds the first class that fits, and neighbours are merged
at once. A class is sorted, so bisection finds the smallest block that fits in O(log n) steps, the
lowest offset first.

Blocks are freed by offset, never by a garbage collector, whose order differs between ranks. The log
of calls since the last agreement lets a barrier name the first one that differs.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..callsite import caller
from ..errors import HeapDivergence, OutOfHeap, by_rank

ALIGNMENT = 256
_LOGGED = 10_000  # calls kept since the last agreement: there may never be another one
_SUBCLASSES = 16  # size classes per power of two: at most 1/16 of a block is wasted by the search


@dataclass(frozen=True)
class Call:
    """One heap call, as the ranks compare them."""

    verb: str  # "alloc" or "free"
    nbytes: int
    name: str
    site: str

    def __str__(self) -> str:
        return f"{self.verb} of {self.nbytes} bytes ({self.name}) at {self.site}"


@dataclass
class Allocation:
    offset: int
    nbytes: int  # as requested
    size: int  # as allocated, with alignment and guard
    name: str
    site: str
    itemsize: int = 1
    kind: str = "data"  # or "flags", "context" (what bounds waits), "arena" (a group's heap)
    ranks: tuple[int, ...] = ()  # that share it

    @property
    def is_flags(self) -> bool:
        return self.kind in ("flags", "context")

    @property
    def is_context(self) -> bool:
        return self.kind == "context"

    @property
    def is_arena(self) -> bool:
        return self.kind == "arena"


@dataclass
class Heap:
    """Offsets in [0, capacity). `guard` bytes stay unused after every allocation."""

    capacity: int
    guard: int = 0
    live: dict[int, Allocation] = field(default_factory=dict)
    log: list[Call] = field(default_factory=list)
    num_calls: int = 0
    digest: str = ""

    def __post_init__(self) -> None:
        self.capacity -= self.capacity % ALIGNMENT
        self._by_start: dict[int, int] = {}  # free blocks: start -> size
        self._by_end: dict[int, int] = {}  # and end -> start
        self._classes: dict[int, list[tuple[int, int]]] = {}  # class -> sorted (size, start)
        self._bitmap = 0  # bit c is set where class c has a block
        self._starts: list[int] = []  # of live blocks, sorted
        self._give(0, self.capacity)

    def alloc(
        self, nbytes: int, name: str = "", itemsize: int = 1, kind: str = "data"
    ) -> Allocation:
        site = caller()
        self._record(Call("alloc", nbytes, name, site))
        size = _round_up(max(nbytes, 1) + self.guard)
        start = self._find(size)
        if start is None:
            raise OutOfHeap(self._out_of_heap(nbytes, name, site))
        whole = self._take(start)
        if whole > size:
            self._give(start + size, whole - size)
        block = Allocation(start, nbytes, size, name or f"unnamed@{site}", site, itemsize, kind)
        self.live[start] = block
        bisect.insort(self._starts, start)
        return block

    def at(self, offset: int) -> Allocation | None:
        """Return the live block that has this byte."""
        place = bisect.bisect_right(self._starts, offset)
        block = self.live[self._starts[place - 1]] if place else None
        return block if block is not None and offset < block.offset + block.size else None

    def free(self, offset: int) -> Allocation:
        block = self.live.pop(offset)
        del self._starts[bisect.bisect_left(self._starts, offset)]
        self._record(Call("free", block.nbytes, block.name, caller()))
        self._give(block.offset, block.size)
        return block

    def agree(self) -> None:
        """Clear the log: all ranks made its calls, so they need not be compared again."""
        self.log.clear()

    @property
    def free_bytes(self) -> int:
        return sum(self._by_start.values())

    @property
    def largest_free(self) -> int:
        return max(self._by_start.values(), default=0)

    def _record(self, call: Call) -> None:
        self.num_calls += 1
        if len(self.log) < _LOGGED:
            self.log.append(call)
        text = f"{self.digest}|{call.verb}|{call.nbytes}|{call.name}"
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _find(self, size: int) -> int | None:
        """Return the start of the smallest free block of at least `size` bytes."""
        own = self._classes.get(_class_of(size), [])
        at = bisect.bisect_left(own, (size, 0))
        if at < len(own):
            return own[at][1]
        larger = self._bitmap >> (_class_of(size) + 1)  # classes with only blocks that fit
        if not larger:
            return None
        lowest = (larger & -larger).bit_length()
        return self._classes[_class_of(size) + lowest][0][1]

    def _take(self, start: int) -> int:
        size = self._by_start.pop(start)
        del self._by_end[start + size]
        blocks = self._classes[_class_of(size)]
        del blocks[bisect.bisect_left(blocks, (size, start))]
        if not blocks:
            self._bitmap &= ~(1 << _class_of(size))
        return size

    def _give(self, start: int, size: int) -> None:
        if size == 0:
            return
        if start + size in self._by_start:
            size += self._take(start + size)
        if start in self._by_end:
            before = self._by_end[start]
            size += self._take(before)
            start = before
        self._by_start[start] = size
        self._by_end[start + size] = start
        bisect.insort(self._classes.setdefault(_class_of(size), []), (size, start))
        self._bitmap |= 1 << _class_of(size)

    def _out_of_heap(self, nbytes: int, name: str, site: str) -> str:
        biggest = sorted(self.live.values(), key=lambda a: (-a.nbytes, a.offset))[:5]
        lines = [f"  {a.nbytes:>14,} bytes  {a.name}  allocated at {a.site}" for a in biggest]
        # After the current blocks. This is approximate: in a larger heap they might be elsewhere.
        last_free = self.capacity - self._by_end.get(self.capacity, self.capacity)
        enough = self.capacity - last_free + _round_up(max(nbytes, 1) + self.guard)
        return (
            f"heap is out of memory: {nbytes:,} bytes asked for ({name or 'unnamed'}, {site}), "
            f"{self.free_bytes:,} of {self.capacity:,} free, largest free block "
            f"{self.largest_free:,}.\nlargest live allocations:\n"
            + "\n".join(lines or ["  none"])
            + "\nFree what is no longer used (world.free, world.scope, world.free_plans), or "
            "open the world with a "
            f"larger heap_size (or SUNDOG_HEAP_SIZE): about {enough:,} would do."
        )


def _round_up(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _class_of(size: int) -> int:
    """Return a block's class: its power of two, then which 1/16 of it. It grows with the size."""
    units = size // ALIGNMENT
    power = units.bit_length() - 1
    if power < 4:
        return units
    return power * _SUBCLASSES + ((units >> (power - 4)) & (_SUBCLASSES - 1))


def divergence(logs: list[list[Call]], ranks: Sequence[int]) -> HeapDivergence:
    """Return the error that names the first call in which the ranks' logs differ."""
    for place in range(max(len(log) for log in logs)):
        calls = [log[place] if place < len(log) else None for log in logs]
        if len({(c.verb, c.nbytes, c.name) if c else None for c in calls}) > 1:
            return HeapDivergence(
                "ranks made different heap calls, so their offsets no longer match. The first "
                f"that differs is number {place + 1} since the last barrier:\n"
                + by_rank([c or "no further call" for c in calls], ranks)
                + "\nMake the same calls, in the same order, on every rank."
            )
    return HeapDivergence(
        "ranks made different heap calls, so their offsets no longer match. The first that differs "
        f"came after the first {len(logs[0]):,} since the last barrier, which are kept. Make the "
        "same calls, in the same order, on every rank; with more barriers, the next one names it."
    )
