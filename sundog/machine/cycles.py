"""Proof of a livelock: all programs and all memory are as they were before, and all took part.

From there the same turns lead to the same place again, without end. What a program will do depends
on where it is, on its variables and on memory. Of memory only what was written since can differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .polling import is_kernel_file, kernel_frames, read
from .tasks import Program

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Cycles"]

_MOST_STATES, _MOST_WORDS = 2000, 512


class Cycles:
    """The states of all programs since one of them last did something new."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.clear()

    def clear(self) -> None:
        self._states: dict[tuple, int] = {}  # and how many turns came before each
        self._turns: list[Program] = []
        self._words: dict[int, int] = {}  # written: address and size

    def wrote(self, addresses: np.ndarray, size: int) -> None:
        """Note what was written. Of too much nothing is known: it begins anew."""
        if len(self._words) + addresses.size > _MOST_WORDS:
            self.clear()
        else:
            self._words |= dict.fromkeys(addresses.ravel().tolist(), size)

    def closed(self, program: Program) -> int:
        """Return how many turns led back to the state before this turn, or 0."""
        state = self._state(program)
        since = self._states.setdefault(state, len(self._turns))
        if since < len(self._turns) and self._must_take_part(program) <= set(self._turns[since:]):
            return len(self._turns) - since
        if len(self._states) > _MOST_STATES:
            self.clear()
        return 0

    def took_turn(self, program: Program) -> None:
        """Note that a program goes on: others may have been chosen since it asked."""
        self._turns.append(program)

    def _must_take_part(self, running: Program) -> set[Program]:
        """Return who could run. What a parked one polls has not changed all the while."""
        return {running, *(task for task in self._machine.ready if isinstance(task, Program))}

    def _state(self, running: Program) -> tuple:
        machine = self._machine
        others = [t for t in (*machine.ready, *machine.watch.parked()) if isinstance(t, Program)]
        places = {(running.rank, id(running.launch), running.number): _variables(kernel_frames())}
        for program in others:
            frames = list(_suspended(program))
            places[program.rank, id(program.launch), program.number] = _variables(frames)
        one = np.empty(1, np.uint64)
        memory = []
        for address in sorted(self._words):
            one[0] = address
            memory.append((address, read(one, self._words[address])))
        return tuple(sorted(places.items(), key=lambda item: item[0])), tuple(memory)


def _suspended(program: Program) -> Iterator[FrameType]:
    """Yield the kernel's frames of a program that does not run."""
    frame = program.coroutine.gr_frame if program.coroutine is not None else None
    while frame is not None:
        if is_kernel_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _variables(frames: list[FrameType]) -> tuple:
    return tuple(
        (id(frame.f_code), frame.f_lasti, tuple(map(_value, frame.f_locals.values())))
        for frame in frames
    )


def _value(value: Any) -> Any:
    """Return something that is equal where the values are."""
    if isinstance(value, tl.tensor):
        return value.handle.data.tobytes()
    if isinstance(value, tl.constexpr):
        return _value(value.value)
    if isinstance(value, tuple | list | tl.tuple):
        return tuple(_value(each) for each in value)
    return value if isinstance(value, int | float | str | None) else id(value)
