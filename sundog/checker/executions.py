"""All executions of a litmus program that the axioms allow, by enumeration.

A thread's traces come first: what it does for each choice of the values it reads. One trace per
thread, reads-from, the order of `fence.sc` and the order of strong writes make a candidate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from .axioms import AXIOMS, INITIAL, Effect, Effects, Execution, Synchronised
from .litmus import (
    Barrier,
    Fence,
    Litmus,
    Origins,
    Place,
    ProxyFence,
    Read,
    Registers,
    Update,
    Write,
    advance,
    evaluate,
    rests_on,
    updated,
)
from .relations import Relation, bits

__all__ = ["Ending", "candidates", "executions", "outcomes"]

Domain = dict[str, set[int]]  # the values that memory may hold, by physical address
READ_SEM = {"release": "relaxed", "acq_rel": "acquire"}
WRITE_SEM = {"acquire": "relaxed", "acq_rel": "release"}


@dataclass(frozen=True)
class Trace:
    """What one thread does. Indices are into its own events."""

    events: tuple[Effect, ...] = ()
    updates: tuple[int, ...] = ()  # of their reads
    dependencies: tuple[tuple[int, int], ...] = ()
    registers: Registers = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)

    def then(self, event: Effect, dependencies: frozenset[int]) -> Trace:
        here = len(self.events)
        new = tuple((read, here) for read in dependencies | rests_on("", self.origins))
        return Trace(
            (*self.events, event), self.updates, self.dependencies + new, self.registers,
            self.origins,
        )  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """How an execution ends: every thread's registers, and the values each place may hold.

    Writes that race are unordered, so that a place may end with the value of any of them.
    """

    registers: tuple[Registers, ...]
    memory: dict[str, set[int]]
    races: list[tuple[Effect, Effect]]


Candidate = tuple[tuple[Registers, ...], Execution]


def outcomes(litmus: Litmus, bound: int = 2) -> Iterator[Ending]:
    """Yield how each allowed execution ends; loops run `bound` times at most."""
    for registers, execution in executions(litmus, bound):
        yield Ending(registers, _final(execution), execution.races)


def _final(x: Execution) -> dict[str, set[int]]:
    found = defaultdict(set)
    for i in bits(x.events.writes):
        if not x.co.rows[i]:
            found[x.events.each[i].physical].add(x.events.each[i].value)
    return found


def executions(litmus: Litmus, bound: int = 2) -> Iterator[Candidate]:
    """Yield the allowed executions, each with the threads' registers at the end."""
    for registers, execution in candidates(litmus, bound):
        if all(axiom(execution) for axiom in AXIOMS):
            yield registers, execution


def candidates(litmus: Litmus, bound: int = 2) -> Iterator[Candidate]:
    """Yield every execution that the axioms have to judge."""
    for traces in _whole(litmus, bound):
        registers = tuple(trace.registers for trace in traces)
        for barriers in _barriers(litmus, traces):
            effects = _join(litmus, traces, barriers)
            if effects is not None:
                yield from ((registers, execution) for execution in _ordered(effects))


# traces


def _whole(litmus: Litmus, bound: int) -> Iterator[tuple[Trace, ...]]:
    """One trace per thread, such that each value read has a write."""
    traces = _all_traces(litmus, bound)
    number: dict[tuple[str, int], int] = {}
    start = _mask(number, _initial(litmus).items())
    masked = [
        [(t, _values(number, t, "read"), _values(number, t, "write")) for t in each]
        for each in traces
    ]
    for chosen in product(*masked):
        needed, made = 0, start
        for _, reads, writes in chosen:
            needed, made = needed | reads, made | writes
        if not needed & ~made:
            yield tuple(trace for trace, _, _ in chosen)


def _initial(litmus: Litmus) -> dict[str, int]:
    """What each place that the program touches starts with: 0 if it does not say."""
    code = (step for thread in litmus.threads for step in thread.code)
    places = {litmus.physical(i.loc): 0 for i in code if isinstance(i, Read | Write | Update)}
    given = {litmus.physical(name): value for name, value in litmus.initial.items()}
    return {place: given.get(place, 0) for place in places}


def _mask(number: dict[tuple[str, int], int], values: Iterable[tuple[str, int]]) -> int:
    return sum({1 << number.setdefault(value, len(number)) for value in values})


