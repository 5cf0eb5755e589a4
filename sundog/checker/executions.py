"""All executions of a litmus program that the axioms allow, by enumeration.

A way per thread gives the effects. A trace per way gives values, these reads-from, and the order
of `fence.sc` and of strong writes completes a candidate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import or_

from .axioms import AXIOMS, INITIAL, Effect, Effects, Execution, Synchronised
from .litmus import Litmus, Place, Registers
from .relations import Relation, bits
from .traces import Trace, Way, all_traces, initial_values

__all__ = ["Ending", "candidates", "executions", "outcomes"]

Candidate = tuple[tuple[Registers, ...], Execution]


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


def executions(litmus: Litmus, bound: int = 2) -> Iterator[Candidate]:
    """Yield the allowed executions, each with the threads' registers at the end."""
    return candidates(litmus, bound, lambda x: all(axiom(x) for axiom in AXIOMS))


def candidates(
    litmus: Litmus, bound: int = 2, fits: Callable[[Execution], bool] = lambda x: True
) -> Iterator[Candidate]:
    """Yield every execution that fits.

    Whatever contradicts an axiom still does when more is known of the orders, so that `fits` is
    asked at each step on the way, and the rest is not looked at if it says no.
    """
    start = initial_values(litmus)
    by_way = all_traces(litmus, bound)
    for ways in product(*by_way):
        joined = [_join(list(start), ways, met) for met in _meetings(ways)]
        possible = [effects for effects in joined if effects is not None]
        if not possible:
            continue
        for traces in _supplied(start, [by_way[t][way] for t, way in enumerate(ways)]):
            registers = tuple(trace.registers for trace in traces)
            values = (*start.values(), *(value for trace in traces for value in trace.values))
            for effects in possible:
                for execution in _ordered(effects, values, fits):
                    yield registers, execution


def _supplied(start: dict[str, int], choices: list[list[Trace]]) -> Iterator[tuple[Trace, ...]]:
    """One trace per thread, such that each value read has a write."""
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
    """Which barriers come before which: those that made up the quorum before all that pass.

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
    """Number the effects of all threads, after the initial writes; None if barriers deadlock."""
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


def _ordered(x: Effects, values: tuple[int, ...], fits: Fits) -> Iterator[Execution]:
    for reads_from in _reads_from(x, values, fits):

        def with_fences(order: Relation, rf: Relation = reads_from) -> Execution:
            synchronised = Synchronised(x, rf, order)
            return Execution(synchronised, synchronised.ordered_writes.closed(), values)

        for partly in _orientations(x.strong_fences, Relation.empty(x.size), with_fences, fits):

            def with_writes(order: Relation, part: Execution = partly) -> Execution:
                return Execution(part.synchronised, order, values)

            yield from _orientations(x.strong_writes, partly.co, with_writes, fits)


def _reads_from(x: Effects, values: tuple[int, ...], fits: Fits) -> Iterator[Relation]:
    """Give each read a write of its value, one read after the other."""
    reads, none = list(bits(x.reads)), Relation.empty(x.size)

    def choose(number: int, known: Relation) -> Iterator[Relation]:
        if number == len(reads):
            yield known
            return
        read = reads[number]
        writes = x.writes & x.same_physical.rows[read] & ~x.po.rows[read]
        for write in bits(writes):
            if values[write] == values[read]:
                more = known | Relation.of(x.size, [(write, read)])
                synchronised = Synchronised(x, more, none)
                if fits(Execution(synchronised, synchronised.ordered_writes.closed(), values)):
                    yield from choose(number + 1, more)

    return choose(0, none)


def _orientations(
    pairs: Relation, known: Relation, make: Callable[[Relation], Execution], fits: Fits
) -> Iterator[Execution]:
    """Every transitive order that contains `known`, orders each of the pairs, and fits."""
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
