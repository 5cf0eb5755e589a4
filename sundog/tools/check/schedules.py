"""`check`: run a rank's function under many schedules with the race checker on.

    report = check(fn, world_size=4, schedules=50)
    assert not report.findings, report

The schedules are random, PCT and PCT of whole ranks by turns (see machine/schedule.py), those of
kernels whose loops change memory are also such as look for a livelock (machine/rounds.py). Unless
`num_sms` says how many, the number of resident programs varies too. Every finding carries the token
of the schedule that showed it first; `check_once(fn, world_size, schedule=token)` replays it.
"""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from ... import knobs
from ...backends.sim import simulate
from ...checker import failures
from ...checker.checker import Checker
from ...checker.failures import undefined_lanes
from ...checker.findings import Finding
from ...machine.machine import Machine
from ...machine.schedule import from_token
from ...machine.undefined import Stack, Undefined
from ...world.world import World

CANNOT_INTERPRET = failures.CANNOT_INTERPRET.name
_HEAP = 16 << 20


@dataclass
class Report:
    """What a check found, each kind and pair of source lines once."""

    findings: list[Finding] = field(default_factory=list)
    remarks: list[Finding] = field(default_factory=list)  # errors for who asks for strictness
    schedules: int = 0
    first_schedule: int | None = None  # how many it took to find something
    results: list[Any] = field(default_factory=list)  # of the last schedule, by rank
    notes: list[str] = field(default_factory=list)  # what could not be looked at
    steps: int = 0  # of the first schedule: how often it chose who runs next
    widest: int = 0  # and how many programs its largest kernel has
    spins: bool = False  # does a `while` loop change memory?
    atomics: set[tuple[str, int, str, str]] = field(default_factory=set)  # file, line, sem, scope
    zeros: bool = False  # does the result rely on them in undefined lanes?

    def merge(self, other: Report) -> None:
        self.schedules += other.schedules
        _add(self.findings, other.findings)
        _add(self.remarks, other.remarks)
        if self.findings and self.first_schedule is None:
            self.first_schedule = self.schedules
        self.results = other.results
        self.atomics |= other.atomics
        self.steps, self.widest = self.steps or other.steps, self.widest or other.widest
        self.spins |= other.spins
        self.zeros |= other.zeros
        self.notes += [note for note in other.notes if note not in self.notes]

    def __str__(self) -> str:
        found = _counted(len(self.findings), "finding") if self.findings else "no findings"
        head = f"{found} in {_counted(self.schedules, 'schedule')}"
        notes = [f"note: {note}" for note in self.notes]
        if self.remarks:
            notes.append(f"{_counted(len(self.remarks), 'remark')}; --strict makes remarks errors:")
        parts = [head, *map(str, self.findings), *notes, *map(str, self.remarks)]
        return "\n\n".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _add(findings: list[Finding], new: list[Finding]) -> None:
    known = {finding.key(): finding for finding in findings}
    for finding in new:
        if finding.key() in known:
            known[finding.key()].absorb(finding)
        else:
            findings.append(finding)


def check(
    fn: Callable[[World], Any],
    world_size: int,
    schedules: int = 50,
    seed: int = 0,
    num_sms: int = 0,
    heap_size: int = 0,
    stop_early: bool = False,
    link: str = "",
    strict: bool = False,
) -> Report:
    """Run `fn` once per schedule and collect what is wrong. `stop_early`: the first is enough."""
    report = Report()
    for token in tokens(schedules, seed, report, num_sms):
        how = num_sms, heap_size, link, strict, report.zeros
        report.merge(check_once(fn, world_size, token, *how))
        if stop_early and report.findings:
            break
    return report


