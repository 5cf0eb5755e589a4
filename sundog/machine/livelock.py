"""Notices programs that run for ever: they loop, and nothing that they see or do is new.

A step is an atomic or volatile load inside a `while`, or some turns of a `while` without one. It is
new if its program has not seen this value at this place before. After some steps that are not, the
schedule becomes fair, and what a program has computed counts as new too. If even so nobody does
anything new, the programs repeat themselves: a livelock. A loop that counts its turns, and does
nothing else, gets more of them.
"""

from __future__ import annotations

import linecache
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np

from ..callsite import relative
from ..errors import Livelock
from .polling import kernel_frames, site_of, state_of
from .tasks import Program

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Repeats"]

_REPEATED = 1000  # steps in a row before what a program has computed is looked at
_MOST, _MOST_EACH = 6000, 200  # steps in a row that are not new even so: in all, and per program
_ENDLESS = 300_000  # steps in a row at places and with values that were there before
_TURNS = 64  # of a `while` without an atomic: a step
_KEPT = 1 << 16  # of what a program has seen
_CYCLE = 256  # steps that a report looks back
_SHOWN = 16

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

    def made(self) -> None:
        """Somebody did something new."""
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

    def looked(self, key: tuple, op: str, size: int, seen: bytes) -> None:
        """Note an atomic or volatile load in a `while` loop of the running program."""
        self._turns = 0
        if (key, seen) not in self._machine.program.visited:
            self._machine.program.visit((key, seen), _KEPT)
            self.made()
            return
        self._repeated += 1
        if self._repeated > _REPEATED:
            values = np.frombuffer(seen, f"i{size}")[:4].tolist()
            found = f" ({op} found {', '.join(map(str, values))})"
            self._step((key, seen), found, kernel_frames(), 1)

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
        place, text = _line(frames)
        self._cycle.append((program, place, text, found))
        most = max(_MOST, _MOST_EACH * (1 + len(machine.ready)))
        if self._stuck > most or self._repeated > _ENDLESS:
            raise Livelock(self._describe())

    def _describe(self) -> str:
        steps: dict[Step, int] = {}
        for step in self._cycle:
            steps[step] = steps.get(step, 0) + 1
        count = len({step[0] for step in steps})
        who = "1 program runs" if count == 1 else f"{count} programs run"
        lines = [
            f"livelock: {who} without end: {self._stuck} steps, and nothing that had not been "
            "there before. What is repeated:"
        ]
        shown = sorted(steps, key=lambda s: (s[0].rank, s[0].number, s[1], s[3]))[:_SHOWN]
        lines += [f"  {program} at {place}: {text}{found}" for program, place, text, found in shown]
        if len(steps) > _SHOWN:
            lines.append(f"  ... and {len(steps) - _SHOWN} other steps")
        lines.append(f"schedule {self._machine.schedule.token}: it gives the same steps again.")
        return "\n".join(lines)


def _line(frames: list[FrameType]) -> tuple[str, str]:
    """Return where the running kernel is, and the text of that line."""
    frame = frames[0]
    path, line = frame.f_code.co_filename, frame.f_lineno
    place = f"{relative(path)}:{line} {frame.f_code.co_name}"
    return place, linecache.getline(path, line).strip()
