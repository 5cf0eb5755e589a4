"""`check --mutate`: the checker must object to every mutant of an op's synchronisation.

A kill is a race, a deadlock, a wrong result, a proxy fault, an unwritten read or a bad access; an
error of the tool is not. What survives is either not needed (remove it) or a hole in the checker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ...checker.mutants import Mutant, mutants
from ...interpreter.interpreter import recorded, replaced
from ...world.world import World
from .schedules import Report, check

__all__ = ["Outcome", "find_mutants", "mutate"]

KILLS = ("race", "deadlock", "wrong result", "proxy", "unwritten", "bad access")


@dataclass(frozen=True)
class Outcome:
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
) -> Iterator[Outcome]:
    """Check each mutant until the first objection, or for all schedules."""
    for mutant in found:
        with replaced(mutant.function, mutant.tree):
            report = check(
                fn, world_size, schedules, seed, num_sms, stop_early=True, link=link
            )  # fmt: skip
        kinds = [f.kind for f in report.findings if f.kind in KILLS]
        yield Outcome(mutant, kinds[0] if kinds else "", report)
