"""Ask the compiler about the loads that it may issue before an acquire.

A kernel with such a load is compiled as it was launched, to TTGIR, once for each target, after the
run. For a target that it does not compile for, nothing is known about its order, and a note says
so.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from triton.errors import TritonError

from ..callsite import relative
from ..compiled.hoisted import Hoisted, find
from ..compiled.recorded import pointer
from ..dataset.triton.compile import lower_source, source_of
from ..machine.tasks import Launch
from ..target import GPU_HEAP
from .encounter import Found
from .findings import AccessEvent
from .shadow import Span

__all__ = ["TARGETS", "Suspicion", "confirm", "suspect"]

TARGETS = ("sm_90", "gfx942")
_compiled: dict[tuple, list[Hoisted] | str] = {}  # by binary and target; str: why there is none


class Suspicion(NamedTuple):
    """A finding that holds if the compiler moves the load ahead of the acquire."""

    found: Found
    event: AccessEvent
    span: Span
    launch: Launch
    arguments: list[Any]  # without their memory, which goes when the launch ends


def suspect(found: Found, event: AccessEvent, span: Span, launch: Launch) -> Suspicion:
    """Keep what the compiler needs, while the launch runs."""
    arguments = [pointer(launch.arguments[name], GPU_HEAP) for name in launch.kernel.arg_names]
    return Suspicion(found, event, span, launch, arguments)


def confirm(suspicion: Suspicion) -> tuple[Found | None, list[str]]:
    """Return what to report, if some target moves the load, and notes on the other targets."""
    moved: list[str] = []
    notes: list[str] = []
    for target in TARGETS:
        hoisted = _hoisted(suspicion, target)
        if isinstance(hoisted, str):
            notes.append(_note(suspicion, target, hoisted))
        elif any(each.load[0][:2] == _line(suspicion) for each in hoisted):
            moved.append(target)
    if not moved:
        return None, notes
    found = suspicion.found
    why = (
        f"{found.why}, but the compiler pipelines the loop ({', '.join(moved)}) and issues the "
        "load before it"
    )
    return found._replace(why=why), notes


def _line(suspicion: Suspicion) -> tuple[str, int]:
    file, line, _ = suspicion.event.stack[0]
    return os.path.basename(file), line


def _hoisted(suspicion: Suspicion, target: str) -> list[Hoisted] | str:
    """Return the loads that the compiler moves, or why the kernel does not compile."""
    key = suspicion.launch.version, target
    if key not in _compiled:
        try:
            _compiled[key] = find(*_lowered(suspicion, target))
        except (KeyError, RuntimeError, ValueError, TritonError) as error:
            _compiled[key] = str(error).strip().partition("\n")[0] or type(error).__name__
    return _compiled[key]


def _lowered(suspicion: Suspicion, target: str) -> list[Any]:
    """Compile the kernel as it was launched, to TTIR and to TTGIR."""
    launch = suspicion.launch
    source, options = source_of(launch.kernel, suspicion.arguments, launch.options, arch=target)
    return [lower_source(source, options, arch=target, stage=stage) for stage in ("ttir", "ttgir")]


def _note(suspicion: Suspicion, target: str, error: str) -> str:
    path, line, _ = suspicion.event.where
    return (
        f"{suspicion.launch.name} does not compile for {target} ({error}), so it is not known "
        f"whether the load at {relative(path)}:{line} stays after its acquire there"
    )
