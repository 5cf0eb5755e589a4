"""Where in the user's source something happened."""

from __future__ import annotations

import os
import sys

import torch
import triton

__all__ = ["caller", "caller_frame", "raised_at", "relative"]

_OURS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (__file__, torch.__file__, triton.__file__)
)
_EXAMPLES = (os.path.join(os.path.dirname(os.path.abspath(__file__)), "demo.py"),)


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
    trace, found = error.__traceback__, None
    while trace is not None:
        code = trace.tb_frame.f_code
        own = code.co_filename.startswith(_OURS) and code.co_filename not in _EXAMPLES
        if found is None or not own:
            found = code.co_filename, trace.tb_lineno, code.co_name
        trace = trace.tb_next
    return found or ("?", 0, "")


def relative(path: str) -> str:
    """A path as a person in the working directory would write it; only a name if it is far away."""
    near = os.path.relpath(path)
    return os.path.basename(path) if near.startswith("..") else near
