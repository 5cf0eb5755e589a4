"""All executions of a litmus program that the axioms allow, by enumeration.

A way is a path of one thread through its code; a trace is a way with values, one for every choice
of what the thread reads. A way per thread gives the effects. A trace per way gives values, these
reads-from, and the order of `fence.sc` and of strong writes completes a candidate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import product
from operator import or_

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
    """Return a thread's traces for all values of its reads; a loop that goes on is left out."""
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


Candidate = tuple[tuple[Registers, ...], Execution]
Wanted = Callable[[tuple[Registers, ...]], bool]


@dataclass(frozen=True)
class Ending:
    """How an execution ends: every thread's registers, and the values each place may hold.

    Writes that race are unordered, so that a place may end with the value of any of them.
    """

    registers: tuple[Registers, ...]
    memory: dict[str, set[int]]
    races: list[tuple[Effect, Effect]]


def outcomes(litmus: Litmus, bound: int = 2) -> Iterator[Ending]:
    """Yield how each allowed execution ends; loops run `bound` times at most."""
    for registers, execution in executions(litmus, bound):
        yield Ending(registers, _final(execution), execution.races)


def _final(x: Execution) -> dict[str, set[int]]:
    found = defaultdict(set)
    for i in bits(x.effects.writes):
        if not x.co.rows[i]:
            found[x.effects.each[i].physical].add(x.values[i])
    return found


def executions(
    litmus: Litmus, bound: int = 2, wanted: Wanted = lambda registers: True
) -> Iterator[Candidate]:
    """Yield the allowed executions, each with the threads' registers at the end.

    Those that end with registers that are not `wanted` (any more) are left out.
    """
    return candidates(litmus, bound, lambda x: all(axiom(x) for axiom in AXIOMS), wanted)


def candidates(
    litmus: Litmus,
    bound: int = 2,
    fits: Callable[[Execution], bool] = lambda x: True,
    wanted: Wanted = lambda registers: True,
) -> Iterator[Candidate]:
    """Yield every execution that fits, and whose registers are wanted.

    Whatever contradicts an axiom still does when more is known of the orders, so that `fits` is
    asked at each step on the way, and the rest is not looked at if it says no.
    """
    start = initial_values(litmus)
    by_way = all_traces(litmus, bound)
    for ways in product(*by_way):
        joined = [_join(list(start), ways, met) for met in _meetings(ways)]
        possible = [(effects, Known()) for effects in joined if effects is not None]
        if not possible:
            continue
        for traces in _supplied(start, [by_way[t][way] for t, way in enumerate(ways)]):
            registers = tuple(trace.registers for trace in traces)
            values = (*start.values(), *(value for trace in traces for value in trace.values))
            for effects, known in possible if wanted(registers) else ():
                for execution in _ordered(effects, values, fits, known):
                    yield registers, execution
                    if not wanted(registers):
                        break


def _supplied(start: dict[str, int], choices: list[list[Trace]]) -> Iterator[tuple[Trace, ...]]:
    """Yield one trace per thread, such that each value read has a write."""
    number: dict[tuple[str, int], int] = {}

    def mask(values: Iterable[tuple[str, int]]) -> int:
        return sum({1 << number.setdefault(value, len(number)) for value in values})

    masked = [[(t, mask(t.needs()), mask(t.accesses("write"))) for t in each] for each in choices]
    later = [0] * (len(choices) + 1)  # what the threads from this one on may write
    for t in reversed(range(len(choices))):
        later[t] = reduce(or_, (writes for _, _, writes in masked[t]), later[t + 1])

    def choose(t: int, needed: int, made: int) -> Iterator[tuple[Trace, ...]]:
        if needed & ~(made | later[t]):
            return
        if t == len(masked):
            yield ()
            return
        for trace, needs, writes in masked[t]:
            for rest in choose(t + 1, needed | needs, made | writes):
                yield trace, *rest

    yield from choose(0, 0, mask(start.items()))


# barriers

Site = tuple[int, int]  # thread, index of the effect in its way
Meeting = list[tuple[Site, Site]]


def _meetings(ways: tuple[Way, ...]) -> Iterator[Meeting]:
    """Return which barriers come before which: those that made up the quorum before all that pass.

    Nothing is yielded if a thread waits at a barrier for ever.
    """
    groups: dict[tuple, list[Site]] = defaultdict(list)
    for t, way in enumerate(ways):
        for i, effect in enumerate(way.effects):
            if effect.kind in ("barrier", "arrive"):
                groups[effect.place, effect.barrier].append((t, i))
    for chosen in product(*(_ways_to_meet(ways, group) for group in groups.values())):
        yield [pair for pairs in chosen for pair in pairs]


