"""Where in the user's source something happened."""

from __future__ import annotations

import functools
import os
import sys
import traceback

import torch
import triton

__all__ = ["caller", "caller_frame", "raised_at", "relative"]

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (__file__, torch.__file__, triton.__file__)
)
_EXAMPLES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    for name in ("demo.py", os.path.join("probing", "subjects.py"))
)


def caller_frame() -> tuple[str, int, str]:
    """File, line and function of the nearest frame outside sundog, torch and triton."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_filename in _EXAMPLES:
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def caller() -> str:
    """The same as file:line."""
    path, line, _ = caller_frame()
    return f"{relative(path)}:{line}"


def raised_at(error: BaseException) -> tuple[str, int, str]:
    """The same for the line that an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_OURS) or f.filename in _EXAMPLES]
    for frame in (own or frames)[-1:]:
        return frame.filename, frame.lineno or 0, frame.name
    return "?", 0, ""


def relative(path: str) -> str:
    """A path as a person in the working directory would write it; only a name if it is far away."""
    return _relative(path, os.getcwd())


@functools.lru_cache(maxsize=1024)  # every allocation asks
def _relative(path: str, folder: str) -> str:
    near = os.path.relpath(path, folder)
    return os.path.basename(path) if near.startswith("..") else near