def _values(number: dict, trace: Trace, kind: str) -> int:
    return _mask(number, ((e.physical, e.value) for e in trace.events if e.kind == kind))


def _all_traces(litmus: Litmus, bound: int) -> list[list[Trace]]:
    """Every thread's traces, over the values that some trace can write.

    Each round adds the values that rest on one more write, so there are as many as writes.
    """
    domain: Domain = {place: {value} for place, value in _initial(litmus).items()}
    rounds = sum(isinstance(i, Write | Update) for t in litmus.threads for i in t.code)
    for _ in range(rounds + 1):
        traces = [list(_traces(litmus, t, domain, bound)) for t in range(len(litmus.threads))]
        found = {
            (e.physical, e.value)
            for each in traces
            for trace in each
            for e in trace.events
            if e.kind == "write"
        }
        if all(value in domain[place] for place, value in found):
            break
        for place, value in found:
            domain[place].add(value)
    return traces


def _traces(litmus: Litmus, number: int, domain: Domain, bound: int) -> Iterator[Trace]:
    """A thread's traces for all values of its reads; a loop that goes on is left out."""
    thread = litmus.threads[number]

    def run(at: int, trace: Trace, visits: dict[int, int]) -> Iterator[Trace]:
        registers, origins = dict(trace.registers), dict(trace.origins)
        at = advance(thread.code, at, registers, origins)
        trace = Trace(trace.events, trace.updates, trace.dependencies, registers, origins)
        if at >= len(thread.code):
            yield trace
        elif visits.get(at, 0) < bound:
            for longer in _step(litmus, number, at, trace, domain):
                yield from run(at + 1, longer, {**visits, at: visits.get(at, 0) + 1})

    yield from run(0, Trace(), {})


def _step(litmus: Litmus, number: int, at: int, trace: Trace, domain: Domain) -> Iterator[Trace]:
    """Append the events of one instruction, once per value that it may read."""
    thread = litmus.threads[number]
    step, place = thread.code[at], thread.place
    none: frozenset[int] = frozenset()
    if isinstance(step, Fence):
        yield trace.then(Effect("fence", number, place, step.sem, step.scope, at=at), none)
    elif isinstance(step, ProxyFence):
        yield trace.then(Effect("proxy fence", number, place, proxy=step.proxy, at=at), none)
    elif isinstance(step, Barrier):
        kind = "arrive" if step.arrive else "barrier"
        name = evaluate(step.name, trace.registers)
        yield trace.then(Effect(kind, number, place, value=name, at=at), none)
    elif isinstance(step, Write):
        value = evaluate(step.value, trace.registers)
        event = _access(litmus, number, at, "write", step.sem, value)
        yield trace.then(event, rests_on(step.value, trace.origins))
    elif isinstance(step, Read | Update):
        for value in sorted(domain[litmus.physical(step.loc)]):
            yield _read(litmus, number, at, trace, value)


def _read(litmus: Litmus, number: int, at: int, trace: Trace, value: int) -> Trace:
    """Append a read of this value, and the write of an update."""
    step, here = litmus.threads[number].code[at], len(trace.events)
    assert isinstance(step, Read | Update)
    sem = READ_SEM.get(step.sem, step.sem) if isinstance(step, Update) else step.sem
    read = trace.then(_access(litmus, number, at, "read", sem, value), frozenset())
    registers = {**trace.registers, step.into: value}
    origins = {**trace.origins, step.into: frozenset({here})}
    if isinstance(step, Read):
        return Trace(read.events, read.updates, read.dependencies, registers, origins)
    new = updated(step, value, trace.registers)
    needs = rests_on(step.value, trace.origins) | rests_on(step.compare, trace.origins) | {here}
    sem = WRITE_SEM.get(step.sem, step.sem)
    both = read.then(_access(litmus, number, at, "write", sem, new), needs)
    return Trace(both.events, (*read.updates, here), both.dependencies, registers, origins)


def _access(litmus: Litmus, number: int, at: int, kind: str, sem: str, value: int) -> Effect:
    step = litmus.threads[number].code[at]
    assert isinstance(step, Read | Write | Update)
    return Effect(
        kind, number, litmus.threads[number].place, sem, step.scope, litmus.virtual(step.loc),
        litmus.physical(step.loc), step.proxy, value, at,
    )  # fmt: skip


