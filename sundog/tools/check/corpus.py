"""`check --corpus`: known wrong kernels, which must be found, and their twins, which are clean."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...ops.load import load_package
from .._console import FINE, FOUND, check_writable, command, progress, write_json
from .._pool import Failure, each_forked
from .check_command import CheckOptions
from .schedules import Report, check, check_once, tokens


class PairRow(NamedTuple):
    """The verdict on a pair."""

    name: str
    found: bool
    clean: bool
    needed: int  # schedules until the wrong one was found


@command("check --corpus")
def run_corpus(options: CheckOptions) -> int:
    """Check all pairs, two jobs for each, and print a table of both."""
    check_writable(options.json)
    pairs = _load_pairs(options.corpus)
    jobs = _jobs(pairs)
    answers = _answer_all(list(jobs.values()), options)
    told = dict(zip(jobs, answers, strict=True))
    rows: dict[str, list[PairRow]] = {}
    for pair in pairs:
        found, needed = told["wrong", str(pair)]
        clean, _ = told["fixed", _twin(pair)]
        rows.setdefault(pair.family, []).append(PairRow(pair.name, found, clean, needed))
    _print(rows)
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


def _print(rows: dict[str, list[PairRow]]) -> None:
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
