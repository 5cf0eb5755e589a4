"""`check --mutate`: the checker must object to every mutant of an op's synchronisation.

A kill is a race, a deadlock, a wrong result, a proxy fault, an unwritten read or a bad access; an
error of the tool is not. What survives is either not needed (remove it), or a hole in the checker,
or equivalent: it changes nothing here. The file of an op lists its equivalent mutants by name, each
with the reason, and the list is checked too:

    ACCEPT = {"barrier_ranks: tl.debug_barrier(): dropped": "this kernel has no tiles to order"}
"""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ...callsite import relative
from ...checker.failures import ERROR, WRONG_RESULT
from ...checker.mutants import Mutant, idle_atomics, mutants
from ...checker.rules import OBJECTIONS
from ...interpreter.interpreter import recorded
from ...world.world import World
from .._pool import Failure, each_forked
from .schedules import Report, check, check_once, tokens

Site = tuple[str, int, str]  # file, line and function
_LIBRARY = "sundog."


@dataclass(frozen=True)
class HostMutant:
    """A rank's function without one of its barriers.

    A host is Python, not a kernel, so the barrier is replaced and not the source: the mutant's does
    nothing where it is called from that line. Barriers that sundog itself calls are not mutated.
    """

    site: Site

    @property
    def owner(self) -> str:
        return self.site[2]

    @property
    def what(self) -> str:
        return f"{self._line}: dropped"

    @property
    def where(self) -> str:
        return f"{relative(self.site[0])}:{self.site[1]}"

    @property
    def diff(self) -> str:
        return f"--- {self.where}\n+++ mutant\n-{self._line}\n+pass"

    @property
    def _line(self) -> str:
        return linecache.getline(self.site[0], self.site[1]).partition("#")[0].strip()

    def applied(self) -> Any:
        """Run hosts as this mutant."""
        return _watched(lambda site: site != self.site)


AnyMutant = Mutant | HostMutant


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutant."""

    name: str  # "function: what", and "#2" where a function has it a second time
    mutant: AnyMutant
    killed_by: str  # the kind of the finding, "" if it survived
    report: Report


def find_mutants(
    fn: Callable[[World], Any], world_size: int, num_sms: int = 0, link: str = ""
) -> tuple[list[AnyMutant], Report]:
    """Run twice, unchanged, and make the mutants of all that ran. The report has the results."""
    with recorded() as functions, barriers() as hosts:
        first = check_once(fn, world_size, num_sms=num_sms, link=link)
        report = check(fn, world_size, schedules=2, num_sms=num_sms, link=link)
    if not same(first.results, report.results):
        report.results = []  # they depend on the schedule, so they say nothing about a mutant
    report.notes += idle_atomics(functions, report.atomics)
    return [*mutants(functions, report.atomics), *hosts], report


def mutate(
    fn: Callable[[World], Any],
    world_size: int,
    found: Sequence[AnyMutant],
    schedules: int = 50,
    seed: int = 0,
    num_sms: int = 0,
    link: str = "",
    strict: bool = True,
    expected: Sequence[Any] = (),
) -> Iterator[Outcome]:
    """Check each mutant until the first objection, or for all schedules; in no certain order.

    `strict`: a remark is an objection too. Not where the kernel itself has some. `expected`: what
    the ranks return, if that does not depend on the schedule.
    """
    names = list(_names(found))

    def check_mutant(number: int) -> tuple[str, Report]:
        report, kind = Report(), ""
        with found[number].applied():
            for token in tokens(schedules, seed, report, num_sms):
                how = num_sms, 0, link, strict, report.zeros
                once = check_once(fn, world_size, token, *how)
                report.merge(once)
                kind = _objection(report, once, expected)
                if kind or report.findings:
                    break
        report.results, report.atomics = [], set()  # they would go through a pipe for nothing
        return kind, report

    for number, reply in each_forked(check_mutant, len(found)):
        if isinstance(reply, Failure):
            reply = "", Report([ERROR.finding(reply.error)])
        yield Outcome(names[number], found[number], *reply)


def _objection(report: Report, latest: Report, expected: Sequence[Any]) -> str:
    """Return the kind of finding that kills the mutant after its latest schedule, or ""."""
    if not latest.findings and expected and not same(latest.results, expected):
        return WRONG_RESULT.kind
    return next((f.kind for f in report.findings if f.kind in OBJECTIONS), "")


def same(first: Any, second: Any) -> bool:
    """Return whether two results of ranks are equal, tensors bit by bit; unknown objects are."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return not isinstance(first, int | float | str) or first == second


def _names(found: Sequence[AnyMutant]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for mutant in found:
        name = f"{mutant.owner}: {mutant.what}"
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name} #{seen[name]}"


@dataclass(frozen=True)
class Verdicts:
    """Outcomes against the ACCEPT of the op's file."""

    survived: list[Outcome] = field(default_factory=list)
    accepted: dict[str, str] = field(default_factory=dict)  # by name: the reason
    outdated: list[str] = field(default_factory=list)  # entries of ACCEPT, with what is wrong


def accepted_by(modules: Iterable[ModuleType]) -> dict[str, str]:
    """Read the ACCEPT of the files that a target is in; a ValueError if one has no reason."""
    found: dict[str, str] = {}
    for module in modules:
        entries = getattr(module, "ACCEPT", {})
        if not isinstance(entries, dict):
            raise ValueError(f"{module.__name__}.ACCEPT: expected a dict of mutants and reasons")
        for name, reason in entries.items():
            if not isinstance(reason, str) or not reason.strip():
                raise ValueError(f"{module.__name__}.ACCEPT[{name!r}] has no reason")
            found[name] = reason
    return found


def judge(outcomes: Iterable[Outcome], accept: dict[str, str]) -> Verdicts:
    """Sort the outcomes. An accepted mutant that is killed, or gone, is an outdated entry."""
    verdicts = Verdicts()
    left = dict(accept)
    for outcome in outcomes:
        reason = left.pop(outcome.name, None)
        if not outcome.killed_by and reason is None:
            verdicts.survived.append(outcome)
        elif not outcome.killed_by and reason is not None:
            verdicts.accepted[outcome.name] = reason
        elif reason is not None:
            why = f"the checker kills it ({outcome.killed_by}), so it is not equivalent"
            verdicts.outdated.append(f"{outcome.name!r}: {why}")
    verdicts.outdated.extend(f"{name!r}: there is no such mutant" for name in left)
    return verdicts


# hosts: `world.barrier()` left out, one call at a time, on all ranks


@contextmanager
def barriers() -> Iterator[list[HostMutant]]:
    """Collect the mutants of the hosts that run inside."""
    found: dict[Site, None] = {}

    def look(site: Site) -> bool:
        found[site] = None
        return True

    hosts: list[HostMutant] = []
    with _watched(look):
        yield hosts
    hosts.extend(HostMutant(site) for site in found)


@contextmanager
def _watched(look: Callable[[Site], bool]) -> Iterator[None]:
    """Ask `look` for every barrier of the ranks' own code whether it is to be made."""
    original = World.barrier

    def barrier(self: World, *given: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        module = f"{frame.f_globals.get('__name__', '')}."
        site = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        if module.startswith(_LIBRARY) or look(site):
            return original(self, *given, **named)
        return None

    World.barrier = barrier  # type: ignore[method-assign]
    try:
        yield
    finally:
        World.barrier = original  # type: ignore[method-assign]
