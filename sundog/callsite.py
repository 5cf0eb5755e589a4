"""Where in the user's source something happened."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from types import FrameType

import torch
import triton

_HERE = os.path.dirname(os.path.abspath(__file__))
_INNER = (_HERE, *(os.path.join(_HERE, name) for name in ("world", "ops", "machine")))
_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (__file__, torch.__file__, triton.__file__)
)
# threading starts the threads of ranks; contextlib ends `with world.scope()`
_OURS += tuple(os.path.abspath(path) for path in (threading.__file__, contextlib.__file__))
_EXAMPLES = tuple(
    os.path.join(_HERE, name) for name in ("demo.py", os.path.join("tools", "_primitives.py"))
)


def called_from(places: Iterable[tuple[str, int]]) -> str:
    """Return the first place as file:line and, in brackets, those that called it."""
    first, *callers = dict.fromkeys((relative(path), line) for path, line in places)
    file, shown = first[0], []
    for path, line in callers:
        shown.append(f":{line}" if path == file else f"{path}:{line}")
        file = path
    within = f" (called from {', from '.join(shown)})" if shown else ""
    return f"{first[0]}:{first[1]}{within}"


def caller_frame() -> tuple[str, int, str]:
    """Find the nearest frame outside sundog, torch and triton. Return its file, line and function.

    If there is none, as in `sundog bench`, take the nearest outside the world and the ops' call
    path.
    """
    frame = sys._getframe(1)
    found = _nearest(frame, _is_theirs) or _nearest(frame, _is_ops) or frame
    return found.f_code.co_filename, found.f_lineno, found.f_code.co_name


def _nearest(frame: FrameType | None, is_wanted: Callable[[str], bool]) -> FrameType | None:
    while frame is not None and not is_wanted(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@functools.cache  # called for every frame of every operation of a checked host
def _is_theirs(path: str) -> bool:
    return not path.startswith(_OURS) or path in _EXAMPLES


@functools.cache
def _is_ops(path: str) -> bool:
    """Return whether a file is an op or a tool, not the world or the call path, by its folder."""
    return os.path.dirname(path) not in _INNER


def caller() -> str:
    """Name the same frame as file:line."""
    path, line, _ = caller_frame()
    return f"{relative(path)}:{line}"


def raised_at(error: BaseException) -> tuple[str, int, str]:
    """Find where an error came from. Return its file, line and function."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if _is_theirs(f.filename)]
    ours = [f for f in frames if f.filename.startswith(_HERE)]  # rather than torch's
    for frame in (theirs or ours or frames)[-1:]:
        return frame.filename, frame.lineno or 0, frame.name
    return "?", 0, ""


def relative(path: str) -> str:
    """Return a path relative to the working directory, or only its name if it is elsewhere."""
    return _relative(path, os.getcwd())


@functools.lru_cache(maxsize=1024)  # called for every allocation
def _relative(path: str, folder: str) -> str:
    near = os.path.relpath(path, folder)
    return os.path.basename(path) if near.startswith("..") else near
