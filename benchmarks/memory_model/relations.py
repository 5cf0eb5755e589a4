"""Relations over a few numbered events: one bit mask of successors per event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import and_, or_


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Relation:
    """A set of pairs of events. Written as in papers: `|`, `&`, `-`, and `@` for composition."""

    __slots__ = ("rows",)

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = tuple(rows)

    @staticmethod
    def empty(size: int) -> Relation:
        return Relation([0] * size)

    @staticmethod
    def of(size: int, pairs: Iterable[tuple[int, int]]) -> Relation:
        rows = [0] * size
        for a, b in pairs:
            rows[a] |= 1 << b
        return Relation(rows)

    @staticmethod
    def where(size: int, holds: Callable[[int, int], bool]) -> Relation:
        """Relate two different events if the predicate holds."""
        each = range(size)
        return Relation.of(size, ((a, b) for a in each for b in each if a != b and holds(a, b)))

    @staticmethod
    def identity(size: int, on: int) -> Relation:
        """Relate each event of a set, given as a mask, to itself."""
        return Relation(1 << i & on for i in range(size))

    def __or__(self, other: Relation) -> Relation:
        return Relation(map(or_, self.rows, other.rows))

    def __and__(self, other: Relation) -> Relation:
        return Relation(map(and_, self.rows, other.rows))

    def __sub__(self, other: Relation) -> Relation:
        return Relation(a & ~b for a, b in zip(self.rows, other.rows, strict=True))

    def __matmul__(self, other: Relation) -> Relation:
        after, rows = other.rows, []
        for row in self.rows:
            reached = 0
            while row:
                low = row & -row
                reached |= after[low.bit_length() - 1]
                row ^= low
            rows.append(reached)
        return Relation(rows)

    def __bool__(self) -> bool:
        return any(self.rows)

    def __contains__(self, pair: tuple[int, int]) -> bool:
        return bool(self.rows[pair[0]] >> pair[1] & 1)

    def pairs(self) -> Iterator[tuple[int, int]]:
        return ((a, b) for a, row in enumerate(self.rows) for b in bits(row))

    def between(self, sources: int, targets: int) -> Relation:
        """Keep the pairs from one set of events to another."""
        return Relation(row & targets if sources >> i & 1 else 0 for i, row in enumerate(self.rows))

    def inverse(self) -> Relation:
        return Relation.of(len(self.rows), ((b, a) for a, b in self.pairs()))

    def or_same(self) -> Relation:
        """Add the pair of each event with itself."""
        return Relation(row | 1 << i for i, row in enumerate(self.rows))

    def closed(self) -> Relation:
        """Return the transitive closure."""
        rows = list(self.rows)
        for middle in range(len(rows)):
            bit, after = 1 << middle, rows[middle]
            if after:
                rows = [row | after if row & bit else row for row in rows]
        return Relation(rows)

    @property
    def irreflexive(self) -> bool:
        return not any(row >> i & 1 for i, row in enumerate(self.rows))

    @property
    def acyclic(self) -> bool:
        return self.closed().irreflexive
