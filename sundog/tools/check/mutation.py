"""`check --mutate`: the checker must object to every mutant of an op's synchronisation.

A kill is a race, a deadlock, a wrong result, a proxy fault, an unwritten read or a bad access; an
error of the tool is not. What survives is either not needed (remove it), or a hole in the checker,
or equivalent: it changes nothing here. The file of an op lists its equivalent mutants by name, each
with the reason, and the list is checked too:

    ACCEPT = {"barrier_ranks: tl.debug_barrier(): dropped": "this kernel has no tiles to order"}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ...checker.failures import ERROR
from ...checker.mutants import Mutant, mutants
from ...checker.rules import OBJECTIONS
from ...interpreter.interpreter import recorded, replaced
from ...world.world import World
from .._pool import Failure
from .forked import each_forked
from .schedules import Report, check

__all__ = ["Outcome", "Verdicts", "accepted_by", "find_mutants", "judge", "mutate"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mutant."""

    name: str  # "function: what", and "#2" where a function has it a second time
    mutant: Mutant
    killed_by: str  # the kind of the finding, "" if it survived
    report: Report


def find_mutants(
    fn: Callable[[World], Any], world_size: int, num_sms: int = 0, link: str = ""
) -> tuple[list[Mutant], Report]:
    """Run once, unchanged, and make the mutants of all that ran."""
    with recorded() as functions:
        report = check(fn, world_size, schedules=2, num_sms=num_sms, link=link)
    return mutants(functions), report


def mutate(
    fn: Callable[[World], Any],
    world_size: int,
    found: list[Mutant],
    schedules: int = 50,
    seed: int = 0,
    num_sms: int = 0,
    link: str = "",
    strict: bool = True,
) -> Iterator[Outcome]:
    """Check each mutant until the first objection, or for all schedules; in no certain order.

    `strict`: a remark is an objection too. Not where the kernel itself has some.
    """
    names = list(_names(found))

    def check_mutant(number: int) -> tuple[str, Report]:
        with replaced(found[number].function, found[number].tree):
            report = check(
                fn, world_size, schedules, seed, num_sms, stop_early=True, link=link, strict=strict
            )  # fmt: skip
        report.results = []  # they would go through a pipe for nothing
        kinds = [f.kind for f in report.findings if f.kind in OBJECTIONS]
        return kinds[0] if kinds else "", report

    for number, reply in each_forked(check_mutant, len(found)):
        if isinstance(reply, Failure):
            reply = "", Report([ERROR.finding(reply.error)])
        yield Outcome(names[number], found[number], *reply)


def _names(found: list[Mutant]) -> Iterator[str]:
    seen: Counter[str] = Counter()
    for mutant in found:
        name = f"{mutant.function.fn.__name__}: {mutant.what}"
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
