"""Mutants of a kernel: every synchronisation removed or weakened, one at a time.

Made on the syntax tree of a kernel and of the functions that it calls:

    drop      a CTA barrier, a signal, a wait, a barrier of ranks or programs, a proxy fence
    relax     acquire, release: relaxed; acq_rel: acquire and release
    narrow    scope sys: gpu and cta; gpu: cta
    epoch     one less, in a wait or a signal
    swap      a signal with the store before it

Not the barrier in `signal._hold_loads`: it stops the compiler, which is not simulated, and
tests/device/test_wait_codegen.py compiles without it.

A checker that does not object to a mutant has a hole, or the synchronisation is not needed.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from triton.runtime.jit import JITFunction

from ..callsite import relative
from ..interpreter.rewrite import function_tree

__all__ = ["Mutant", "mutants"]

_RELAXED = {"acquire": ["relaxed"], "release": ["relaxed"], "acq_rel": ["acquire", "release"]}
_NARROWED = {"sys": ["gpu", "cta"], "gpu": ["cta"]}
_SIGNALS = {"signal", "signal_all", "put_signal"}
_WAITS = {"wait", "wait_all"}
_CTA_BARRIERS = {"debug_barrier", "barrier", "thread_barrier"}  # the latter two are Gluon's
_BARRIERS = {"barrier_ranks", "barrier_programs", "fence"} | _CTA_BARRIERS
_ATOMICS = {"atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or"}
_ATOMICS |= {"atomic_store", "atomic_xchg", "atomic_xor"}
_STORES = {"store", "put"}
_FOR_THE_COMPILER = {"_hold_loads"}


@dataclass(frozen=True)
class Mutant:
    function: JITFunction
    tree: ast.FunctionDef
    what: str  # in words
    where: str  # file:line
    diff: str


def mutants(functions: list[JITFunction]) -> list[Mutant]:
    """Return all mutants of these functions, in the order of their source."""
    return [mutant for function in functions for mutant in _mutants_of(function)]


def _mutants_of(function: JITFunction) -> Iterator[Mutant]:
    module = function.fn.__module__ or ""
    if module.startswith("triton."):
        return  # the standard library of the language does not synchronise
    if function.fn.__name__ in _FOR_THE_COMPILER:
        return
    original = function_tree(function)
    for number, (what, line) in enumerate(_edits(original, -1)):
        tree = function_tree(function)
        list(_edits(tree, number))
        where = f"{relative(function.fn.__code__.co_filename)}:{line}"
        yield Mutant(function, tree, what, where, _diff(original, tree, where))


def _edits(tree: ast.FunctionDef, chosen: int) -> Iterator[tuple[str, int]]:
    """Yield every possible edit as (words, line); carry out the chosen one on the tree."""
    for number, (what, line, apply) in enumerate([*_all_edits(tree)]):
        if number == chosen:
            apply()
        yield what, line


Edit = tuple[str, int, Callable[[], None]]


def _all_edits(tree: ast.FunctionDef) -> Iterator[Edit]:
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
            yield from _weaker(node)
            yield from _earlier(node)
        if isinstance(node, ast.While):
            yield from _earlier_poll(node)
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(body, list):
                yield from _dropped(body)
                yield from _swapped(body)


def _name(node: ast.AST) -> str:
    """Return the last part of what a statement or an expression calls."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return ""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _weaker(call: ast.Call) -> Iterator[Edit]:
    for keyword in call.keywords:
        table = {"sem": _RELAXED, "scope": _NARROWED}.get(keyword.arg or "", {})
        constant = keyword.value
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            for value in table.get(constant.value, []):
                what = f'{_name(call)}: {keyword.arg}="{constant.value}" becomes "{value}"'
                yield what, call.lineno, partial(setattr, constant, "value", value)


def _earlier(call: ast.Call) -> Iterator[Edit]:
    """Lower the epoch of a signal or wait: it comes before the context (and LANES, and mask)."""
    name = _name(call)
    if name not in _SIGNALS | _WAITS:
        return  # one less for a whole barrier shifts both of its sides: the same barrier
    place = next((i for i, a in enumerate(call.args) if ast.unparse(a) == "ctx"), 0) - 1
    if place >= 0:
        yield f"{name}: the epoch is one less", call.lineno, partial(_less, call.args, place)


def _earlier_poll(loop: ast.While) -> Iterator[Edit]:
    for node in ast.walk(loop.test):
        if not isinstance(node, ast.Compare) or "limit" in ast.unparse(node):
            continue  # the bound of a wait is not what it waits for
        if isinstance(node.ops[0], ast.Lt | ast.Eq | ast.NotEq):
            what = f"while {ast.unparse(node)}: waits for one less"
            yield what, node.lineno, partial(_less, node.comparators, 0)


def _less(expressions: list[ast.expr], place: int) -> None:
    old = expressions[place]
    new = ast.BinOp(old, ast.Sub(), ast.Constant(1))
    expressions[place] = ast.fix_missing_locations(ast.copy_location(new, old))


def _dropped(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        name = _name(statement) if isinstance(statement, ast.Expr) else ""
        what = f"{ast.unparse(statement).splitlines()[0]}: dropped"
        if name in _BARRIERS | _SIGNALS | _WAITS | _ATOMICS:
            yield what, statement.lineno, partial(_put, body, place, ast.Pass())


def _swapped(body: list[ast.stmt]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        if _name(statement) not in _SIGNALS | {"atomic_xchg"}:
            continue
        before = place - 1
        while before >= 0 and _name(body[before]) in _CTA_BARRIERS:
            before -= 1
        if before >= 0 and _name(body[before]) in _STORES:
            what = f"{_name(statement)}: before the {_name(body[before])} above it"
            yield what, statement.lineno, partial(_swap, body, before, place)


def _put(body: list[ast.stmt], place: int, statement: ast.stmt) -> None:
    body[place] = ast.copy_location(statement, body[place])


def _swap(body: list[ast.stmt], first: int, second: int) -> None:
    body[first], body[second] = body[second], body[first]


def _diff(original: ast.FunctionDef, mutant: ast.FunctionDef, where: str) -> str:
    before, after = (ast.unparse(copy.copy(t)).splitlines() for t in (original, mutant))
    lines = difflib.unified_diff(before, after, where, "mutant", lineterm="", n=1)
    return "\n".join(lines)
