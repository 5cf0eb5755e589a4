"""Does a litmus program always end? A search through all its states.

Threads take steps in any order; a step is one access, fence or barrier. A run that goes round for
ever counts only if it is fair: every thread that the progress model cares for takes part. A strong
read sees the latest write if both scopes reach both parties. Any other read may see for ever what
its thread saw last, since nothing makes a weak write visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from .litmus import (
    Barrier,
    Instruction,
    Litmus,
    Place,
    Read,
    Registers,
    Update,
    Write,
    advance,
    evaluate,
    updated,
)

MOST_STATES = 200_000

Fair = Callable[[frozenset[int], frozenset[int]], frozenset[int]]  # of unfinished, started


def _occupied(unfinished: frozenset[int], started: frozenset[int]) -> frozenset[int]:
    return unfinished & started


def _lowest(unfinished: frozenset[int], started: frozenset[int]) -> frozenset[int]:
    return frozenset([min(unfinished)]) if unfinished else frozenset()


def _up_to_occupied(unfinished: frozenset[int], started: frozenset[int]) -> frozenset[int]:
    return frozenset(t for t in unfinished if started and t <= max(started))


# Which threads a scheduler must let run, by the names of Sorensen et al. (CONCUR 2018).
MODELS: dict[str, Fair] = {
    "fair": lambda unfinished, started: unfinished,
    "obe": _occupied,
    "hsa": _lowest,
    "hsa_obe": lambda unfinished, started: _lowest(unfinished, started) | unfinished & started,
    "lobe": _up_to_occupied,
}


@dataclass(frozen=True)
class _Cell:
    """What a place holds, and how it was written."""

    value: int
    writer: int = -1
    strong: bool = True
    scope: str = "sys"


@dataclass(frozen=True)
class _State:
    """Everything that decides what can happen next."""

    at: tuple[int, ...]  # the next instruction, by thread
    registers: tuple[tuple[tuple[str, int], ...], ...]
    memory: tuple[tuple[str, _Cell], ...]
    seen: tuple[tuple[tuple[int, str], int], ...] = ()  # by thread and place
    arrived: frozenset[tuple[Place, int, int, int]] = frozenset()  # at barriers; last: the thread
    started: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Stuck:
    """Threads that never finish: they spin together, or all wait at barriers."""

    spinning: frozenset[int]
    waiting: frozenset[int]


def find_stuck(program: Litmus, model: str = "fair") -> Stuck | None:
    """Return how the program can run for ever, or None if it always ends."""
    search = _Search(program)
    graph = search.explore()
    for states in _components(graph):
        steps = {t for s in states for t, next_state in graph[s] if next_state in states}
        some = next(iter(states))
        unfinished = search.unfinished(some)
        if not graph[some]:
            if unfinished:
                return Stuck(frozenset(), unfinished)
        elif steps:
            blocked = {t for t in unfinished if any(t not in dict(graph[s]) for s in states)}
            if MODELS[model](unfinished, some.started) <= steps | blocked:
                return Stuck(frozenset(steps), frozenset(blocked))
    return None


Graph = dict[_State, list[tuple[int, _State]]]  # the thread that steps, and what follows


def _used(code: tuple[Instruction, ...]) -> set[str]:
    """Return the registers that some instruction reads."""
    fields = ("left", "right", "value", "compare", "name")
    found = {getattr(step, field, None) for step in code for field in fields}
    return {name for name in found if isinstance(name, str)}


class _Search:
    def __init__(self, program: Litmus) -> None:
        self.program = program
        self.threads = program.threads
        self.used = [_used(thread.code) for thread in program.threads]

    def explore(self) -> Graph:
        code = [step for thread in self.threads for step in thread.code]
        places = {
            self.program.physical(i.loc) for i in code if isinstance(i, Read | Write | Update)
        }
        given = {self.program.physical(k): v for k, v in self.program.initial.items()}
        start = _State(
            (0,) * len(self.threads),
            ((),) * len(self.threads),
            tuple((place, _Cell(given.get(place, 0))) for place in sorted(places)),
        )
        for t in range(len(self.threads)):
            start = self.moved(start, t, 0, {})
        graph: Graph = {}
        todo = [start]
        while todo:
            state = todo.pop()
            if state not in graph:
                graph[state] = list(self.steps(state))
                todo += [after for _, after in graph[state]]
            if len(graph) > MOST_STATES:
                raise ValueError(f"more than {MOST_STATES} states: the program is too large")
        return graph

    def unfinished(self, state: _State) -> frozenset[int]:
        return frozenset(t for t, i in enumerate(state.at) if i < len(self.threads[t].code))

    def moved(self, state: _State, t: int, at: int, registers: Registers) -> _State:
        """Put a thread before its next instruction that is not local."""
        at = advance(self.threads[t].code, at, registers)
        values = tuple(sorted(registers.items())) if at < len(self.threads[t].code) else ()
        return replace(
            state,
            at=(*state.at[:t], at, *state.at[t + 1 :]),
            registers=(*state.registers[:t], values, *state.registers[t + 1 :]),
        )

    def steps(self, state: _State) -> Iterator[tuple[int, _State]]:
        for t in self.unfinished(state):
            for after in self.step(state, t):
                yield t, replace(after, started=state.started | {t})

    def step(self, state: _State, t: int) -> Iterator[_State]:
        """Take one step of a thread, in every way it can go; none if it waits."""
        i, registers = state.at[t], dict(state.registers[t])
        step = self.threads[t].code[i]
        if isinstance(step, Barrier):
            yield from self.barrier(state, t, step, registers)
        elif isinstance(step, Read) and step.into not in self.used[t]:
            yield self.moved(state, t, i + 1, registers)  # what it returns changes nothing
        elif isinstance(step, Read):
            for value, seen in self.readable(state, t, step):
                yield self.moved(seen, t, i + 1, {**registers, step.into: value})
        elif isinstance(step, Write):
            value = evaluate(step.value, registers)
            yield self.moved(self.written(state, t, step, value), t, i + 1, registers)
        elif isinstance(step, Update):
            old = dict(state.memory)[self.program.physical(step.loc)].value
            after = self.written(state, t, step, updated(step, old, registers))
            yield self.moved(after, t, i + 1, {**registers, step.into: old})
        else:
            yield self.moved(state, t, i + 1, registers)

    def readable(self, state: _State, t: int, load: Read) -> Iterator[tuple[int, _State]]:
        """Return each value that a load may return, and the state in which it has."""
        place = self.program.physical(load.loc)
        cell, seen = dict(state.memory)[place], dict(state.seen)
        old = seen.get((t, place), cell.value if cell.writer < 0 else self.first(place))
        if self.fresh(cell, t, load):
            yield cell.value, state
            return
        for value in {old, cell.value}:
            yield value, replace(state, seen=tuple(sorted({**seen, (t, place): value}.items())))

    def first(self, place: str) -> int:
        given = {self.program.physical(k): v for k, v in self.program.initial.items()}
        return given.get(place, 0)

    def fresh(self, cell: _Cell, t: int, load: Read) -> bool:
        """Say whether the load must see the latest write in the end."""
        if cell.writer == t or cell.writer < 0:
            return True
        here, there = self.threads[t].place, self.threads[cell.writer].place
        reach = here.reaches(load.scope, there) and there.reaches(cell.scope, here)
        return cell.strong and load.sem != "weak" and reach

    def written(self, state: _State, t: int, step: Write | Update, value: int) -> _State:
        place = self.program.physical(step.loc)
        cell = _Cell(value, t, step.sem != "weak", step.scope)
        memory = dict(state.memory) | {place: cell}
        return replace(state, memory=tuple(sorted(memory.items(), key=lambda item: item[0])))

    def barrier(
        self, state: _State, t: int, step: Barrier, registers: Registers
    ) -> Iterator[_State]:
        """Arrive, and pass once enough others have."""
        name = evaluate(step.name, registers)
        which = (self.threads[t].place, step.instance, name)
        if (*which, t) not in state.arrived:
            state = replace(state, arrived=state.arrived | {(*which, t)})
            yield self.moved(state, t, state.at[t] + 1, registers) if step.arrive else state
        elif sum(a[:3] == which for a in state.arrived) >= (step.quorum or self.expected(which)):
            yield self.moved(state, t, state.at[t] + 1, registers)

    def expected(self, which: tuple[Place, int, int]) -> int:
        """Count the threads of the CTA that have a barrier of this name."""
        place, instance, name = which
        return sum(
            any(
                isinstance(i, Barrier) and i.instance == instance and i.name == name
                for i in thread.code
            )
            for thread in self.threads
            if thread.place == place
        )


def _components(graph: Graph) -> Iterator[set[_State]]:
    """Yield the strongly connected components, by Tarjan's algorithm without recursion."""
    number: dict[_State, int] = {}
    low: dict[_State, int] = {}
    stack: list[_State] = []
    inside: set[_State] = set()
    for root in graph:
        if root in number:
            continue
        work = [(root, iter(graph[root]))]
        number[root] = low[root] = len(number)
        stack.append(root)
        inside.add(root)
        while work:
            state, edges = work[-1]
            for _, after in edges:
                if after not in number:
                    number[after] = low[after] = len(number)
                    stack.append(after)
                    inside.add(after)
                    work.append((after, iter(graph[after])))
                    break
                if after in inside:
                    low[state] = min(low[state], number[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[state])
                if low[state] == number[state]:
                    found = set(stack[stack.index(state) :])
                    del stack[stack.index(state) :]
                    inside -= found
                    yield found
