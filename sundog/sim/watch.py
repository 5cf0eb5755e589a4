"""Parked programs, by the memory that they wait for: no busy waiting."""

from __future__ import annotations

import bisect
import os
import sys
from types import CodeType, FrameType

import numpy as np
import triton
from triton._C.libtriton import interpreter as native

from .tasks import Poll, Program

__all__ = ["Watch", "kernel_frames", "read", "site_of", "stack_of"]

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_SKIP = (
    os.path.dirname(os.path.abspath(triton.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
)


def read(addresses: np.ndarray, size: int) -> bytes:
    """What memory holds at these (checked) addresses."""
    dtype = _UNSIGNED[size]
    everywhere = np.ones(addresses.shape, bool)
    return native.load(addresses, everywhere, np.empty(addresses.shape, dtype), dtype).tobytes()


def kernel_frames() -> list[FrameType]:
    """The frames of the running kernel and the device functions it is in, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None and frame.f_code.co_name != "_run_program":
        if not frame.f_code.co_filename.startswith(_SKIP):
            frames.append(frame)
        frame = frame.f_back
    return frames


def site_of(frames: list[FrameType]) -> tuple[tuple[CodeType, int], ...]:
    """Tells two accesses apart, also on one line, and the same line reached in two ways."""
    return tuple((frame.f_code, frame.f_lasti) for frame in frames)


def stack_of(frames: list[FrameType]) -> list[tuple[str, int, str]]:
    return [(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]


class Watch:
    def __init__(self) -> None:
        self._programs: dict[Program, list[Poll]] = {}
        self._addresses: list[int] = []  # sorted, one per watched address and program
        self._watchers: dict[int, list[Program]] = {}

    def __len__(self) -> int:
        return len(self._programs)

    def parked(self) -> list[Program]:
        return list(self._programs)

    def park(self, program: Program) -> None:
        polls = list(program.polls.values())
        self._programs[program] = polls
        for address in _addresses(polls):
            if address not in self._watchers:
                bisect.insort(self._addresses, address)
                self._watchers[address] = []
            self._watchers[address].append(program)

    def remove(self, program: Program) -> None:
        for address in _addresses(self._programs.pop(program)):
            watchers = self._watchers[address]
            watchers.remove(program)
            if not watchers:
                del self._watchers[address]
                del self._addresses[bisect.bisect_left(self._addresses, address)]

    def changed(self, addresses: np.ndarray, size: int) -> list[Program]:
        """Programs to wake after a write: what they wait for now holds something else."""
        if not self._programs or not addresses.size:
            return []
        first = bisect.bisect_left(self._addresses, int(addresses.min()) - 7)
        last = bisect.bisect_left(self._addresses, int(addresses.max()) + size)
        near = {p: None for a in self._addresses[first:last] for p in self._watchers[a]}
        return self._wake(list(near))

    def changed_anywhere(self) -> list[Program]:
        return self._wake(list(self._programs))

    def _wake(self, programs: list[Program]) -> list[Program]:
        woken = [p for p in programs if any(differs(poll) for poll in self._programs[p])]
        for program in woken:
            self.remove(program)
            program.polls.clear()
        return woken


def differs(poll: Poll) -> bool:
    return read(poll.addresses, poll.size) != poll.seen


def _addresses(polls: list[Poll]) -> dict[int, None]:
    return {int(address): None for poll in polls for address in poll.addresses.flat}
