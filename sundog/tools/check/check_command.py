"""`sundog check`: run the schedules and mutants, print what they found, give the exit status."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, redirect_stdout, suppress
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...checker.failures import ERROR
from ...compat import provide
from ...compat.rank import as_rank
from ...ops.load import load_package
from ...world.world import World
from .._console import (
    CANNOT,
    FINE,
    FOUND,
    INTERRUPTED,
    command,
    progress,
    write_json,
    write_results,
)
from .._options import CheckOptions
from .._pool import Failure, each_forked, in_order
from .._subject import function_of, resolve
from .exhaustive import check_all, small_calls
from .mutation import Outcome, Verdicts, accepted_by, find_mutants, judge, mutate
from .schedules import CANNOT_INTERPRET, Report, check, check_once, tokens
from .space_time import content_of

_AT_ONCE = 16  # schedules


@command("check")
def run(options: CheckOptions) -> int:
    """Exit with 1 if something was found, or a mutant survived that no ACCEPT lists."""
    if options.corpus:
        return run_corpus(options)
    _check_options(options)
    if options.torch:
        provide(options.target)  # what the program may import
    function = function_of(options.target, options.ranks)
    if options.torch:
        function = as_rank(function, [options.target.rpartition(":")[0]])
    accept = accepted_by(resolve(options.target).modules) if options.mutate else {}
    console = Console(emoji=False)
    if options.exhaustive:
        found = small_calls(options.target, options.ranks) or {options.target: function}
        return _run_exhaustively(options, found, console)
    report = _check(options, function)
    whole = bool(options.schedule) or report.schedules == options.schedules
    outcomes: list[Outcome] = []
    if options.mutate and whole and not report.findings:
        outcomes, whole = _mutate(options, function, strict=not report.remarks)
    verdicts = judge(outcomes, accept if whole and outcomes else {})
    _write(options, [(function, report)], (outcomes, verdicts))
    console.print(escape(str(report)), highlight=False, soft_wrap=True)
    if options.mutate and (whole or outcomes):
        _print_mutants(console, report, outcomes, verdicts)
    if not whole:
        console.print(f"interrupted: {report.schedules} of {options.schedules} schedules tried")
        return INTERRUPTED
    if any(finding.rule == CANNOT_INTERPRET for finding in report.findings):
        return CANNOT
    nothing_to_kill = options.mutate and not outcomes
    bad = report.findings or verdicts.survived or verdicts.outdated or nothing_to_kill
    return FOUND if bad else FINE


def _run_exhaustively(
    options: CheckOptions, functions: dict[str, Callable[[World], Any]], console: Console
) -> int:
    """Exit with 1 if something was found, or if time ran out before all was looked at."""
    covered, checked, status = [], [], FINE
    for name, function in functions.items():
        with progress() as show, _quiet():  # a bar takes what is printed
            given = function, options.ranks, options.sms, 0, options.seconds, options.strict
            coverage = check_all(*given, partial(show, f"interleavings of {name}"))
        covered.append(f"{name}: {coverage}".split("\n")[0])
        checked.append((function, coverage.report))
        console.print(escape(f"{name}: {coverage}"), highlight=False, soft_wrap=True)
        if not coverage.is_complete or coverage.report.findings:
            status = FOUND
    _write(options, checked, ([], Verdicts()), "\n".join(covered))
    return status


def _check_options(options: CheckOptions) -> None:
    if options.ranks < 1 or options.schedules < 1 or options.sms < 0:
        raise ValueError("--world and --schedules must be at least 1, and --sms not negative")
    if not options.target:
        raise ValueError("name an op, a module or a file: sundog check examples/ring.py")


def _check(options: CheckOptions, function: Callable[[World], Any]) -> Report:
    """Check all schedules, until Ctrl-C. What the function prints is shown for the first one."""
    if options.schedule:
        return check_once(
            function, options.ranks, options.schedule, options.sms, strict=options.strict
        )
    report = Report()
    with progress() as show, suppress(KeyboardInterrupt):
        for once in _each_schedule(options, function, report):
            report.merge(once)
            found = f"{len(report.findings)} findings"
            show("schedules", report.schedules, options.schedules, found)
    return report


def _each_schedule(
    options: CheckOptions, function: Callable[[World], Any], report: Report
) -> Iterator[Report]:
    """Yield what each schedule shows, in order. The first runs here, the others on all CPUs.

    What the first ones have shown decides which the next ones are: on any machine the same.
    """

    def run(token: str) -> Report:
        how = options.sms, 0, "", options.strict, report.zeros
        return check_once(function, options.ranks, token, *how)

    def run_elsewhere(number: int) -> Report:
        with _quiet():
            once = run(batch[number])
        once.results = []  # they would go through a pipe for nothing
        return once

    left = tokens(options.schedules, options.seed, report, options.sms)
    yield run(next(left))
    while batch := list(itertools.islice(left, _AT_ONCE)):
        yield from map(_or_error, in_order(run_elsewhere, len(batch)))


def _or_error(reply: Report | Failure) -> Report:
    return (
        Report([ERROR.finding(reply.error)], schedules=1) if isinstance(reply, Failure) else reply
    )


def _mutate(
    options: CheckOptions, function: Callable[[World], Any], strict: bool
) -> tuple[list[Outcome], bool]:
    """Check the mutants, until Ctrl-C; return the outcomes, and whether all were tried."""
    outcomes: list[Outcome] = []
    with suppress(KeyboardInterrupt):
        with _quiet():
            found, unchanged = find_mutants(function, options.ranks, options.sms)
        given = options.ranks, found, options.schedules, options.seed, options.sms
        results = unchanged.results
        with progress() as show, _quiet():  # a bar takes what is printed
            for outcome in mutate(function, *given, strict=strict, expected=results):
                outcomes.append(outcome)
                survived = sum(not o.killed_by for o in outcomes)
                show("mutants", len(outcomes), len(found), f"{survived} survived")
        outcomes.sort(key=lambda outcome: found.index(outcome.mutant))
        return outcomes, True
    return outcomes, False


def _quiet() -> AbstractContextManager[Any]:
    return redirect_stdout(io.StringIO())


def _print_mutants(
    console: Console, report: Report, outcomes: list[Outcome], verdicts: Verdicts
) -> None:
    if report.findings:
        console.print("mutants not tried: the kernel itself must be clean first")
        return
    table = Table("killed by", "schedules", "where", "mutant")
    for outcome in outcomes:
        alive = "accepted" if outcome.name in verdicts.accepted else "[red]SURVIVED"
        tried = str(outcome.report.schedules)
        where, what = escape(outcome.mutant.where), escape(outcome.mutant.what)
        table.add_row(outcome.killed_by or alive, tried, where, what)
    console.print(table)
    for outcome in verdicts.survived:
        console.print(escape(f"{outcome.name}\n{outcome.mutant.diff}"), highlight=False)
    for name, reason in verdicts.accepted.items():
        console.print(escape(f"accepted: {name}: {reason}"), highlight=False, soft_wrap=True)
    for text in verdicts.outdated:
        console.print(escape(f"remove from ACCEPT {text}"), style="red", soft_wrap=True)
    num_killed = sum(bool(o.killed_by) for o in outcomes)
    more = f", {len(verdicts.accepted)} accepted" if verdicts.accepted else ""
    console.print(f"{num_killed} of {len(outcomes)} mutants killed{more}")
    if not outcomes:
        console.print("no mutants: the kernels do not synchronise at all")


def _write(
    options: CheckOptions,
    checked: list[tuple[Callable[[World], Any], Report]],
    mutants: tuple[list[Outcome], Verdicts],
    coverage: str = "",
) -> None:
    """Write what was found, and how the schedules that showed it went, for tools and people."""
    if options.json or options.html:
        with _quiet():
            content = content_of(options, checked, mutants, coverage)
        indent = None if content["runs"] else 1
        write_results(content, options.target, options.json, options.html, indent)


# --corpus: known wrong kernels, which must be found, and their twins, which are clean


class PairRow(NamedTuple):
    """The verdict on a pair."""

    name: str
    found: bool
    clean: bool
    needed: int  # schedules until the wrong one was found


@command("check --corpus")
def run_corpus(options: CheckOptions) -> int:
    """Check all pairs, two jobs for each, and print a table of both."""
    pairs = _load_pairs(options.corpus)
    jobs = _jobs(pairs)
    answers = _answer_all(list(jobs.values()), options)
    told = dict(zip(jobs, answers, strict=True))
    rows: dict[str, list[PairRow]] = {}
    for pair in pairs:
        found, needed = told["wrong", str(pair)]
        clean, _ = told["fixed", _twin(pair)]
        rows.setdefault(pair.family, []).append(PairRow(pair.name, found, clean, needed))
    _print_pairs(rows)
    if options.json:
        text = [
            {"family": family, "name": row.name, "found": row.found, "clean": row.clean}
            for family, results in rows.items()
            for row in results
        ]
        write_json(options.json, text, indent=1)
    good = all(row.found and row.clean for results in rows.values() for row in results)
    return FINE if good else FOUND


Job = Callable[[CheckOptions], tuple[bool, int]]  # as it must be, and the schedules it took


def _jobs(pairs: list[Any]) -> dict[tuple[str, Any], Job]:
    """Return two jobs for each pair. A twin that several wrong kernels share is checked once."""
    jobs: dict[tuple[str, Any], Job] = {}
    for pair in pairs:
        jobs["wrong", str(pair)] = partial(_search, pair)
        jobs["fixed", _twin(pair)] = partial(_check_twin, pair)
    return jobs


def _twin(pair: Any) -> Any:
    fixed = pair.fixed
    function = (fixed.func, fixed.args) if isinstance(fixed, partial) else fixed
    return function, pair.world_size, pair.num_sms


def _answer_all(jobs: list[Job], options: CheckOptions) -> list[tuple[bool, int]]:
    told: dict[int, tuple[bool, int]] = {}

    def answer(number: int) -> tuple[bool, int]:
        return jobs[number](options)

    with progress() as show:
        for number, reply in each_forked(answer, len(jobs)):
            if isinstance(reply, Failure):
                raise ValueError(f"job {number} of {options.corpus}: {reply.error}")
            told[number] = reply
            show("kernels", len(told), len(jobs), "")
    return [told[number] for number in range(len(jobs))]


def _search(pair: Any, options: CheckOptions) -> tuple[bool, int]:
    """Check a wrong kernel until it shows what it must: a wrong result may come before the race."""
    report = Report()
    for token in tokens(options.schedules, options.seed, report, pair.num_sms):
        report.merge(check_once(pair.wrong, pair.world_size, token, pair.num_sms))
        if any(finding.kind == pair.kind for finding in report.findings):
            return True, report.schedules
    return False, report.schedules


def _check_twin(pair: Any, options: CheckOptions) -> tuple[bool, int]:
    report = check(
        pair.fixed, pair.world_size, options.schedules, options.seed, pair.num_sms, stop_early=True
    )
    return not report.findings, report.schedules


def _print_pairs(rows: dict[str, list[PairRow]]) -> None:
    console = Console(emoji=False)
    table = Table("family", "wrong found", "twin clean", "schedules needed")
    for family, results in rows.items():
        found = f"{sum(row.found for row in results)} / {len(results)}"
        clean = f"{sum(row.clean for row in results)} / {len(results)}"
        needed = max(row.needed for row in results)
        table.add_row(escape(family), found, clean, str(needed))
    console.print(table)
    for family, results in rows.items():
        for row in results:
            if not (row.found and row.clean):
                fault = "is not found" if not row.found else "has a twin that is not clean"
                console.print(escape(f"{family}: {row.name} {fault}"), style="red", soft_wrap=True)


def _load_pairs(folder: str) -> list[Any]:
    if not os.path.exists(os.path.join(folder, "__init__.py")):
        raise ValueError(f"{folder} has no __init__.py with a list PAIRS")
    module = load_package(folder)
    if not hasattr(module, "PAIRS"):
        raise ValueError(f"{folder} has no list PAIRS")
    return list(module.PAIRS)
