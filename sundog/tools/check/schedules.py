"""`check`: run a rank's function under many schedules with the race checker on.

    report = check(fn, world_size=4, schedules=50)
    assert not report.findings, report

Half of the schedules are random, half PCT (see machine/schedule.py). Every finding carries the
token of the schedule that showed it first; `check_once(fn, world_size, schedule=token)` replays it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ... import knobs
from ...backends.sim import simulate
from ...callsite import relative
from ...checker.findings import Finding
from ...checker.races import Checker
from ...errors import BadAccess, CannotInterpret, Deadlock, SundogError, WaitTimeout
from ...machine.machine import Machine
from ...machine.schedule import from_token
from ...world.world import World

__all__ = ["Report", "check", "check_once", "tokens"]

CANNOT_INTERPRET = "cannot be interpreted"
_HEAP = 16 << 20


@dataclass
class Report:
    """What a check found, each kind and pair of source lines once."""

    findings: list[Finding] = field(default_factory=list)
    schedules: int = 0
    first_schedule: int | None = None  # how many it took to find something
    trace: list[tuple] | None = None
    results: list[Any] = field(default_factory=list)  # of the last schedule, by rank

    def merge(self, other: Report) -> None:
        self.schedules += other.schedules
        known = {finding.key(): finding for finding in self.findings}
        for finding in other.findings:
            if finding.key() in known:
                known[finding.key()].count += finding.count
            else:
                self.findings.append(finding)
        if self.findings and self.first_schedule is None:
            self.first_schedule = self.schedules
        self.results = other.results

    def __str__(self) -> str:
        if not self.findings:
            return f"no findings in {self.schedules} schedules"
        head = f"{len(self.findings)} findings in {self.schedules} schedules"
        return "\n\n".join([head, *(str(finding) for finding in self.findings)])


def check(
    fn: Callable[[World], Any],
    world_size: int,
    schedules: int = 50,
    seed: int = 0,
    num_sms: int = 0,
    heap_size: int = 0,
    stop_early: bool = False,
    link: str = "",
) -> Report:
    """Run `fn` once per schedule and collect what is wrong. `stop_early`: the first is enough."""
    report = Report()
    for token in tokens(schedules, seed):
        report.merge(check_once(fn, world_size, token, num_sms, heap_size, link=link))
        if stop_early and report.findings:
            break
    return report


def tokens(schedules: int, seed: int) -> Iterator[str]:
    """Random and PCT in turn, PCT of depth 2 to 4."""
    for place in range(schedules):
        number = seed + place // 2
        yield f"random:{number}" if place % 2 == 0 else f"pct:{number}:{2 + place // 2 % 3}"


def check_once(
    fn: Callable[[World], Any],
    world_size: int,
    schedule: str = "random:0",
    num_sms: int = 0,
    heap_size: int = 0,
    trace: bool = False,
    link: str = "",
) -> Report:
    """One schedule. What a rank or a kernel raises is a finding, sys.exit too; Ctrl-C is not."""
    machine = Machine(from_token(schedule), num_sms or knobs.num_sms.get(), expire=False)
    machine.checker = Checker(machine.memory)
    machine.checker.trace = [] if trace else None
    with _no_garbage_collection():
        nbytes = heap_size or knobs.heap_size.get() or _HEAP
        simulate(machine, fn, world_size, nbytes, link=link)
    machine.checker.ask_compiler()
    findings = list(machine.checker.findings.values())
    if machine.failure is not None:
        findings.append(_failure(machine))
    for finding in findings:
        finding.token = finding.token or schedule
    return Report(findings, 1, None, machine.checker.trace, [h.result for h in machine.hosts])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The checker's states and clocks live as long as the run: looking through them costs 15 %."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _failure(machine: Machine) -> Finding:
    error = machine.failure
    assert error is not None
    if not isinstance(error, Exception | SystemExit):
        raise error
    rank = next((host.rank for host in machine.hosts if host.error is error), None)
    who = f"rank {rank}: " if rank is not None else ""
    if isinstance(error, Deadlock):
        return Finding("deadlock", "", str(error), suggestion="Follow the waits above.")
    if isinstance(error, CannotInterpret):
        return Finding("error", CANNOT_INTERPRET, str(error))
    if isinstance(error, BadAccess):
        return Finding("bad access", "", str(error))
    if isinstance(error, WaitTimeout):  # no wait runs out in a check: this one left too early
        return Finding("wrong result", "", str(error))
    if isinstance(error, AssertionError):
        return Finding("wrong result", "", f"{who}{_where(error)}: {error}")
    kind = type(error).__name__
    text = str(error) if isinstance(error, SundogError) else f"{kind}: {error}"
    return Finding("error", "", f"{who}{_where(error)}: {text}")


def _where(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{relative(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else "?"
