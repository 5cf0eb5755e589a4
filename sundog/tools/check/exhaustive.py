"""`check --exhaustive`: all interleavings of a small world's atomics, up to equivalence.

    coverage = check_all(fn, world_size=2)
    assert coverage.is_complete and not coverage.report.findings, coverage

It is dynamic partial-order reduction. Two runs are equivalent if they order all dependent steps
alike: steps whose atomics touch a common word that one of them writes. After each run, every two
dependent steps that could have come the other way round add a decision to try (Flanagan and
Godefroid, "Dynamic partial-order reduction for model checking software", POPL 2005); sleep sets
keep runs from being repeated. A poll that fails is no step: a wait is one event, which happens when
it succeeds. Plain accesses need no decisions: the checker judges their order and not their time. An
atomic that may read several values is a decision as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from types import ModuleType
from typing import Any

import torch

from ... import knobs
from ...checker.checker import Checker
from ...checker.signals import RELEASES
from ...machine.accesses import Touch
from ...machine.machine import Machine
from ...machine.paths import Name, PathSchedule
from ...machine.tasks import Program
from ...machine.undefined import Undefined
from ...world.world import World
from .._subject import expected, output, resolve
from .schedules import Report, check_once, run_on

_MOST_STALE = 2  # atomics of a run that read an older value: each adds a dimension


class Redundant(BaseException):
    """Ends a run that is equivalent to an earlier one."""


@dataclass
class Touched:
    """The words that a step's atomics read and wrote."""

    reads: set[tuple] = field(default_factory=set)
    writes: set[tuple] = field(default_factory=set)
    first: Any = None  # its first atomic, to tell a poll that is repeated
    last: Any = None

    def depends(self, other: Touched) -> bool:
        mine, others = self.reads | self.writes, other.reads | other.writes
        return not (self.writes.isdisjoint(others) and other.writes.isdisjoint(mine))


@dataclass
class Decision:
    """A point of a run: what could be chosen, what was, and what is still to be tried."""

    options: list[Any]
    taken: Any
    todo: set[Any]
    is_program: bool = True
    done: dict[Any, Touched] = field(default_factory=dict)
    sleep: dict[Any, Touched] = field(default_factory=dict)
    footprint: Touched = field(default_factory=Touched)

    @property
    def left(self) -> list[Any]:
        return sorted(self.todo - self.done.keys() - self.sleep.keys())


class Explorer(PathSchedule):
    """One run: follows a path of decisions and extends it."""

    def __init__(self, path: list[Decision]) -> None:
        super().__init__()
        self.path = path
        self._at = 0
        self._stale_left = _MOST_STALE
        self.current = Touched()  # of the step that runs now
        self._last: Decision | None = None  # between programs

    def decide_program(self, names: list[Name]) -> int:
        if self._at < len(self.path):
            decision = self.path[self._at]
            decision.options = names
        else:
            decision = self._new(names)
        self._at += 1
        self._last = decision
        self.current = decision.footprint = Touched()
        return names.index(decision.taken)

    def _new(self, names: list[Name]) -> Decision:
        last, sleep = self._last, {}
        if last is not None:
            asleep = {**last.sleep, **last.done}
            sleep = {
                name: step
                for name, step in asleep.items()
                if name != last.taken and not step.depends(last.footprint)
            }
        awake = [name for name in names if name not in sleep]
        if not awake:
            raise Redundant
        taken = last.taken if last is not None and last.taken in awake else awake[0]
        decision = Decision(names, taken, {taken}, sleep=sleep)
        self.path.append(decision)
        return decision

    def decide_value(self, count: int) -> int:
        if self._at < len(self.path):
            decision = self.path[self._at]
        else:
            values = [*range(count if self._stale_left else 1)]
            decision = Decision(values, 0, {*values}, is_program=False)
            self.path.append(decision)
        self._at += 1
        self._stale_left -= decision.taken > 0
        return decision.taken


