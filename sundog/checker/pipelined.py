"""Loads in a loop that only an acquire in that loop orders: a pipelined loop issues them before it.

Whether Triton pipelines the loop depends on its hints, on `num_stages`, on what else its body has
and on what the load is for. So what is found here is a suspicion. After the run the kernel is
compiled as it was launched, to TTGIR, once for each target, to confirm it. For a target that it
does not compile for, nothing is known about its order, and a note says so.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from triton.errors import TritonError

from ..callsite import relative
from ..compiled.hoisted import Hoisted, find_in
from ..compiled.recorded import pointer
from ..dataset.triton.compile import source_of
from ..machine.tasks import Launch
from ..target import GPU_HEAP
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule
from .shadow import Span

BARRIER_IN_LOOP = Rule(
    "race",
    "no CTA barrier in a pipelined loop",
    "only an acquire in a pipelined loop orders the load, and the compiler issues the load before "
    "that acquire (seen by compiling the kernel for sm_90 and gfx942)",
    "Put tl.debug_barrier() after the acquire, or use sundog.device.signal.wait; to keep the "
    "loop pipelined, wait outside of it.",
)
RULES = [BARRIER_IN_LOOP]
TARGETS = ("sm_90", "gfx942")
_compiled: dict[tuple, list[Hoisted] | str] = {}  # by binary and target; str: why there is none


def watches(event: AccessEvent) -> bool:
    return not event.writes


def look(here: Encounter) -> Iterable[Found]:
    return () if here.event.actor.before is None else _suspicious(here)


def _suspicious(here: Encounter) -> Iterator[Found]:
    """Yield what an acquire orders since the last CTA barrier; each pair of lines once."""
    event, actor = here.event, here.event.actor
    for earlier in here.conflicts():
        known_before = actor.owns(earlier.stamp[0]) or here.clocks.covers(
            actor.before, earlier.stamp
        )
        if known_before or not here.is_ordered(earlier):
            continue
        key = (earlier.event.where, event, actor.acquire)
        if key in actor.suspected:
            continue
        actor.suspected.add(key)
        if _in_one_loop(event, actor.acquire):
            path, line, _ = actor.acquire.where
            why = f"the acquire at {relative(path)}:{line} orders them"
            yield Found(BARRIER_IN_LOOP, why, earlier.event, actor.acquire)


def _in_one_loop(load: AccessEvent, acquire: AccessEvent) -> bool:
    """Return whether a `for` loop that the compiler may pipeline is around both."""
    around = {loop for file, line, _ in load.stack for loop in _loops_at(file, line)}
    return any(loop in around for file, line, _ in acquire.stack for loop in _loops_at(file, line))


def _loops_at(file: str, line: int) -> Iterator[tuple[str, int]]:
    for first, last in _loops(file):
        if first <= line <= last:
            yield file, first


@functools.cache
def _loops(file: str) -> list[tuple[int, int]]:
    """Return the first and last line of every `for` loop of a file that stays a loop."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    return [(n.lineno, n.end_lineno or n.lineno) for n in loops if not _is_unrolled(n)]


def _is_unrolled(loop: ast.For) -> bool:
    call = loop.iter
    return isinstance(call, ast.Call) and ast.unparse(call.func).endswith("static_range")


# ask the compiler


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
            _compiled[key] = _find(suspicion, target)
        except (KeyError, RuntimeError, ValueError, TritonError) as error:
            _compiled[key] = str(error).strip().partition("\n")[0] or type(error).__name__
    return _compiled[key]


def _find(suspicion: Suspicion, target: str) -> list[Hoisted]:
    """Compile the kernel as it was launched."""
    launch = suspicion.launch
    source, options = source_of(launch.kernel, suspicion.arguments, launch.options, arch=target)
    return find_in(source, options, target)


def _note(suspicion: Suspicion, target: str, error: str) -> str:
    path, line, _ = suspicion.event.where
    return (
        f"{suspicion.launch.name} does not compile for {target} ({error}), so it is not known "
        f"whether the load at {relative(path)}:{line} stays after its acquire there"
    )
