"""A fair schedule that looks for a livelock: it keeps programs in their loops as long as it may.

Under a random schedule, a program that spins because others undo what it waits for leaves its loop
by luck sooner or later. This schedule learns at each poll which values keep a program in its loop.
It prefers a program that would now read such a value, and avoids one that would leave. No program
waits longer than a window, so it is fair, and what repeats without end here is a livelock.

This proves one: all programs and all memory are as they were before, and all took part. From there
the same turns lead to the same state again, without end. What a program will do depends on where it
is, on its variables and on memory. Only memory that was written since can differ.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from .polling import is_kernel_file, kernel_frames, read
from .tasks import Program

if TYPE_CHECKING:
    from .machine import Machine

Where = tuple[tuple[str, int, str], ...]  # file, line and function of each frame
Look = tuple[Program, Where, tuple[str, bytes], bytes]  # who, where, which atomic, what it found

_OVERWRITES = ("XCHG", "STORE")
_CURIOSITY = 0.125, 0.5  # how often it explores instead, by seed
_MOST_STATES, _MOST_WORDS = 2000, 512
_STAYS, _UNKNOWN, _DOUBTFUL, _LEAVES = range(4)


class RoundSchedule:
    def __init__(self, seed: int) -> None:
        self.token = f"rounds:{seed}"
        self.step = 0
        self.residents = 0
        self.is_fair = False  # True once it has looked for long enough, and chooses at random
        self._random = random.Random(seed)
        self._curiosity = _CURIOSITY[seed % 2]
        self._window = 4 << seed % 3  # turns of all others that a program may wait for
        self._since: dict[Any, int] = {}  # a task's latest turn
        self._latest: dict[tuple[Program, Where], Look] = {}
        self._stays: set[Look] = set()
        self._leaves: set[Look] = set()

    def choose(self, ready: Sequence[Any]) -> int:
        self.step += 1
        place = self._place(ready)
        self._since[ready[place]] = self.step
        return place

    def pick(self, count: int) -> int:
        """Take the newest value, since memory is fair too."""
        return 0

    def looked(self, look: Look) -> None:
        """Note a poll."""
        self._latest[look[:2]] = look

    def returned(self, program: Program, where: Where) -> None:
        """Note that a program is about to poll here: what it found before kept it in its loop."""
        before = self._latest.get((program, where))
        if before is not None:
            self._stays.add(before)

    def ended(self, program: Program) -> None:
        """Note that a program has left its loops."""
        for key in [key for key in self._latest if key[0] is program]:
            self._leaves.add(self._latest.pop(key))

    def _place(self, ready: Sequence[Any]) -> int:
        hosts = [place for place, task in enumerate(ready) if not isinstance(task, Program)]
        if hosts or self.is_fair:
            return self._random.choice(hosts or range(len(ready)))
        waited = [self.step - self._since.setdefault(task, self.step) for task in ready]
        if max(waited) > self._window * len(ready):
            return waited.index(max(waited))
        outlooks = [self._outlook(task, None) for task in ready]
        wanted = min(outlooks)
        if _UNKNOWN in outlooks and self._random.random() < self._curiosity:
            wanted = _UNKNOWN
        best = [place for place, outlook in enumerate(outlooks) if outlook == wanted]
        if wanted != _STAYS:
            return self._random.choice(best)
        return min(best, key=lambda place: (self._lost(place, ready), -waited[place]))

    def _lost(self, place: int, ready: Sequence[Program]) -> int:
        """Count the other programs that may leave their loops after what this one will write."""
        others = [program for at, program in enumerate(ready) if at != place]
        return sum(self._outlook(program, ready[place].next_poll) != _STAYS for program in others)

    def _outlook(self, program: Program, before: tuple | None) -> int:
        """Return what a program would do after its next poll, if that was seen before.

        `before` is another program's poll that comes first.
        """
        if program.next_poll is None:
            return _UNKNOWN
        where, addresses, size, operands = program.next_poll
        held = read(addresses, size)
        if before is not None and before[3][0] in _OVERWRITES:
            held = before[3][1] if np.array_equal(before[1], addresses) else held
        look = (program, where, operands, held)
        if look in self._stays:
            return _STAYS
        if look in self._leaves:
            return _LEAVES
        return _DOUBTFUL if (program, where) in self._latest else _UNKNOWN


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
        """Note what was written. If that is too much, begin anew."""
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
        """Note that a program continues; others may have run since it asked."""
        self._turns.append(program)

    def _must_take_part(self, running: Program) -> set[Program]:
        """Return the programs that could run. What a parked one polls has not changed since."""
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
    """Yield the kernel frames of a program that is not running."""
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
    """Return something that is equal if the values are."""
    if isinstance(value, tl.tensor):
        return value.handle.data.tobytes()
    if isinstance(value, tl.constexpr):
        return _value(value.value)
    if isinstance(value, tuple | list | tl.tuple):
        return tuple(_value(each) for each in value)
    return value if isinstance(value, int | float | str | None) else id(value)
