"""Loads that the compiler issues ahead of an acquire: the checker asks it, where it matters.

It matters where a load in a loop reads what an acquire in the same loop has ordered, and no CTA
barrier stands between them. Whether the loop is pipelined depends on its hints, on `num_stages`, on
what else its body has and on what the load is for. So the kernel is compiled as it was launched, to
TTGIR, and `compiled/hoisted.py` says which loads moved. That is done once per kernel, after a run.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from triton.errors import TritonError

from ..compiled.hoisted import Hoisted, find
from ..compiled.recorded import pointer
from ..dataset.triton.compile import lower_source, source_of
from ..machine.tasks import Launch
from ..target import GPU_HEAP
from .findings import Event

__all__ = ["TARGETS", "Candidate", "arguments_of", "in_one_loop", "moved_by_compiler"]

TARGETS = ("sm_90", "gfx942")
_compiled: dict[tuple, dict[str, list[Hoisted]]] = {}


class Candidate(NamedTuple):
    """A load that needs an acquire before it, and has no CTA barrier after that acquire."""

    launch: Launch
    arguments: list[Any]  # of its kernel, without the tensors' memory
    write: Event
    load: Event
    acquire: Event
    span: tuple


def arguments_of(launch: Launch) -> list[Any]:
    """While it runs: its tensors go when it ends."""
    return [pointer(launch.arguments[name], GPU_HEAP) for name in launch.kernel.arg_names]


def in_one_loop(load: Event, acquire: Event) -> bool:
    """Whether some `for` loop that the compiler may pipeline is around both."""
    reached = {loop for file, line, _ in load.stack for loop in _loops_at(file, line)}
    return any(loop in reached for file, line, _ in acquire.stack for loop in _loops_at(file, line))


def moved_by_compiler(candidate: Candidate) -> list[str]:
    """The targets for which the load is issued too early."""
    launch = candidate.launch
    if launch.version not in _compiled:
        _compiled[launch.version] = {target: [*_hoisted(candidate, target)] for target in TARGETS}
    file, line, _ = candidate.load.stack[0]
    here = os.path.basename(file), line
    return [
        target
        for target, found in _compiled[launch.version].items()
        if any(each.load[0][:2] == here for each in found)
    ]


def _hoisted(candidate: Candidate, target: str) -> Iterable[Hoisted]:
    launch = candidate.launch
    try:
        source, options = source_of(launch.kernel, candidate.arguments, launch.options, arch=target)
        forms = [lower_source(source, options, arch=target, stage=s) for s in ("ttir", "ttgir")]
    except (KeyError, RuntimeError, ValueError, TritonError):
        return []  # a kernel that does not compile for a target has no wrong code there
    return find(*forms)


def _loops_at(file: str, line: int) -> Iterator[tuple[str, int]]:
    for first, last in _loops(file):
        if first <= line <= last:
            yield file, first


@functools.cache
def _loops(file: str) -> list[tuple[int, int]]:
    """First and last line of every `for` loop of a file that stays a loop."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    return [(n.lineno, n.end_lineno or n.lineno) for n in loops if not _is_unrolled(n)]


def _is_unrolled(loop: ast.For) -> bool:
    call = loop.iter
    return isinstance(call, ast.Call) and ast.unparse(call.func).endswith("static_range")