def _ways_to_meet(ways: tuple[Way, ...], group: list[Site]) -> list[Meeting]:
    effects = [ways[t].effects[i] for t, i in group]
    quorum = max(effect.quorum for effect in effects)
    if quorum > len(group):
        return []
    sets = [list(range(len(group)))]
    if quorum:
        every = (list(bits(mask)) for mask in range(1 << len(group)))
        sets = [members for members in every if len(members) >= quorum]
    waiting = [i for i, effect in enumerate(effects) if effect.kind == "barrier"]
    return [[(group[a], group[b]) for a in members for b in waiting if a != b] for members in sets]


def _join(places: list[str], ways: tuple[Way, ...], met: Meeting) -> Effects | None:
    """Give all threads' effects numbers, after the initial writes; None if barriers deadlock."""
    nowhere = Place(-1, -1)
    each = [Effect("write", INITIAL, nowhere, virtual=p, physical=p) for p in places]
    first, order, updates, dependencies = [], [], [], []
    for way in ways:
        base, count = len(each), len(way.effects)
        first.append(base)
        each += way.effects
        order += [(base + a, base + b) for a in range(count) for b in range(a + 1, count)]
        updates += [(base + read, base + read + 1) for read in way.updates]
        dependencies += [(base + a, base + b) for a, b in way.dependencies]
    size = len(each)
    barriers = Relation.of(size, ((first[t] + i, first[u] + j) for (t, i), (u, j) in met))
    po = Relation.of(size, order)
    if not (po @ (po | barriers).closed()).irreflexive:
        return None
    return Effects(each, po, Relation.of(size, updates), Relation.of(size, dependencies), barriers)


# reads-from, the order of fences, coherence


Fits = Callable[[Execution], bool]


Known = dict[tuple[int, ...], bool]  # whether reads-from, as rows, fits: whatever the values


def _ordered(x: Effects, values: tuple[int, ...], fits: Fits, known: Known) -> Iterator[Execution]:
    for reads_from in _reads_from(x, values, fits, known):

        def with_fences(order: Relation, rf: Relation = reads_from) -> Execution:
            synchronised = Synchronised(x, rf, order)
            return Execution(synchronised, synchronised.ordered_writes.closed(), values)

        for partly in _orientations(x.strong_fences, Relation.empty(x.size), with_fences, fits):

            def with_writes(order: Relation, part: Execution = partly) -> Execution:
                return Execution(part.synchronised, order, values)

            yield from _orientations(x.strong_writes, partly.co, with_writes, fits)


def _reads_from(
    x: Effects, values: tuple[int, ...], fits: Fits, known: Known
) -> Iterator[Relation]:
    """Give each read a write of its value, one read after the other."""
    reads, none = list(bits(x.reads)), Relation.empty(x.size)

    def possible(rf: Relation) -> bool:
        if rf.rows not in known:
            synchronised = Synchronised(x, rf, none)
            before = synchronised.ordered_writes.closed()
            known[rf.rows] = fits(Execution(synchronised, before, values))
        return known[rf.rows]

    def choose(number: int, chosen: Relation) -> Iterator[Relation]:
        if number == len(reads):
            yield chosen
            return
        read = reads[number]
        writes = x.writes & x.same_physical.rows[read] & ~x.po.rows[read]
        for write in bits(writes):
            if values[write] == values[read]:
                more = chosen | Relation.of(x.size, [(write, read)])
                if possible(more):
                    yield from choose(number + 1, more)

    return choose(0, none)


def _orientations(
    pairs: Relation, known: Relation, make: Callable[[Relation], Execution], fits: Fits
) -> Iterator[Execution]:
    """Yield every transitive order that contains `known`, orders each of the pairs, and fits."""
    order = known.closed()
    execution = make(order)
    if not order.irreflexive or not fits(execution):
        return
    for a, b in pairs.pairs():
        if (a, b) not in order and (b, a) not in order:
            for pair in ((a, b), (b, a)):
                more = order | Relation.of(len(order.rows), [pair])
                yield from _orientations(pairs, more, make, fits)
            return
    yield execution
