"""Cases of other people's suites: what they expect, what we find, and why the two differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from time import process_time

from ..result_files import Figures


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
    start = process_time()
    try:
        found, reason = case.find(), ""
    except ValueError as error:
        found, reason = "", str(error)
    if found and found != case.expected:
        reason = case.known
    seconds = round(process_time() - start, 4)
    return Verdict(case.suite, case.name, case.expected, found, reason, seconds)


KINDS = ("agrees", "differs, with a reason", "differs", "not expressible")


def counts(verdicts: Iterable[Verdict]) -> dict[str, dict[str, float]]:
    """Count the kinds of verdicts, and seconds, by suite."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys((*KINDS, "seconds"), 0))
    for verdict in verdicts:
        row = found[verdict.suite]
        row[verdict.kind] += 1
        row["seconds"] += verdict.seconds
    return dict(found)


def show(verdicts: list[Verdict], path: str) -> None:
    """Print the table and each case that differs; with a path, write every verdict."""
    rows = []
    for suite, row in counts(verdicts).items():
        numbers = [int(row[kind]) for kind in KINDS]
        rows.append([suite, str(sum(numbers)), *map(str, numbers), f"{row['seconds']:.1f}"])
    seconds = sum(verdict.seconds for verdict in verdicts)
    agree = sum(verdict.kind == "agrees" for verdict in verdicts)
    text = (
        f"{agree:,} of {len(verdicts):,} cases agree, in {seconds:.0f} s of CPU time. "
        "docs/suites.md has the reasons for the others."
    )
    head = ["suite", "cases", *KINDS, "seconds"]
    cases = [asdict(verdict) | {"verdict": verdict.kind} for verdict in verdicts]
    Figures("Other people's test suites", text, head, rows).show(path, on_cpu=True, cases=cases)
    for verdict in verdicts:
        if verdict.kind.startswith("differs"):
            reason = verdict.reason or "no reason is known"
            print(f"{verdict.suite}: {verdict.name}: {verdict.expected} expected,", end=" ")
            print(f"{verdict.found} found: {reason}")