# barriers

Site = tuple[int, int]  # thread, index of the event in its trace


def _barriers(litmus: Litmus, traces: tuple[Trace, ...]) -> Iterator[set[tuple[Site, Site]]]:
    """Which barriers come before which: those that made up the quorum before all that pass.

    Nothing is yielded if a thread waits at a barrier for ever.
    """
    groups: dict[tuple[Place, int, int], list[Site]] = defaultdict(list)
    for t, trace in enumerate(traces):
        for i, event in enumerate(trace.events):
            if event.kind in ("barrier", "arrive"):
                step = litmus.threads[t].code[event.at]
                assert isinstance(step, Barrier)
                groups[event.place, step.instance, event.value].append((t, i))
    choices = [_meetings(litmus, traces, group) for group in groups.values()]
    for chosen in product(*choices):
        yield {pair for pairs in chosen for pair in pairs}


def _meetings(
    litmus: Litmus, traces: tuple[Trace, ...], group: list[Site]
) -> list[list[tuple[Site, Site]]]:
    steps = [litmus.threads[t].code[traces[t].events[i].at] for t, i in group]
    quorum = max(step.quorum for step in steps if isinstance(step, Barrier))
    if quorum > len(group):
        return []
    sets = [list(range(len(group)))]
    if quorum:
        every = (list(bits(mask)) for mask in range(1 << len(group)))
        sets = [members for members in every if len(members) >= quorum]
    waits = [traces[t].events[i].kind == "barrier" for t, i in group]
    return [
        [(group[a], group[b]) for a in members for b in range(len(group)) if a != b and waits[b]]
        for members in sets
    ]


def _join(
    litmus: Litmus, traces: tuple[Trace, ...], barriers: set[tuple[Site, Site]]
) -> Effects | None:
    """Number the events of all threads; None if barriers wait for each other."""
    events = [
        Effect("write", INITIAL, Place(-1, -1), virtual=place, physical=place, value=value)
        for place, value in _initial(litmus).items()
    ]
    first, order, updates, dependencies = [], [], [], []
    for trace in traces:
        base, count = len(events), len(trace.events)
        first.append(base)
        events += trace.events
        order += [(base + a, base + b) for a in range(count) for b in range(a + 1, count)]
        updates += [(base + read, base + read + 1) for read in trace.updates]
        dependencies += [(base + a, base + b) for a, b in trace.dependencies]
    size = len(events)
    met = Relation.of(size, ((first[t] + i, first[u] + j) for (t, i), (u, j) in barriers))
    po = Relation.of(size, order)
    if not (po @ (po | met).closed()).irreflexive:
        return None
    return Effects(events, po, Relation.of(size, updates), Relation.of(size, dependencies), met)


# reads-from, the order of fences, coherence


def _ordered(events: Effects) -> Iterator[Execution]:
    for reads_from in _reads_from(events):
        for fence_order in _orientations(events.strong_fences, Relation.empty(events.size)):
            synchronised = Synchronised(events, reads_from, fence_order)
            x = events
            strong = (x.morally_strong & x.same_physical).between(x.writes, x.writes)
            for co in _orientations(strong, synchronised.ordered_writes):
                yield Execution(synchronised, co)


def _reads_from(x: Effects) -> Iterator[Relation]:
    reads = list(bits(x.reads))
    sources = [
        [
            w
            for w in bits(x.writes & (x.same_physical.rows[r]))
            if x.each[w].value == x.each[r].value and (r, w) not in x.po
        ]
        for r in reads
    ]
    for chosen in product(*sources):
        yield Relation.of(x.size, zip(chosen, reads, strict=True))


def _orientations(pairs: Relation, known: Relation) -> Iterator[Relation]:
    """Every transitive order that contains `known` and orders each of the pairs."""
    order = known.closed()
    if not order.irreflexive:
        return
    for a, b in pairs.pairs():
        if (a, b) not in order and (b, a) not in order:
            for pair in ((a, b), (b, a)):
                more = Relation.of(len(order.rows), [pair])
                yield from _orientations(pairs, order | more)
            return
    yield order
