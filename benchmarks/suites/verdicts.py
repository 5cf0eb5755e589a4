"""Cases of other people's suites: what they expect, what we find, and why the two differ."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

__all__ = ["Case", "Verdict", "judge", "show", "write"]


@dataclass(frozen=True)
class Case:
    """One case of a suite. `find` returns our verdict; ValueError says what is not expressible."""

    suite: str
    name: str
    expected: str
    find: Callable[[], str]
    known: str = ""  # why we differ, where we know that we do


@dataclass(frozen=True)
class Verdict:
    """What came out. Nothing found: the case is not expressible, and `reason` says why."""

    suite: str
    name: str
    expected: str
    found: str
    reason: str
    seconds: float

    @property
    def kind(self) -> str:
        if not self.found:
            return "not expressible"
        if self.found == self.expected:
            return "agrees"
        return "differs, with a reason" if self.reason else "differs"


def judge(case: Case) -> Verdict:
    """Run one case."""
    start = perf_counter()
    try:
        found, reason = case.find(), ""
    except ValueError as error:
        found, reason = "", str(error)
    if found and found != case.expected:
        reason = case.known
    seconds = round(perf_counter() - start, 4)
    return Verdict(case.suite, case.name, case.expected, found, reason, seconds)


KINDS = ("agrees", "differs, with a reason", "differs", "not expressible")


def counts(verdicts: Iterable[Verdict]) -> dict[str, dict[str, float]]:
    """Count the kinds of verdicts, and seconds, by suite."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(KINDS, 0))
    for verdict in verdicts:
        row = found[verdict.suite]
        row[verdict.kind] += 1
        row["seconds"] = round(row.get("seconds", 0) + verdict.seconds, 3)
    return dict(found)


def show(verdicts: list[Verdict]) -> None:
    """Print the table, and each case that differs."""
    table = Table("suite", "cases", *KINDS, "seconds")
    for suite, row in counts(verdicts).items():
        numbers = [int(row[kind]) for kind in KINDS]
        table.add_row(suite, str(sum(numbers)), *map(str, numbers), f"{row['seconds']:.1f}")
    Console(width=120).print(table)
    for verdict in verdicts:
        if verdict.kind.startswith("differs"):
            reason = verdict.reason or "no reason is known"
            print(f"{verdict.suite}: {verdict.name}: {verdict.expected} expected,", end=" ")
            print(f"{verdict.found} found: {reason}")


def write(path: str, verdicts: list[Verdict]) -> None:
    """Write every verdict."""
    cases = [asdict(verdict) | {"verdict": verdict.kind} for verdict in verdicts]
    Path(path).write_text(json.dumps({"suites": counts(verdicts), "cases": cases}, indent=1) + "\n")
