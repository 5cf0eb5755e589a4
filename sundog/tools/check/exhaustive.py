"""`check --exhaustive`: all interleavings of a small world's atomics, up to equivalence.

coverage = check_all(fn, world_size=2)
assert coverage.is_complete and not coverage.report.findings, coverage
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import knobs
from ...checker.interleavings import Interleavings, Redundant, StepChecker
from ...machine.machine import Machine
from ...machine.paths import PathSchedule
from ...world.world import World
from .schedules import Report, run_on

__all__ = ["Coverage", "check_all"]

_MOST_STALE = 2  # atomics of a run that read an older value: each adds a dimension


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
    most_stale: int = _MOST_STALE,
    link: str = "",
    strict: bool = False,
) -> Coverage:
    """Run `fn` once for each inequivalent interleaving, or until the time is over."""
    tree, report, begin = Interleavings(most_stale), Report(), time.monotonic()
    while not tree.is_complete and time.monotonic() - begin < seconds:
        schedule = tree.next_run()
        machine = Machine(schedule, num_sms or knobs.num_sms.get(), expire=False)
        checker = StepChecker(machine.memory, schedule.pick)
        checker.explorer = schedule
        try:
            found = run_on(machine, checker, fn, world_size, heap_size, link, strict)
        except Redundant:
            tree.finish(is_redundant=True)
            continue
        for finding in (*found.findings, *found.remarks):
            finding.token = PathSchedule(tree.decisions()).token
        report.merge(found)
        tree.finish(is_redundant=False)
    took = time.monotonic() - begin
    return Coverage(report, tree.runs, tree.redundant, tree.is_complete, tree.share(), took)
