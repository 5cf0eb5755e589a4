"""The wait-for report of a deadlock: who waits, for what, and who could end it."""

from __future__ import annotations

import linecache
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..callsite import relative
from ..errors import KernelError, SundogError
from .polling import is_kernel_file
from .tasks import Launch, Program

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Wait", "deadlock", "kernel_error"]

_SHOWN = 32
_COMPARE = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


@dataclass(frozen=True)
class Wait:
    """One program that waits, as numbers."""

    rank: int
    program: tuple[int, int, int]
    kernel: str
    flags: tuple[str, ...]  # allocation and index of each address that it polls
    seen: tuple[int, ...]
    expected: str  # the comparison that failed, "" if there was none
    stack: tuple[str, ...]  # file:line function, innermost first
    source: tuple[str, ...]  # the text of these lines
    owners: tuple[int, ...]  # ranks in whose memory the flags lie
    owes: int | None  # the rank that must signal, if sundog's own wait names it


def deadlock(machine: Machine) -> tuple[str, list[object]]:
    """The text for people, and the same as `Wait`s."""
    waits = [_wait(machine, program) for program in machine.watch.parked()]
    lines = ["deadlock: nothing can run, and not everything has finished."]
    for wait in sorted(waits, key=lambda w: (w.rank, w.program))[:_SHOWN]:
        lines += _describe(wait)
    if len(waits) > _SHOWN:
        lines.append(f"  ... and {len(waits) - _SHOWN} more waiting programs")
    lines += _hosts(machine) + _not_resident(machine)
    lines.append(
        f"schedule {machine.schedule.token}, {machine.num_sms} SMs per rank: the same seed gives "
        "the same interleaving."
    )
    return "\n".join(lines), list(waits)


def _wait(machine: Machine, program: Program) -> Wait:
    flags, seen, owners = [], [], []
    poll = program.stuck
    assert poll is not None
    numbers = np.frombuffer(poll.seen, f"i{poll.size}")
    wanted = _unmet(program, numbers)
    for place in np.flatnonzero(wanted):
        address = int(poll.addresses.flat[place])
        flags.append(machine.memory.name(address))
        seen.append(int(numbers[place]))
        region = machine.memory.find(address, address + 1)
        owners.append(region.rank if region is not None else -1)
    stack = tuple(f"{relative(path)}:{line} {name}" for path, line, name in poll.stack)
    return Wait(
        program.rank,
        program.index,
        program.launch.name,
        tuple(flags),
        tuple(seen),
        _expected(program),
        stack,
        tuple(linecache.getline(path, line).strip() for path, line, _ in poll.stack),
        tuple(owners),
        poll.owes,
    )


def _unmet(program: Program, numbers: np.ndarray) -> np.ndarray:
    """Which of the polled words keep it waiting: those for which the comparison came out so."""
    if program.comparison is None or numbers.size == 1:
        return np.ones(numbers.shape, bool)
    sign, other = program.comparison
    compare = _COMPARE[sign]
    values = np.unique(other) if other.size != numbers.size else other.ravel()
    if values.size not in (1, numbers.size):  # lanes that are masked off were compared too
        return np.ones(numbers.shape, bool)
    unmet = np.asarray(compare(numbers, values))
    return unmet if unmet.any() else np.ones(numbers.shape, bool)


def _expected(program: Program) -> str:
    if program.comparison is None:
        return ""
    sign, other = program.comparison
    values = ", ".join(str(v) for v in np.unique(other.ravel())[:4])
    return f"{sign} {values}"


def _describe(wait: Wait) -> list[str]:
    flags = ", ".join(f"{f} = {v}" for f, v in zip(wait.flags[:4], wait.seen[:4], strict=True))
    more = f" and {len(wait.flags) - 4} more" if len(wait.flags) > 4 else ""
    where = "of its own" if set(wait.owners) == {wait.rank} else f"of rank {wait.owners}"
    lines = [f"  rank {wait.rank} program {wait.program} of {wait.kernel} waits for {flags}{more}"]
    owed = f"; rank {wait.owes} owes the signal" if wait.owes is not None else ""
    lines.append(f"    ({where}); it goes on waiting while the value is {wait.expected}{owed}")
    lines += [f"    at {at}: {text}" for at, text in zip(wait.stack, wait.source, strict=True)]
    return lines


def _hosts(machine: Machine) -> list[str]:
    lines = ["who could write it:"]
    for host in machine.hosts:
        kernels = [
            str(launch)
            for stream in machine.streams
            if stream.rank == host.rank
            for launch in stream.queue
            if isinstance(launch, Launch)
        ]
        if host.done:
            state = "has returned"
        else:
            at = f"{relative(host.site[0])}:{host.site[1]}"
            state = f"waits for {host.waits_for} ({at})" if host.waits_for else "is running"
        running = f"; kernels: {'; '.join(kernels)}" if kernels else "; no kernel is running"
        lines.append(f"  rank {host.rank}: its host {state}{running}")
    return lines


def _not_resident(machine: Machine) -> list[str]:
    lines = []
    for stream in machine.streams:
        for place, launch in enumerate(stream.queue):
            if not isinstance(launch, Launch):
                continue
            if place > 0:
                lines.append(f"  rank {launch.rank}: {launch.name} is queued behind another kernel")
            elif launch.next < launch.total:
                lines.append(
                    f"  rank {launch.rank}: programs {launch.next} to {launch.total - 1} of "
                    f"{launch.name} have not started, as {machine.num_sms} fit at a time. A "
                    "program must not wait for a later one that may not be resident."
                )
    return lines


def kernel_error(program: Program, error: BaseException) -> BaseException:
    """The error with rank, program, kernel and lines; its type stays if it is one of ours.

    The innermost line of the kernel and its helpers comes first, then those that called it.
    """
    if not isinstance(error, Exception):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    inside = next((i for i, f in enumerate(frames) if f.name == "_run_program"), -1) + 1
    own = [f for f in frames[inside:] if is_kernel_file(f.filename)] or frames[-1:]
    at = " called at ".join(f"{relative(f.filename)}:{f.lineno}" for f in reversed(own))
    text = str(error) if isinstance(error, SundogError) else f"{type(error).__name__}: {error}"
    kind = type(error) if isinstance(error, SundogError) else KernelError
    named = kind(f"{program} at {at}: {text}")
    named.__cause__ = error
    return named
