"""Park programs by the memory that they wait for, instead of busy waiting."""

from __future__ import annotations

import ast
import bisect
import ctypes
import functools
import inspect
import itertools
import os
import sys
import textwrap
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton._C.libtriton import interpreter as native

from ..interpreter.ptx_lanes import LOOP
from .tasks import Poll, Program

Site = tuple[tuple[Any, int], ...]  # function and instruction of each frame, innermost first

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_FEW = 8  # up to this many addresses, reading one by one is faster
_LOOKS_IN_BETWEEN = 128  # polls until a program has read everything that it watches
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SKIP = (
    *(os.path.dirname(os.path.abspath(str(m.__file__))) + os.sep for m in (triton, np, torch)),
    *(os.path.join(_PACKAGE, name) + os.sep for name in ("machine", "interpreter", "checker")),
    os.path.join(_PACKAGE, "tools", "check") + os.sep,  # records what a checker sees
)


def read(addresses: np.ndarray, size: int) -> bytes:
    """Return what memory holds at these (checked) addresses."""
    if addresses.size == 1:
        return ctypes.string_at(addresses.item(), size)
    if addresses.size <= _FEW:
        return b"".join([ctypes.string_at(a, size) for a in addresses.ravel().tolist()])
    dtype = _UNSIGNED[size]
    everywhere = np.ones(addresses.shape, bool)
    return native.load(addresses, everywhere, np.empty(addresses.shape, dtype), dtype).tobytes()


def kernel_frames() -> list[FrameType]:
    """Return the frames of the running kernel and its device functions, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        code = frame.f_code
        if is_kernel_file(code.co_filename):
            frames.append(frame)
        elif code.co_name == "_run_program":
            break
        frame = frame.f_back
    return frames


@functools.cache  # by file, since Python hashes a code object anew each time
def is_kernel_file(path: str) -> bool:
    """Return whether a file has kernels or device functions, not the interpreter."""
    return not path.startswith(_SKIP)


def may_poll(site: Site) -> bool:
    """Return whether an access may repeat without end, which it can only inside a `while`."""
    return any([code.is_in_loop(place) for code, place in site])


class _Code:
    """What is computed once per function, since Python hashes its code object anew every time."""

    def __init__(self, code: CodeType) -> None:
        self.code = code  # kept alive, since its id is the key
        self._loops = _while_lines(code)
        self._lines: dict[int, int | None] = {}  # by an instruction's place
        self._in_loop: dict[int, bool] = {}

    def line(self, place: int) -> int | None:
        """Return an instruction's line, or None for code that the rewriter inserted."""
        if place not in self._lines:
            spans = self.code.co_lines()
            at = (line for start, end, line in spans if start <= place < end)
            self._lines[place] = next(at, None)
        return self._lines[place]

    def is_in_loop(self, place: int) -> bool:
        if not self._loops:
            return False
        found = self._in_loop.get(place)
        if found is None:
            line = self.line(place)
            inside = any(line is None or first <= line <= last for first, last in self._loops)
            found = self._in_loop[place] = inside
        return found


_codes: dict[int, _Code] = {}


def _known(code: CodeType) -> _Code:
    found = _codes.get(id(code))
    if found is None:
        found = _codes[id(code)] = _Code(code)
    return found


def _while_lines(code: CodeType) -> list[tuple[int, int]]:
    """Return first and last line of every `while` in a function. (Triton's `for` always ends.)"""
    if code.co_name == "<lambda>":  # the rewriter's, for `and` and `or`: its caller is in the loop
        return []
    if "." in code.co_name:  # an instruction of inline PTX, whose name says if it is in a loop
        return [(0, sys.maxsize)] if code.co_name.endswith(LOOP) else []
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:  # no source: anything may be in a loop
        return [(0, sys.maxsize)]
    tree = ast.parse(textwrap.dedent("".join(lines)))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    return [(n.lineno + first - 1, (n.end_lineno or n.lineno) + first - 1) for n in loops]


