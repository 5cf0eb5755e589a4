"""Which accesses of a finished run race, by brute force: docs/memory_model.md read literally.

From the linear trace of what happened it builds a graph of what comes before what, closes it, and
lists every pair of accesses that the page calls a race. It shares no code, and no idea, with the
checker: no clocks, no state per byte, nothing is forgotten.

A node is an access (of one lane) or a point of a program where all its threads know what came
before: its launch, a scalar acquire, a CTA barrier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Event", "Race", "races"]

Lane = tuple[int, int]  # address and size
WRITES = {"store", "atomic", "host_write"}
ATOMIC = {"atomic", "volatile"}


@dataclass(frozen=True)
class Event:
    kind: str  # load store atomic volatile barrier launch host_read host_write world_barrier
    rank: int  # of a world barrier: any
    launch: int = -1
    program: int = -1
    lanes: tuple[Lane, ...] = ()
    sem: str = ""
    scope: str = ""
    tile: bool = False  # a tensor of several pointers: made by many threads
    # per lane of an atomic: how many of the newest releases it did not read
    lags: tuple[int, ...] = field(default=(), compare=False)

    @property
    def actor(self) -> tuple[int, int, int]:
        return self.rank, self.launch, self.program


class Race(NamedTuple):
    first: int  # places in the trace
    second: int
    byte: int
    hidden: bool  # by a plain write, or by one that comes later and races in its place


def reach(one: Event, other: Event) -> bool:  # both scopes reach both parties
    near = {"cta": one.actor == other.actor, "gpu": one.rank == other.rank, "sys": True}
    return near[one.scope] and near[other.scope]


def conflict(one: Event, other: Event) -> bool:
    both_atomic = {one.kind, other.kind} <= ATOMIC and reach(one, other)
    if of_a_word(one, other) or of_a_word(other, one):
        return False
    return one.actor != other.actor and bool({one.kind, other.kind} & WRITES) and not both_atomic


def of_a_word(store: Event, load: Event) -> bool:  # self-validating words: their payload is a flag
    if (store.kind, load.kind) != ("store", "volatile") or not (store.tile and load.tile):
        return False
    return store.actor != load.actor and store.lanes[0][1] % load.lanes[0][1] == 0


def taken(visits: Iterable[Event], earlier: Event, event: Event) -> bool:
    """Whether the later store's program has read, since, the word that the earlier one stored."""
    if (earlier.kind, event.kind) != ("store", "store"):
        return False
    return any(each.actor == event.actor and of_a_word(earlier, each) for each in visits)


@dataclass
class _Program:
    knows: int  # what comes before this node comes before all that any of its threads does next
    end: int
    thread_0: list[int] = field(default_factory=list)  # its latest access, if any
    open: list[int] = field(default_factory=list)  # accesses since the last CTA barrier


class _Order:
    def __init__(self, trace: Sequence[Event]) -> None:
        self.after: list[int] = []  # per node the set of nodes that come after it, as bits
        self._stream: dict[int, list[int]] = defaultdict(list)  # the latest work of a rank's stream
        self._launches: dict[tuple[int, int], tuple[int, int]] = {}  # start and end
        self._programs: dict[tuple[int, int, int], _Program] = {}
        self._chains: dict[Lane, list[tuple[int, Event]]] = {}  # releases that can still be read
        self.nodes = [self._add(event) for event in trace]  # per event, a node per lane
        for middle, later in enumerate(self.after):  # rule 6
            self.after[:] = [each | later if each >> middle & 1 else each for each in self.after]

    def comes_before(self, a: int, b: int) -> int:
        return self.after[a] >> b & 1

    def _node(self, before: Iterable[int]) -> int:
        self.after.append(0)
        for each in before:
            self.after[each] |= 1 << len(self.after) - 1
        return len(self.after) - 1

    def _add(self, event: Event) -> list[int]:
        if event.kind in ("barrier", "load", "store", "atomic", "volatile"):
            new = _Program(*self._launches[event.rank, event.launch])
            program = self._programs.setdefault(event.actor, new)
            if event.kind == "barrier":  # rule 1
                program.knows = self._node([program.knows, *program.open])
                program.open, program.thread_0 = [], []
            lags = event.lags or (0,) * len(event.lanes)
            lanes = zip(event.lanes, lags, strict=True)
            return [self._add_lane(event, lane, program, lag) for lane, lag in lanes]
        node = self._node(self._stream[event.rank])
        if event.kind == "launch":  # rule 4: later work on the stream comes after its end
            self._launches[event.rank, event.launch] = node, self._node([node])
            node += 1
        elif event.kind == "world_barrier":  # rule 5
            node = self._node(last for stream in self._stream.values() for last in stream)
            self._stream = defaultdict(lambda: [node])
        elif event.kind == "host_write":
            self._break_chains(event.lanes)
        self._stream[event.rank] = [node]
        return [node] * len(event.lanes)

    def _add_lane(self, event: Event, lane: Lane, program: _Program, lag: int) -> int:
        chain = self._chains.get(lane, []) if event.sem in ("acquire", "acq_rel") else []  # rule 2
        chain = chain[: len(chain) - lag]
        learnt = [published for published, release in chain if reach(release, event)]
        if not event.tile:  # the whole program learns, else only this lane until the next barrier
            program.knows = self._node([program.knows, *learnt])
        own = not event.tile and event.kind not in ("load", "volatile")  # made by all threads
        node = self._node([program.knows, *learnt, *(program.thread_0 if own else [])])
        program.thread_0 = [node] if own else program.thread_0
        program.open.append(node)
        self.after[node] |= 1 << program.end
        if event.kind == "store":
            self._break_chains([lane])
        elif event.sem in ("release", "acq_rel"):  # of a tensor: not even its own lane's access
            published = self._node([program.knows]) if event.tile else node
            self._chains.setdefault(lane, []).append((published, event))
        return node

    def _break_chains(self, lanes: Iterable[Lane]) -> None:
        for start, size in lanes:
            for word, width in [*self._chains]:
                if start < word + width and word < start + size:
                    del self._chains[word, width]


def races(trace: Sequence[Event]) -> list[Race]:
    """Every two accesses to a common byte, one a write, unordered, and not both atomic."""
    order = _Order(trace)
    visits: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by byte: event and node
    found = []
    for b, (event, nodes) in enumerate(zip(trace, order.nodes, strict=True)):
        for (address, size), later in zip(event.lanes, nodes, strict=True):
            for byte in range(address, address + size):
                lost, racing = False, list[int]()
                for a, earlier in reversed(visits[byte]):
                    since = (trace[c] for c, _ in visits[byte] if c > a)
                    if taken(since, trace[a], event):
                        pass
                    elif not order.comes_before(earlier, later) and conflict(trace[a], event):
                        assert not order.comes_before(later, earlier), "the trace runs backwards"
                        hidden = lost or any(order.comes_before(earlier, c) for c in racing)
                        found.append(Race(a, b, byte, hidden))
                        racing.append(earlier)
                    lost |= trace[a].kind in ("store", "host_write")
                visits[byte].append((b, later))
    return found
