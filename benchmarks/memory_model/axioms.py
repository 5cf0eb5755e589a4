"""The memory model of docs/memory_model.md as axioms over one candidate execution.

A candidate says which write each read reads from, in which order strong writes to one place come,
and in which order `fence.sc` take effect. `Execution` derives the relations that the PTX memory
model is written in, and `AXIOMS` decides whether the candidate may happen. `executions` makes the
candidates of a program.

Base relations are properties of `Effects`; each derived one is written once, with the PTX manual's
name for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .litmus import Place
from .relations import Relation

INITIAL = -1  # the thread of an initial write
RELEASES = ("release", "acq_rel", "sc")
ACQUIRES = ("acquire", "acq_rel", "sc")


@dataclass(frozen=True)
class Effect:
    """One effect of an instruction: an atomic update is a read and then a write."""

    kind: str  # "read", "write", "fence", "proxy fence", "barrier" or "arrive"
    thread: int
    place: Place
    sem: str = "weak"
    scope: str = "sys"
    virtual: str = ""  # address
    physical: str = ""
    proxy: str = "generic"
    barrier: tuple[int, int] = (0, 0)  # its name
    quorum: int = 0


class Effects:
    """The effects of one way through a program, with all relations that depend on nothing else."""

    def __init__(
        self,
        each: Sequence[Effect],
        order: Relation,
        updates: Relation,
        dependencies: Relation,
        barriers: Relation,
    ) -> None:
        self.each = tuple(each)
        self.size = len(self.each)
        self.po = order
        self.rmw = updates
        self.dep = dependencies
        self.barriers = barriers

    def where(self, holds: Callable[[Effect], bool]) -> int:
        """Return the set of effects for which the predicate holds, as a mask."""
        return sum(1 << i for i, event in enumerate(self.each) if holds(event))

    def related(self, holds: Callable[[Effect, Effect], bool]) -> Relation:
        each = self.each
        return Relation.where(self.size, lambda a, b: holds(each[a], each[b]))

    @cached_property
    def reads(self) -> int:
        return self.where(lambda e: e.kind == "read")

    @cached_property
    def writes(self) -> int:
        return self.where(lambda e: e.kind == "write")

    @cached_property
    def initial(self) -> int:
        return self.where(lambda e: e.thread == INITIAL)

    @cached_property
    def same_virtual(self) -> Relation:
        return self.related(lambda a, b: bool(a.virtual) and a.virtual == b.virtual)

    @cached_property
    def same_physical(self) -> Relation:
        return self.related(lambda a, b: bool(a.physical) and a.physical == b.physical)

    @cached_property
    def same_path(self) -> Relation:
        """The same address through the same proxy, by the same CTA."""
        return self.same_virtual & self.related(
            lambda a, b: a.proxy == b.proxy and a.place == b.place
        )

    @cached_property
    def morally_strong(self) -> Relation:
        """Two operations of one thread, or two strong ones whose scopes include each other.

        Accesses must also be to the same address through the same proxy.
        """

        def strong(a: Effect, b: Effect) -> bool:
            kinds = {a.kind, b.kind}
            if not kinds <= {"read", "write", "fence"} or INITIAL in (a.thread, b.thread):
                return False
            if "fence" not in kinds and (a.virtual, a.proxy) != (b.virtual, b.proxy):
                return False
            if a.thread == b.thread:
                return True
            if "weak" in (a.sem, b.sem):
                return False
            return a.place.reaches(a.scope, b.place) and b.place.reaches(b.scope, a.place)

        return self.related(strong)

    @cached_property
    def release_pattern(self) -> Relation:
        """A release, or a fence, and then a strong write: from its first to its last operation."""
        strong = self.where(lambda e: e.kind == "write" and e.sem != "weak")
        release = self.where(lambda e: e.kind == "write" and e.sem in RELEASES)
        fence = self.where(lambda e: e.kind == "fence" and e.sem in RELEASES)
        same_place = (self.po & self.same_virtual).or_same()
        return same_place.between(release, strong) | self.po.between(fence, strong)

    @cached_property
    def acquire_pattern(self) -> Relation:
        """A strong read and then an acquire or a fence; an acquire alone is one."""
        strong = self.where(lambda e: e.kind == "read" and e.sem != "weak")
        acquire = self.where(lambda e: e.kind == "read" and e.sem in ACQUIRES)
        fence = self.where(lambda e: e.kind == "fence" and e.sem in ACQUIRES)
        same_place = (self.po & self.same_virtual).or_same()
        return same_place.between(strong, acquire) | self.po.between(strong, fence)

    @cached_property
    def strong_fences(self) -> Relation:
        """Pairs of `fence.sc` that must be in one order: morally strong ones."""
        sc = self.where(lambda e: e.kind == "fence" and e.sem == "sc")
        return self.morally_strong.between(sc, sc)

    @cached_property
    def strong_writes(self) -> Relation:
        """Pairs of writes to one place that must be in one order: morally strong ones."""
        strong = self.morally_strong & self.same_physical
        return strong.between(self.writes, self.writes)

    @cached_property
    def generic(self) -> Relation:
        memory = self.where(lambda e: bool(e.virtual) and e.proxy == "generic")
        return Relation.identity(self.size, memory)

    @cached_property
    def to_its_fence(self) -> Relation:
        """An access through another proxy, and a fence of that proxy in the same CTA."""
        return self.related(
            lambda a, b: (
                bool(a.virtual) and (b.kind, b.proxy, b.place) == ("proxy fence", a.proxy, a.place)
            )
        )

    @cached_property
    def alias_fences(self) -> Relation:
        alias = self.where(lambda e: e.kind == "proxy fence" and e.proxy == "alias")
        return Relation.identity(self.size, alias)


class Synchronised:
    """Effects with reads-from and the order of `fence.sc`: what comes before what."""

    def __init__(self, effects: Effects, reads_from: Relation, fence_order: Relation) -> None:
        self.effects = effects
        self.rf = reads_from
        self.fence_order = fence_order

    @cached_property
    def observation(self) -> Relation:
        """A write and a read of it, morally strong, or through a chain of atomic updates."""
        x = self.effects
        return ((self.rf & x.morally_strong) | x.rmw).closed().between(x.writes, x.reads)

    @cached_property
    def synchronizes(self) -> Relation:
        x = self.effects
        patterns = x.release_pattern @ self.observation @ x.acquire_pattern
        return (x.morally_strong & patterns) | self.fence_order | x.barriers

    @cached_property
    def base_causality(self) -> Relation:
        return (self.effects.po | self.synchronizes).closed()

    @cached_property
    def causality(self) -> Relation:
        """Base causality between accesses to one address, as far as their proxies keep it.

        An observation may come first.
        """
        x, base = self.effects, self.base_causality
        leave = x.generic | (base & x.to_its_fence)
        enter = x.generic | (base & x.to_its_fence.inverse())
        kept = (
            (base & x.same_path)
            | (x.same_virtual & (leave @ base @ enter))
            | (x.same_physical & (leave @ base @ x.alias_fences @ base @ enter))
        )
        return kept | (self.observation @ kept)

    @cached_property
    def ordered_writes(self) -> Relation:
        """Writes to one place that causality orders; initial ones come first."""
        x = self.effects
        first = x.same_physical.between(x.initial, x.writes)
        return first | (self.causality & x.same_physical).between(x.writes, x.writes)


class Execution:
    """A whole candidate: with the order of writes to each place (`co`) and what follows."""

    def __init__(
        self, synchronised: Synchronised, coherence: Relation, values: tuple[int, ...] = ()
    ) -> None:
        self.effects = synchronised.effects
        self.synchronised = synchronised
        self.rf = synchronised.rf
        self.co = coherence
        self.values = values  # of the effects; no axiom looks at them

    @cached_property
    def fr(self) -> Relation:
        """A read comes before the writes that follow the one it read from."""
        return self.rf.inverse() @ self.co

    @property
    def races(self) -> list[tuple[Effect, Effect]]:
        """Conflicting accesses of two threads, neither ordered by causality nor morally strong."""
        return self._conflicts(self.synchronised.causality)

    @property
    def strict_races(self) -> list[tuple[Effect, Effect]]:
        """The same if observing a write orders nothing: on the page, relaxed atomics do not."""
        return self._conflicts(self.synchronised.base_causality)

    def _conflicts(self, order: Relation) -> list[tuple[Effect, Effect]]:
        x = self.effects
        unordered = x.same_physical - x.morally_strong - order - order.inverse()
        return [
            (a, b)
            for a, b in ((x.each[i], x.each[j]) for i, j in unordered.pairs() if i < j)
            if a.thread != b.thread and INITIAL not in (a.thread, b.thread)
            if "write" in (a.kind, b.kind)
        ]


def coherence(x: Execution) -> bool:
    """Require that coherence orders writes to one place as causality does."""
    return x.co.irreflexive and not x.synchronised.ordered_writes - x.co


def fence_sc(x: Execution) -> bool:
    """Require that the order of `fence.sc` does not contradict causality."""
    return (x.synchronised.fence_order @ x.synchronised.base_causality).irreflexive


def atomicity(x: Execution) -> bool:
    """Require that no morally strong write comes between the two halves of an atomic update."""
    strong = x.effects.morally_strong
    return not ((strong & x.fr) @ (strong & x.co)) & x.effects.rmw


def no_thin_air(x: Execution) -> bool:
    """Require that no value depends on itself."""
    return (x.rf | x.effects.dep).acyclic


def sc_per_location(x: Execution) -> bool:
    """Morally strong communication does not contradict program order at one place."""
    strong, here = x.effects.morally_strong, x.effects.po & x.effects.same_path
    return (strong & (x.rf | x.co | x.fr) | here).acyclic


def causality(x: Execution) -> bool:
    """Require that a read sees no write after it, and none older than one before it."""
    return ((x.rf | x.fr) @ x.synchronised.causality).irreflexive


AXIOMS = (no_thin_air, fence_sc, coherence, atomicity, sc_per_location, causality)
