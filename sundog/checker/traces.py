"""The traces of a litmus program's threads: what each does for every choice of values it reads.

A trace is a way through the code with values. Many traces share a way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from .axioms import Effect
from .litmus import (
    Barrier,
    Fence,
    Litmus,
    Origins,
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

__all__ = ["Trace", "Way", "all_traces", "initial_values"]

Domain = set[tuple[str, int]]  # places, and values that they may hold
READ_SEM = {"release": "relaxed", "acq_rel": "acquire"}
WRITE_SEM = {"acquire": "relaxed", "acq_rel": "release"}


@dataclass(frozen=True)
class Way:
    """What one thread does, without values. Indices are into its own effects."""

    effects: tuple[Effect, ...] = ()
    updates: tuple[int, ...] = ()  # of their reads
    dependencies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Trace:
    """A way, the value of each effect, and the registers at its end."""

    way: Way = Way()
    values: tuple[int, ...] = ()
    registers: Registers = field(default_factory=dict)
    origins: Origins = field(default_factory=dict)

    def then(self, effect: Effect, value: int = 0, needs: frozenset[int] = frozenset()) -> Trace:
        """Append an effect, which depends on these reads and on what led here."""
        way, here = self.way, len(self.values)
        new = tuple((read, here) for read in sorted(needs | rests_on("", self.origins)))
        longer = replace(way, effects=(*way.effects, effect), dependencies=way.dependencies + new)
        return replace(self, way=longer, values=(*self.values, value))

    def needs(self) -> set[tuple[str, int]]:
        """Return the places and values that it reads and has not written itself before."""
        found, own = set(), set()
        for effect, value in zip(self.way.effects, self.values, strict=True):
            if effect.kind == "write":
                own.add((effect.physical, value))
            elif effect.kind == "read" and (effect.physical, value) not in own:
                found.add((effect.physical, value))
        return found

    def accesses(self, kind: str) -> Iterator[tuple[str, int]]:
        """Yield the places and values of all reads or all writes."""
        for effect, value in zip(self.way.effects, self.values, strict=True):
            if effect.kind == kind:
                yield effect.physical, value


def initial_values(litmus: Litmus) -> dict[str, int]:
    """Return what each place that the program touches starts with: 0 if it does not say."""
    code = (step for thread in litmus.threads for step in thread.code)
    places = {litmus.physical(i.loc): 0 for i in code if isinstance(i, Read | Write | Update)}
    given = {litmus.physical(name): value for name, value in litmus.initial.items()}
    return {place: given.get(place, 0) for place in places}


def all_traces(litmus: Litmus, bound: int) -> list[dict[Way, list[Trace]]]:
    """Return every thread's traces by way, over the values that other threads can write.

    Each round adds the values that rest on one more write, so there are as many as writes.
    """
    threads = range(len(litmus.threads))
    start = set(initial_values(litmus).items())
    written: list[set[tuple[str, int]]] = [set() for _ in threads]
    rounds = sum(isinstance(i, Write | Update) for t in litmus.threads for i in t.code)
    for _ in range(rounds + 1):
        others = [start.union(*written[:t], *written[t + 1 :]) for t in threads]
        traces = [list(_traces(litmus, t, others[t], bound)) for t in threads]
        found = [{pair for trace in each for pair in trace.accesses("write")} for each in traces]
        if found == written:
            break
        written = found
    return [_by_way(each) for each in traces]


def _by_way(traces: list[Trace]) -> dict[Way, list[Trace]]:
    found: dict[Way, list[Trace]] = defaultdict(list)
    for trace in traces:
        found[trace.way].append(trace)
    return found


def _traces(litmus: Litmus, number: int, domain: Domain, bound: int) -> Iterator[Trace]:
    """A thread's traces for all values of its reads; a loop that goes on is left out."""
    code = litmus.threads[number].code

    def run(at: int, trace: Trace, visits: dict[int, int]) -> Iterator[Trace]:
        registers, origins = dict(trace.registers), dict(trace.origins)
        at = advance(code, at, registers, origins)
        trace = replace(trace, registers=registers, origins=origins)
        if at >= len(code):
            yield trace
        elif visits.get(at, 0) < bound:
            for longer in _step(litmus, number, at, trace, domain):
                yield from run(at + 1, longer, {**visits, at: visits.get(at, 0) + 1})

    yield from run(0, Trace(), {})


def _step(litmus: Litmus, number: int, at: int, trace: Trace, domain: Domain) -> Iterator[Trace]:
    """Append the effects of one instruction, once per value that it may read."""
    thread = litmus.threads[number]
    step, place = thread.code[at], thread.place
    if isinstance(step, Fence):
        yield trace.then(Effect("fence", number, place, step.sem, step.scope))
    elif isinstance(step, ProxyFence):
        yield trace.then(Effect("proxy fence", number, place, proxy=step.proxy))
    elif isinstance(step, Barrier):
        kind = "arrive" if step.arrive else "barrier"
        name = (step.instance, evaluate(step.name, trace.registers))
        yield trace.then(Effect(kind, number, place, barrier=name, quorum=step.quorum))
    elif isinstance(step, Write):
        value = evaluate(step.value, trace.registers)
        effect = _access(litmus, number, step, "write", step.sem)
        yield trace.then(effect, value, rests_on(step.value, trace.origins))
    elif isinstance(step, Read | Update):
        seen = domain.union(trace.accesses("write"))
        for value in sorted(v for place, v in seen if place == litmus.physical(step.loc)):
            yield _read(litmus, number, step, trace, value)


def _read(litmus: Litmus, number: int, step: Read | Update, trace: Trace, value: int) -> Trace:
    """Append a read of this value, and the write of an update."""
    here = len(trace.values)
    sem = READ_SEM.get(step.sem, step.sem) if isinstance(step, Update) else step.sem
    read = trace.then(_access(litmus, number, step, "read", sem), value)
    if isinstance(step, Update):
        new = updated(step, value, trace.registers)
        needs = rests_on(step.value, trace.origins) | rests_on(step.compare, trace.origins)
        sem = WRITE_SEM.get(step.sem, step.sem)
        read = read.then(_access(litmus, number, step, "write", sem), new, needs | {here})
        read = replace(read, way=replace(read.way, updates=(*read.way.updates, here)))
    return replace(
        read,
        registers={**trace.registers, step.into: value},
        origins={**trace.origins, step.into: frozenset({here})},
    )


def _access(
    litmus: Litmus, number: int, step: Read | Write | Update, kind: str, sem: str
) -> Effect:
    return Effect(
        kind, number, litmus.threads[number].place, sem, step.scope, litmus.virtual(step.loc),
        litmus.physical(step.loc), step.proxy,
    )  # fmt: skip
