"""Loads in a loop that only an acquire in that loop orders: a pipelined loop issues them before it.

Whether Triton pipelines the loop depends on its hints, on `num_stages`, on what else its body has
and on what the load is for. So what is found here is a suspicion, and the kernel is compiled to
confirm it: see `confirm`.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterable, Iterator

from ..callsite import relative
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule

__all__ = ["BARRIER_IN_LOOP", "RULES", "look"]

BARRIER_IN_LOOP = Rule(
    "race",
    "no CTA barrier in a pipelined loop",
    "only an acquire in a pipelined loop orders the load, and the compiler issues the load before "
    "that acquire (seen by compiling the kernel for sm_90 and gfx942)",
    "Put tl.debug_barrier() after the acquire, or use sundog.device.signal.wait; to keep the "
    "loop pipelined, wait outside of it.",
)
RULES = [BARRIER_IN_LOOP]


def look(here: Encounter) -> Iterable[Found]:
    if here.event.writes or here.event.actor.before is None:
        return ()
    return _suspicious(here)


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
    """Whether a `for` loop that the compiler may pipeline is around both."""
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