def site_of(frames: list[FrameType]) -> Site:
    """Return a key that tells accesses apart, also on one line, and calls that lead to one line."""
    return tuple([(_known(frame.f_code), frame.f_lasti) for frame in frames])


def stack_of(site: Site) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame of a site."""
    return [(c.code.co_filename, c.line(at) or 0, c.code.co_name) for c, at in site]


def state_of(frames: list[FrameType]) -> int:
    """Hash what the running kernel has computed; it is equal if nothing is new."""
    values = [value for frame in frames for value in frame.f_locals.values()]
    tensors = [value.handle.data for value in values if isinstance(value, tl.tensor)]
    return hash(tuple([data.tobytes() for data in tensors]))


def owed_by(frames: list[FrameType]) -> int | None:
    """Return the rank that owes the signal, if one of sundog's own waits polls for it."""
    peer = frames[0].f_locals.get("peer") if frames[0].f_code.co_name == "_wait_word" else None
    if peer is None:
        return None
    return int(peer.handle.data.item() if hasattr(peer, "handle") else peer)


class Watch:
    def __init__(self) -> None:
        self._programs: dict[Program, list[Poll]] = {}
        self._addresses: list[int] = []  # sorted, one per watched address
        self._watchers: dict[int, dict[Program, None]] = {}
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self._programs)

    def parked(self) -> list[Program]:
        return list(self._programs)

    def park(self, program: Program) -> None:
        polls = list(program.polls.values())
        program.ticket = next(self._tickets)
        self._programs[program] = polls
        for address in _addresses(polls):
            if address not in self._watchers:
                bisect.insort(self._addresses, address)
                self._watchers[address] = {}
            self._watchers[address][program] = None

    def remove(self, program: Program) -> None:
        for address in _addresses(self._programs.pop(program)):
            watchers = self._watchers[address]
            del watchers[program]
            if not watchers:
                del self._watchers[address]
                del self._addresses[bisect.bisect_left(self._addresses, address)]

    def changed(self, addresses: np.ndarray, size: int) -> list[Program]:
        """Return the programs to wake after a write, since what they wait for has changed."""
        if not self._programs or not addresses.size:
            return []
        near: dict[Program, None] = {}
        if addresses.size <= len(self._addresses):
            for address in addresses.ravel().tolist():
                self._overlapping(address, address + size, near)
        else:
            self._overlapping(int(addresses.min()), int(addresses.max()) + size, near)
        return self._wake(near)

    def _overlapping(self, start: int, end: int, found: dict[Program, None]) -> None:
        first = bisect.bisect_left(self._addresses, start - 7)  # a watched word has up to 8 bytes
        for place in range(first, len(self._addresses)):
            address = self._addresses[place]
            if address >= end:
                return
            found.update(self._watchers[address])

    def changed_anywhere(self) -> list[Program]:
        return self._wake(self._programs)

    def _wake(self, programs: dict[Program, None] | dict[Program, list[Poll]]) -> list[Program]:
        woken = [p for p in programs if any(differs(poll) for poll in self._programs[p])]
        # By ticket: addresses, and so the order in which programs were found, differ between runs.
        woken.sort(key=lambda program: program.ticket)
        for program in woken:
            self.remove(program)
            stuck = program.stuck is not None and not differs(program.stuck)
            # Something changed that it reads only now and then, such as the bound of its wait.
            program.patience = _LOOKS_IN_BETWEEN if stuck else 0
            forget_changed(program)
        return woken


def forget_changed(program: Program) -> None:
    """Let a program poll again if what it saw has changed."""
    program.polls = {key: poll for key, poll in program.polls.items() if not differs(poll)}


def differs(poll: Poll) -> bool:
    return read(poll.addresses, poll.size) != poll.seen


def _addresses(polls: list[Poll]) -> dict[int, None]:
    return {address: None for poll in polls for address in poll.addresses.ravel().tolist()}
