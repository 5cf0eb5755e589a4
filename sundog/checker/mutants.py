"""Mutants of a kernel: every synchronisation removed or weakened, one at a time.

Made on the syntax tree of a kernel and of the functions that it calls:

    drop      a CTA barrier, a signal, a wait, a `while` loop that polls, a barrier of ranks or
              programs, a proxy fence
    relax     acquire, release: relaxed; acq_rel: acquire and release; defaults and parameters too
    narrow    scope sys: gpu and cta; gpu: cta
    epoch     one less, in a wait or a signal; one more, in a wait
    swap      a signal with the store before it, a wait with the access after it
    shift     the peer or the flag of a signal, the peer of a store, the flag of a wait (`shifts`)
    shrink    the mask of a store, an atomic or a signal (`shifts`)

Mutants of hosts are in `host_mutants`.

Not the barrier in `signal._hold_loads`: it stops the compiler, which is not simulated, and
tests/device/test_wait_codegen.py compiles without it.

A checker that does not object to a mutant has a hole, or the synchronisation is not needed.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from triton.runtime.jit import JITFunction

from ..callsite import relative
from ..interpreter.interpreter import replaced
from ..interpreter.rewrite import function_tree
from .shifts import ATOMICS, Edit, called, put_argument, shifted

__all__ = ["Mutant", "Used", "mutants"]

_RELAXED = {"acquire": ["relaxed"], "release": ["relaxed"], "acq_rel": ["acquire", "release"]}
_NARROWED = {"sys": ["gpu", "cta"], "gpu": ["cta"]}
_WEAKER = {"sem": _RELAXED, "scope": _NARROWED}
_SIGNALS = {"signal", "signal_all", "put_signal"}
_WAITS = {"wait", "wait_all"}
_CTA_BARRIERS = {"debug_barrier", "barrier", "thread_barrier"}  # the latter two are Gluon's
_BARRIERS = {"barrier_ranks", "barrier_programs", "fence"} | _CTA_BARRIERS
_STORES = {"store", "put"}
_ACCESSES = {"load", "store", "get", "put", "put_signal", "copy"} | ATOMICS
_PLAIN = (ast.Assign, ast.AugAssign, ast.Expr, ast.If, ast.Pass)  # what the body of a poll has
_LANGUAGES = {"tl", "gl", "ttgl"}
Used = Set[tuple[str, int, str, str]]  # atomics that ran: file, line, sem and scope
_FOR_THE_COMPILER = {"_hold_loads"}


@dataclass(frozen=True)
class Mutant:
    function: JITFunction
    tree: ast.FunctionDef
    what: str  # in words
    where: str  # file:line
    diff: str

    @property
    def owner(self) -> str:
        return str(self.function.fn.__name__)

    def applied(self) -> AbstractContextManager[None]:
        """Run the kernel as this mutant."""
        return replaced(self.function, self.tree)


def mutants(functions: list[JITFunction], used: Used = frozenset()) -> list[Mutant]:
    """Return all mutants of these functions, in the order of their source.

    `used`: what is not written in a call, but left to a default or a parameter, is taken from here.
    """
    return [mutant for function in functions for mutant in _mutants_of(function, used)]


def _mutants_of(function: JITFunction, used: Used) -> Iterator[Mutant]:
    module = function.fn.__module__ or ""
    if module.startswith("triton."):
        return  # the standard library of the language does not synchronise
    if function.fn.__name__ in _FOR_THE_COMPILER:
        return
    original, path = function_tree(function), function.fn.__code__.co_filename
    is_library = module.startswith("sundog.device.")  # shifts there are those of its callers
    here = {entry[1:] for entry in used if entry[0] == path}
    for number, (what, line) in enumerate(_edits(original, -1, here, is_library)):
        tree = function_tree(function)
        list(_edits(tree, number, here, is_library))
        where = f"{relative(path)}:{line}"
        yield Mutant(function, tree, what, where, _diff(original, tree, where))


Seen = Set[tuple[int, str, str]]  # as Used, in one file


def _edits(
    tree: ast.FunctionDef, chosen: int, seen: Seen, is_library: bool
) -> Iterator[tuple[str, int]]:
    """Yield every possible edit as (words, line); carry out the chosen one on the tree."""
    for number, (what, line, apply) in enumerate([*_all_edits(tree, seen, is_library)]):
        if number == chosen:
            apply()
        yield what, line


def _all_edits(tree: ast.FunctionDef, seen: Seen, is_library: bool) -> Iterator[Edit]:
    recording = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TRACE"
        for inner in ast.walk(node)
    }  # what is done for a trace orders nothing, and is not done in a check
    for node in ast.walk(tree):
        if node in recording:
            continue
        if isinstance(node, ast.Call):
            yield from _weaker(node, seen)
            yield from _other_epoch(node)
        if isinstance(node, ast.While):
            yield from _earlier_poll(node)
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(body, list):
                yield from _dropped(body)
                yield from _swapped(body)
                yield from [] if is_library else _late_waits(body, recording)
    yield from [] if is_library else shifted(tree, recording)


def _weaker(call: ast.Call, seen: Seen) -> Iterator[Edit]:
    """Weaken what the call says, or what it leaves to a default or to a parameter."""
    written = {k.arg: k for k in call.keywords}
    lines = range(call.lineno, (call.end_lineno or call.lineno) + 1)
    ran = [entry for entry in seen if entry[0] in lines]
    for place, name in enumerate(_WEAKER, 1):
        if name == "scope" and name not in written and not _is_language(call):
            continue  # a wrapper: its scope is its own
        constant = written[name].value if name in written else None
        if called(call) not in ATOMICS and not isinstance(constant, ast.Constant):
            continue
        if isinstance(constant, ast.Constant):
            values, shown = {str(constant.value)}, ""
        else:
            values = {str(entry[place]) for entry in ran}
            shown = f" (from {ast.unparse(constant)})" if constant else " (the default)"
        for value in sorted(values):
            for weak in _WEAKER[name].get(value, []):
                what = f'{called(call)}: {name}="{value}"{shown} becomes "{weak}"'
                yield what, call.lineno, partial(put_argument, call, name, ast.Constant(weak))


def _is_language(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in _LANGUAGES


def _other_epoch(call: ast.Call) -> Iterator[Edit]:
    """Shift the epoch of a signal or wait: it comes before the context (and LANES, and mask)."""
    name = called(call)
    if name not in _SIGNALS | _WAITS:
        return  # one less for a whole barrier shifts both of its sides: the same barrier
    place = next((i for i, a in enumerate(call.args) if ast.unparse(a) == "ctx"), 0) - 1
    if place >= 0:
        yield f"{name}: the epoch is one less", call.lineno, partial(_less, call.args, place)
    if place >= 0 and name in _WAITS:
        yield f"{name}: the epoch is one more", call.lineno, partial(_more, call.args, place)


def _earlier_poll(loop: ast.While) -> Iterator[Edit]:
    for node in ast.walk(loop.test):
        if not isinstance(node, ast.Compare) or "limit" in ast.unparse(node):
            continue  # the bound of a wait is not what it waits for
        if isinstance(node.ops[0], ast.Lt | ast.Eq | ast.NotEq):
            what = f"while {ast.unparse(node)}: waits for one less"
            yield what, node.lineno, partial(_less, node.comparators, 0)


def _less(expressions: list[ast.expr], place: int) -> None:
    _shift(expressions, place, ast.Sub())


def _more(expressions: list[ast.expr], place: int) -> None:
    _shift(expressions, place, ast.Add())


def _shift(expressions: list[ast.expr], place: int, how: ast.operator) -> None:
    old = expressions[place]
    new = ast.BinOp(old, how, ast.Constant(1))
    expressions[place] = ast.fix_missing_locations(ast.copy_location(new, old))


def _dropped(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        name = called(statement) if isinstance(statement, ast.Expr) else ""
        what = f"{ast.unparse(statement).splitlines()[0].removesuffix(':')}: dropped"
        is_poll = isinstance(statement, ast.While) and _polls(statement)
        if is_poll or name in _BARRIERS | _SIGNALS | _WAITS | ATOMICS:
            yield what, statement.lineno, partial(_put, body, place, ast.Pass())


def _swapped(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        if called(statement) not in _SIGNALS | {"atomic_xchg"}:
            continue
        before = place - 1
        while before >= 0 and called(body[before]) in _CTA_BARRIERS:
            before -= 1
        if before >= 0 and called(body[before]) in _STORES:
            what = f"{called(statement)}: before the {called(body[before])} above it"
            yield what, statement.lineno, partial(_swap, body, before, place)


def _polls(loop: ast.While) -> bool:
    """Whether a loop does nothing but read, until it reads what it waits for."""
    names = {called(node) for node in ast.walk(loop)} & (_ACCESSES | _SIGNALS)
    is_plain = all(isinstance(statement, _PLAIN) for statement in loop.body)
    return is_plain and bool(names) and not names & (_STORES | _SIGNALS | {"get", "copy"})


def _late_waits(body: list[ast.stmt], left_out: Set[ast.AST]) -> Iterator[Edit]:
    """Move a wait after the accesses that follow it, up to the next synchronisation."""
    for place, statement in enumerate(body):
        if not isinstance(statement, ast.Expr) or called(statement) not in _WAITS:
            continue
        last = place
        for later in range(place + 1, len(body)):
            inner = set(ast.walk(body[later])) - left_out
            names = {called(node) for node in inner if isinstance(node, ast.Call)}
            if names & _ACCESSES:
                last = later
            if names & (_WAITS | _SIGNALS | _BARRIERS):
                break
        if last > place:
            first = ast.unparse(body[last]).splitlines()[0]
            what = f"{called(statement)}: after {first}"
            yield what, statement.lineno, partial(_move, body, place, last)


def _move(body: list[ast.stmt], first: int, later: int) -> None:
    body.insert(later, body.pop(first))


def _put(body: list[ast.stmt], place: int, statement: ast.stmt) -> None:
    body[place] = ast.copy_location(statement, body[place])


def _swap(body: list[ast.stmt], first: int, second: int) -> None:
    body[first], body[second] = body[second], body[first]


def _diff(original: ast.FunctionDef, mutant: ast.FunctionDef, where: str) -> str:
    before, after = (ast.unparse(copy.copy(t)).splitlines() for t in (original, mutant))
    lines = difflib.unified_diff(before, after, where, "mutant", lineterm="", n=1)
    return "\n".join(lines)
