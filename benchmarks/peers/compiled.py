"""What Triton makes of a case's kernels on an sm_90: the instructions that order memory.

A finding is about order: a scope, a semantics, a fence. The PTX says what of it is really there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sundog.checker.checker import Checker
from sundog.compiled.assembly import instructions
from sundog.compiled.recorded import RecordedLaunch, compile_launch, pointer
from sundog.errors import SundogError
from sundog.target import GPU_HEAP

_ORDERS = re.compile(r"(atom|red|fence|membar|multimem|griddepcontrol)\b")
_SEMANTICS = re.compile(r"\b(volatile|relaxed|acquire|release)\b")


@contextmanager
def noted_launches() -> Iterator[dict[str, RecordedLaunch]]:
    """Note a launch of each kernel that the checker sees, as the compiler takes it."""
    found: dict[str, RecordedLaunch] = {}
    start = Checker.start

    def noted(self: Checker, program: Any, stream: Any) -> None:
        launch = program.launch
        if launch.name not in found and _is_theirs(launch.kernel):
            given = [pointer(launch.arguments[n], GPU_HEAP) for n in launch.kernel.arg_names]
            found[launch.name] = RecordedLaunch(launch.kernel, tuple(given), launch.options, {})
        start(self, program, stream)

    Checker.start = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Checker.start = start  # type: ignore[method-assign]


def _is_theirs(kernel: Any) -> bool:
    """Return whether it is no stand-in of sundog's for what a library does on a stream."""
    return kernel is not None and not kernel.fn.__module__.startswith("sundog.")


def ordering(launches: dict[str, RecordedLaunch]) -> dict[str, list[str]]:
    """Return the instructions by kernel, each line's once, in order; or why there are none."""
    return {name: [*dict.fromkeys(_instructions(each))] for name, each in launches.items()}


def _instructions(launch: RecordedLaunch) -> Iterator[str]:
    os.environ["TRITON_ALLOW_NON_CONSTEXPR_GLOBALS"] = (
        "1"  # some kernels read numbers of their file
    )
    try:
        text = compile_launch(launch, "sm_90").asm["ptx"]
    except SundogError as error:
        yield f"none: {str(error).strip().splitlines()[-1].strip()}"
        return
    for name, place in instructions(text):
        if _ORDERS.match(name) or _SEMANTICS.search(name):
            yield f"{name} at {place[0][0]}:{place[0][1]}" if place and place[0][1] else name
