"""Kernels that never end: the wait-for report of a deadlock, and how a livelock is noticed.

A deadlock's report says who waits, for what, and who could end the wait. In a livelock programs
loop, and nothing that they see or do is new. A step is an atomic or volatile load inside a `while`,
or some turns of a `while` without one. It is new if its program has not seen this value at this
place before. After some steps that are not new, the schedule becomes fair, and what a program has
computed counts as new too. If even then no program does anything new, the programs repeat
themselves. A loop that only counts its turns gets more of them.
"""

from __future__ import annotations

import linecache
import os
import traceback
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from ..callsite import called_from, relative
from ..errors import KernelError, Livelock, SundogError
from .polling import is_kernel_file, kernel_frames, site_of, stack_of, state_of
from .tasks import Launch, Program

if TYPE_CHECKING:
    from .machine import Machine

_SHOWN = 32
_LOOK_BACK = 8  # steps in a row that are not new, before a cycle is looked for
_COMPAT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "compat")
_REPEATED = 1000  # steps in a row before what a program has computed is looked at
_MOST, _MOST_EACH = 6000, 200  # steps in a row that are not new even then: in all, and per program
_ENDLESS = 300_000  # steps in a row with places and values that were seen before
_TURNS = 64  # of a `while` without an atomic: a step
_KEPT = 1 << 16  # entries of what a program has seen
_CYCLE = 256  # steps that a report looks back
_SHOWN_STEPS = 16
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
    expected: str  # the comparison that failed; "" if there was none
    stack: tuple[str, ...]  # file:line function, innermost first
    source: tuple[str, ...]  # the text of these lines
    owners: tuple[int, ...]  # ranks whose memory has the flags
    owes: int | None  # the rank that must signal, if sundog's own wait names it


def deadlock(machine: Machine) -> tuple[str, list[object]]:
    """Return the report as text, and as `Wait`s."""
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
    """Return which polled words keep a program waiting: those whose comparison failed."""
    if program.comparison is None or numbers.size == 1:
        return np.ones(numbers.shape, bool)
    sign, other = program.comparison
    compare = _COMPARE[sign]
    values = np.unique(other) if other.size != numbers.size else other.ravel()
    if values.size not in (1, numbers.size):  # masked lanes were compared too
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
    own = set(wait.owners) == {wait.rank}
    where = "in its own memory" if own else f"in the memory of rank {wait.owners}"
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
    """Return the error with rank, program, kernel and lines; one of ours keeps its type.

    The innermost line of the kernel and its helpers comes first, then those that called it.
    """
    if not isinstance(error, Exception):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    inside = next((i for i, f in enumerate(frames) if f.name == "_run_program"), -1) + 1
    own = [f for f in frames[inside:] if is_kernel_file(f.filename)] or frames[-1:]
    theirs = [f for f in own if not f.filename.startswith(_COMPAT)] or own
    at = called_from((f.filename, f.lineno or 0) for f in reversed(theirs))
    text = str(error) if isinstance(error, SundogError) else f"{type(error).__name__}: {error}"
    kind = type(error) if isinstance(error, SundogError) else KernelError
    named = kind(f"{program} at {at}: {text}")
    named.__cause__ = error
    return named


# livelocks

Step = tuple[Program, str, str, str]  # who, file:line function, its text, what it found


class Repeats:
    """Counts the steps of all programs since one of them did something new."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._was_fair = machine.schedule.is_fair
        self._repeated = 0
        self._stuck = 0
        self._turns = 0
        self._cycle: deque[Step] = deque(maxlen=_CYCLE)
        self.spins = False  # whether a `while` loop changed memory, which may keep others going

    def made(self) -> None:
        """Note that a program did something new."""
        self._machine.cycles.clear()
        if self._repeated >= _REPEATED:
            self._machine.schedule.is_fair = self._was_fair
        self._repeated = self._stuck = 0

    def turned(self) -> None:
        """Note a turn of a `while` loop of the running program."""
        self._turns += 1
        if self._turns >= _TURNS:
            self._turns = 0
            self._machine.give_way()
            frames = kernel_frames()
            self._step(("turns", site_of(frames)), "", frames, _TURNS)

    def look_back(self) -> None:
        """Raise before a turn if everything is as it was some turns ago, and all took part."""
        if self._repeated < _LOOK_BACK or self._machine.schedule.is_fair:
            return
        turns = self._machine.cycles.closed(self._machine.program)
        if turns:
            head = f"{turns} turns bring all programs and all memory back to where they were"
            raise Livelock(self._describe([*self._cycle][-turns:], head))

    def looked(self, key: tuple, op: str, size: int, seen: bytes) -> None:
        """Note an atomic or volatile load in a `while` loop of the running program."""
        self._turns = 0
        rounds = self._machine.rounds
        if rounds is not None:
            where = tuple(stack_of(key[0]))  # by lines: a `while` tests its condition at two places
            rounds.looked((self._machine.program, where, key[2], seen))
            self._note(_found(op, size, seen), kernel_frames())
        if (key, seen) not in self._machine.program.visited:
            self._machine.program.visit((key, seen), _KEPT)
            self.made()
            return
        self._repeated += 1
        if self._repeated > _REPEATED:
            self._step((key, seen), _found(op, size, seen), kernel_frames(), 1)

    def _step(self, at: tuple, found: str, frames: list[FrameType], count: int) -> None:
        machine, program = self._machine, self._machine.program
        if machine.on_idle is not None:
            return  # another process may end it
        machine.schedule.is_fair = True
        state = hash((at, state_of(frames)))
        self._stuck += count
        if state not in program.visited:
            program.visit(state, _KEPT)
            self._stuck = 0
            self._cycle.clear()
        self._note(found, frames)
        most = max(_MOST, _MOST_EACH * (1 + len(machine.ready)))
        if self._stuck > most or self._repeated > _ENDLESS:
            head = f"{self._stuck} steps, and nothing that had not been there before"
            raise Livelock(self._describe([*self._cycle], head))

    def _note(self, found: str, frames: list[FrameType]) -> None:
        place, text = _line(frames)
        self._cycle.append((self._machine.program, place, text, found))

    def _describe(self, cycle: list[Step], head: str) -> str:
        steps = dict.fromkeys(cycle)
        count = len({step[0] for step in steps})
        who = "1 program runs" if count == 1 else f"{count} programs run"
        lines = [f"livelock: {who} without end: {head}. What is repeated:"]
        shown = sorted(steps, key=lambda s: (s[0].rank, s[0].number, s[1], s[3]))[:_SHOWN_STEPS]
        lines += [f"  {program} at {place}: {text}{found}" for program, place, text, found in shown]
        if len(steps) > _SHOWN_STEPS:
            lines.append(f"  ... and {len(steps) - _SHOWN_STEPS} other steps")
        lines.append(f"schedule {self._machine.schedule.token}: it gives the same steps again.")
        return "\n".join(lines)


def _found(op: str, size: int, seen: bytes) -> str:
    values = np.frombuffer(seen, f"i{size}")[:4].tolist()
    return f" ({op} found {', '.join(map(str, values))})"


def _line(frames: list[FrameType]) -> tuple[str, str]:
    """Return where the running kernel is, and the text of that line."""
    frame = frames[0]
    path, line = frame.f_code.co_filename, frame.f_lineno
    place = f"{relative(path)}:{line} {frame.f_code.co_name}"
    return place, linecache.getline(path, line).strip()