class StepChecker(Checker):
    """A checker that also notes which words each step touches."""

    explorer: Explorer

    def atomic(
        self, program: Program, touch: Touch, op: str, sem: str, *more: Any, **named: Any
    ) -> None:
        super().atomic(program, touch, op, sem, *more, **named)
        before, after = more[-2:]
        step = self.explorer.current
        words = {word for address in touch.addresses.flat for word in self._words(address, touch)}
        (step.writes if before != after or sem in RELEASES else step.reads).update(words)
        step.last = (program, op, touch.addresses.tobytes())
        step.first = step.first or step.last

    def _words(self, address: Any, touch: Touch) -> Iterator[tuple]:
        """Name what an atomic touches, the same in every run: addresses are not."""
        start, end = int(address), int(address) + touch.size
        region = touch.region or self._memory.find(start, end)
        assert region is not None
        for word in range((start - region.start) >> 2, (end - region.start + 3) >> 2):
            yield region.rank, region.name, word


class Interleavings:
    """The tree of all runs, explored depth first."""

    def __init__(self) -> None:
        self.path: list[Decision] = []
        self.runs = 0
        self.redundant = 0
        self.is_complete = False

    def finish(self, is_redundant: bool) -> None:
        """Learn from the run that has ended, and go to the next decision that is left."""
        self.runs += not is_redundant
        self.redundant += is_redundant
        _find_reversals([d for d in self.path if d.is_program])
        while self.path:
            decision = self.path[-1]
            decision.done[decision.taken] = decision.footprint
            if decision.left:
                decision.taken = decision.left[0]
                return
            self.path.pop()
        self.is_complete = True

    def decisions(self) -> list[int]:
        """Return the path of the last run: it replays it."""
        return [decision.options.index(decision.taken) for decision in self.path]

    def share(self) -> float:
        """Return how much of the known tree is done."""
        part, done = 1.0, 0.0
        for decision in self.path:
            known = len(decision.todo | decision.done.keys())
            done += part * len(decision.done) / known
            part /= known
        return 1.0 if self.is_complete else done


def _find_reversals(steps: list[Decision]) -> None:
    """Add a decision wherever two dependent steps could have come the other way round."""
    prints = [_without_failed_polls(steps, place) for place in range(len(steps))]
    clocks: list[dict[Name, int]] = []  # per step: the latest step of each program before it
    latest: dict[Name, dict[Name, int]] = {}
    for place, step in enumerate(steps):
        known = dict(latest.get(step.taken, {}))
        for before in range(place - 1, -1, -1):
            other = steps[before]
            if other.taken == step.taken or not prints[before].depends(prints[place]):
                continue
            if known.get(other.taken, -1) >= before or _comes_earlier(other.taken, step.taken):
                continue
            if step.taken in other.options:
                other.todo.add(step.taken)
            elif step.taken not in steps[before + 1].options:  # else `before` has enabled it
                other.todo.update(other.options)
            for name, at in clocks[before].items():
                known[name] = max(known.get(name, -1), at)
        known[step.taken] = place
        clocks.append(known)
        latest[step.taken] = known


def _without_failed_polls(steps: list[Decision], place: int) -> Touched:
    """Return what a step did, and nothing if it only polled and polled again."""
    mine = steps[place].footprint
    if mine.writes or mine.first != mine.last:
        return mine
    later = (s.footprint for s in steps[place + 1 :] if s.taken == steps[place].taken)
    repeated = next((f.first for f in later if f.first is not None), None)
    return Touched() if repeated == mine.last else mine


def _comes_earlier(one: Name, other: Name) -> bool:
    """Return whether a kernel of the rank has ended before the other's begins."""
    return one[0] == other[0] and one[1] < other[1]