def tokens(schedules: int, seed: int, report: Report, num_sms: int = 0) -> Iterator[str]:
    """Yield random, PCT and PCT of ranks by turns, with a depth of 2 to 4.

    Merge each run into the report: its first one shows how long the window of PCT should be, and
    how many programs a kernel has. All are resident in half of the runs; in the others 1, 2 or all
    but one are, unless `num_sms` is given. If a loop changes memory, half of the runs look for a
    livelock: others may keep such a loop going.
    """
    for place in range(schedules):
        if report.spins and place % 4 > 1:
            yield f"rounds:{seed + place // 4 * 2 + place % 2}"
            continue
        kind, number = ("random", "pct", "ranks")[place % 3], seed + place // 3
        token = f"{kind}:{number}"
        if kind != "random":
            token += f":{2 + place // 3 % 3}:{report.steps}"
        few = (1, 2, report.widest - 1)[place // 2 % 3] if place % 2 and not num_sms else 0
        yield f"{token}@{few}" if 0 < few < report.widest else token


def check_once(
    fn: Callable[[World], Any],
    world_size: int,
    schedule: str = "random:0",
    num_sms: int = 0,
    heap_size: int = 0,
    link: str = "",
    strict: bool = False,
    zeros: bool = False,
) -> Report:
    """Run one schedule. What a rank or kernel raises, sys.exit too, is a finding; Ctrl-C is not.

    `zeros`: fill undefined lanes with them, since it is known that the result relies on that.
    """

    def run(poisoned: Collection[Stack] | None) -> tuple[Machine, Report]:
        machine = Machine(from_token(schedule), num_sms or knobs.num_sms.get(), expire=False)
        machine.undefined = Undefined(machine, poisoned)
        checker = Checker(machine.memory, machine.schedule.pick)
        with _no_garbage_collection():
            report = run_on(machine, checker, fn, world_size, heap_size, link, strict)
            checker.forget()
        return machine, report

    machine, report = run(() if zeros else None)
    if zeros or not machine.undefined.loads or machine.failure is None:
        return report
    with redirect_stdout(io.StringIO()):
        return _with_zeros(run, machine.undefined.loads, strict) or report


def _with_zeros(
    run: Callable[[Collection[Stack]], tuple[Machine, Report]],
    loads: dict[Stack, Any],
    strict: bool,
) -> Report | None:
    """Run again with zeros in undefined lanes, and say which loads need them; None if it fails."""
    again, as_compiled = run(())
    if again.failure is not None:
        return None
    blamed = _blame([*loads], lambda some: run(some)[0].failure is not None)
    remarks = [undefined_lanes(stack, *loads[stack]) for stack in blamed]
    for remark in remarks:
        remark.token = again.schedule.token
    _add(as_compiled.findings if strict else as_compiled.remarks, remarks)
    as_compiled.zeros = True
    return as_compiled


def _blame(loads: list[Stack], fails: Callable[[list[Stack]], bool]) -> list[Stack]:
    """Return the loads whose undefined lanes matter, each alone; all, if only together."""
    if len(loads) == 1:
        return loads
    half = len(loads) // 2
    parts = [part for part in (loads[:half], loads[half:]) if fails(part)]
    return [load for part in parts for load in _blame(part, fails)] or loads


def run_on(
    machine: Machine,
    checker: Checker,
    fn: Callable[[World], Any],
    world_size: int,
    heap_size: int = 0,
    link: str = "",
    strict: bool = False,
) -> Report:
    """Do the same on a machine and with a checker that were made for it."""
    machine.checker = checker
    with _no_garbage_collection():
        nbytes = heap_size or knobs.heap_size.get() or _HEAP
        simulate(machine, fn, world_size, nbytes, link=link)
    notes = checker.ask_compiler()
    findings = list(checker.findings.values())
    if _is_refused(machine):
        notes.append(f"not run with {machine.schedule.residents} resident: {machine.failure}")
    elif machine.failure is not None:
        findings.append(_failure(machine, checker))
    for finding in findings:
        finding.token = finding.token or machine.schedule.token
    results = [host.result for host in machine.hosts]
    steps, widest = machine.schedule.step, checker.widest
    remarks = [] if strict else [finding for finding in findings if finding.is_strict]
    findings = [finding for finding in findings if finding not in remarks]
    return Report(
        findings, remarks, 1, None, results, notes, steps, widest,
        machine.repeats.spins, checker.atomics(),
    )  # fmt: skip


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Switch it off. The checker's states live as long as the run, and scanning them costs 15 %."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_refused(machine: Machine) -> bool:
    """Return whether a host refused to run with few resident programs: no fault of a kernel."""
    error = machine.failure
    is_hosts = any(host.error is error for host in machine.hosts)
    return machine.schedule.residents > 0 and is_hosts and isinstance(error, ValueError)


def _failure(machine: Machine, checker: Checker) -> Finding:
    error = machine.failure
    if not isinstance(error, Exception | SystemExit):
        assert error is not None
        raise error
    rank = next((host.rank for host in machine.hosts if host.error is error), None)
    all_started = not machine.streams.not_started()
    stale, torn = checker.stale_reads(), checker.torn_reads()
    return failures.find_failure(error, rank, stale, all_started, torn)