@dataclass
class Coverage:
    """What was found, and how much of all that can happen was looked at."""

    report: Report
    runs: int  # inequivalent interleavings
    redundant: int  # runs that were cut short, as equivalent to an earlier one
    is_complete: bool
    share: float  # of the decisions that are known
    seconds: float

    def __str__(self) -> str:
        how = "all of them" if self.is_complete else f"about {self.share:.1%} of those known so far"
        return (
            f"{self.runs} inequivalent interleavings, {how}, in {self.seconds:.0f} s "
            f"({self.redundant} more runs were cut short as equivalent).\n"
            "covered: the order of all atomics of programs that are dependent, and up to "
            f"{_MOST_STALE} atomics per run that read an older value.\n"
            "not covered: other inputs; hosts that are late (they run first here); fewer resident "
            "programs; waits that run out.\n" + str(self.report)
        )


def check_all(
    fn: Callable[[World], Any],
    world_size: int,
    num_sms: int = 0,
    heap_size: int = 0,
    seconds: float = 300.0,
    strict: bool = False,
    show: Callable[[int, int, str], None] = lambda *_: None,
) -> Coverage:
    """Run `fn` once for each inequivalent interleaving, or until the time is over."""
    tree, report, begin = Interleavings(), Report(), time.monotonic()
    while not tree.is_complete and (left := begin + seconds - time.monotonic()) > 0:
        show(tree.runs, 0, f"at most {left:.0f} s left")
        schedule = Explorer(tree.path)
        machine = Machine(schedule, num_sms or knobs.num_sms.get(), expire=False)
        if report.zeros:
            machine.undefined = Undefined(machine, poisoned=())
        checker = StepChecker(machine.memory, schedule.pick)
        checker.explorer = schedule
        try:
            found = run_on(machine, checker, fn, world_size, heap_size, strict=strict)
        except Redundant:
            tree.finish(is_redundant=True)
            continue
        token = PathSchedule(tree.decisions()).token
        if machine.failure is not None and machine.undefined.loads and not report.zeros:
            again = check_once(fn, world_size, token, num_sms, heap_size, strict=strict)
            if again.zeros:  # all runs, then
                tree, report = Interleavings(), again
                continue
        for finding in (*found.findings, *found.remarks):
            finding.token = token
        report.merge(found)
        tree.finish(is_redundant=False)
    took = time.monotonic() - begin
    return Coverage(report, tree.runs, tree.redundant, tree.is_complete, tree.share(), took)


_PROGRAMS, _CALLS = 2, 2


def small_calls(target: str, size: int) -> dict[str, Callable[[World], Any]]:
    """Return a function for each algorithm of an op: two calls back to back, two programs each.

    There are too many interleavings of all that `check` runs otherwise.
    """
    return {
        algorithm.name: _calls(algorithm.module, algorithm.module.cases(size)[0])
        for algorithm in resolve(target).algorithms
    }


def _calls(op: ModuleType, problem: Any) -> Callable[[World], Any]:
    def run(world: World) -> None:
        given = [op.inputs(world, problem, seed) for seed in range(_CALLS)]
        answers = [expected(world, op, problem, each) for each in given]
        outs = [output(world, want) for want in answers]
        world.barrier()  # all inputs and outputs are there
        plan = op.plan(world, problem, _small(op, problem))
        for each, out in zip(given, outs, strict=True):
            plan(*each, out)
        for out, want in zip(outs, answers, strict=True):
            torch.testing.assert_close(out.cpu(), want)

    return run


def _small(op: ModuleType, problem: Any) -> Any:
    """Return the default for two programs, with tiles so small that each has a few to move."""
    config = op.default(problem, _PROGRAMS)
    names = {each.name for each in fields(config)}
    few = {"programs": _PROGRAMS} if "programs" in names else {}
    least = max(32, 1 << (op.cost(problem).read_bytes // 16).bit_length())
    blocks = [least << n for n in range(6)] if "block" in names else []
    configs = [replace(config, **few, block=block) for block in blocks]
    allowed = (each for each in configs if op.valid(problem, each) is None)
    return next(allowed, replace(config, **few))
