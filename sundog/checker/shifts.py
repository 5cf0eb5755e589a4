"""Mutants that signal, wait for, or store to the wrong place: another peer, flag or part of a tile.

Made where a kernel calls sundog's primitives, whose arguments come in a known order.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator
from functools import partial

from ..device.context import SIZE

__all__ = ["ATOMICS", "Edit", "called", "put_argument", "shifted"]

Edit = tuple[str, int, Callable[[], None]]  # words, line, and how it is carried out

ATOMICS = {"atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or"}
ATOMICS |= {"atomic_store", "atomic_xchg", "atomic_xor"}
_BEFORE_CONTEXT = {"store", "put"} | ATOMICS  # these have the peer there
_PEERS = {"signal": 1, "put_signal": 3}
_FLAGS = {"signal": 0, "wait": 0, "put_signal": 2}
_NUM_RANKS = f"_sundog.tl.load(ctx + {SIZE.value})"  # see `interpreter.rewrite`
_MASKED = {"store", "put", "put_signal"} | ATOMICS


def called(node: ast.AST) -> str:
    """Return the last part of what a statement or an expression calls."""
    call = node.value if isinstance(node, ast.Expr) else node
    if not isinstance(call, ast.Call):
        return ""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def put_argument(call: ast.Call, name: str, value: ast.expr) -> None:
    """Give a call another keyword argument, or one that it did not have."""
    ast.fix_missing_locations(ast.copy_location(value, call))
    for keyword in call.keywords:
        if keyword.arg == name:
            keyword.value = value
            return
    new = ast.keyword(name, value)
    call.keywords.append(ast.fix_missing_locations(ast.copy_location(new, call)))


def shifted(tree: ast.FunctionDef, left_out: Collection[ast.AST]) -> Iterator[Edit]:
    """Yield the edits of all calls that are not left out."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n not in left_out]
    loops = [(set(ast.walk(n)), _varying(n)) for n in ast.walk(tree) if isinstance(n, ast.For)]
    for call in calls:
        yield from _other_peer(call, [names for inside, names in loops if call in inside])
        yield from _other_flag(call)
    yield from _smaller_masks(tree, calls)


def _other_peer(call: ast.Call, loops: list[set[str]]) -> Iterator[Edit]:
    """Yield the next peer. Where a loop sends the same to each, the next gets it too: peer 0."""
    name, context = called(call), _context(call)
    if context is None:
        return
    place = _PEERS.get(name, context - 1 if name in _BEFORE_CONTEXT else 0)
    if place <= 0:
        return
    peer, others = call.args[place], [*call.args[:place], *call.args[place + 1 :], *call.keywords]
    if any(_names(peer) & names and not _names(*others) & names for names in loops):
        new = f"({ast.unparse(peer)}) * 0"
        yield f"{name}: to peer 0 only", call.lineno, partial(_put, call, place, new)
    else:
        new = f"({ast.unparse(peer)} + 1) % {_NUM_RANKS}"
        yield f"{name}: the next peer", call.lineno, partial(_put, call, place, new)


def _varying(loop: ast.For) -> set[str]:
    """Return the variable of a loop, and the names that are assigned from it inside."""
    found, before = _names(loop.target), set[str]()
    while found != before:
        before = set(found)
        for node in ast.walk(loop):
            if isinstance(node, ast.Assign | ast.AugAssign) and _names(node.value) & found:
                found |= _names(*(node.targets if isinstance(node, ast.Assign) else [node.target]))
    return found


def _names(*trees: ast.AST) -> set[str]:
    return {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _other_flag(call: ast.Call) -> Iterator[Edit]:
    name = called(call)
    place = _FLAGS.get(name)
    if place is None or _context(call) is None:
        return
    flag = call.args[place]
    if isinstance(flag, ast.BinOp) and isinstance(flag.op, ast.Add):  # one of several
        new = f"{ast.unparse(flag)} + 1"
        yield f"{name}: the next flag", call.lineno, partial(_put, call, place, new)


def _context(call: ast.Call) -> int | None:
    return next((i for i, a in enumerate(call.args) if ast.unparse(a) == "ctx"), None)


def _put(call: ast.Call, place: int, text: str) -> None:
    new = ast.parse(text, mode="eval").body
    for node in ast.walk(new):
        ast.copy_location(node, call)
    call.args[place] = ast.fix_missing_locations(new)


def _smaller_masks(tree: ast.FunctionDef, calls: list[ast.Call]) -> Iterator[Edit]:
    """Yield one edit for each comparison that masks of stores are made of."""
    masks = [
        keyword.value
        for call in calls
        if called(call) in _MASKED
        for keyword in call.keywords
        if keyword.arg == "mask" and (isinstance(keyword.value, ast.Name) or not _reads(call, tree))
    ]
    names = {mask.id for mask in masks if isinstance(mask, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
            masks.append(node.value)
    for bound in [bound for mask in masks for bound in _bounds(mask)]:
        what = f"mask {ast.unparse(bound)}: one less"
        yield what, bound.lineno, partial(_lower, bound)


def _reads(call: ast.Call, tree: ast.FunctionDef) -> bool:
    """Whether an atomic adds nothing: a load, and a mask of its own says nothing about writes."""
    if called(call) != "atomic_add" or len(call.args) < 2:
        return False
    values = [call.args[1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(values[0]):
            values.append(node.value)
    return any(called(v) == "zeros" or ast.unparse(v).split("*")[-1].strip() == "0" for v in values)


def _bounds(mask: ast.expr) -> Iterator[ast.Compare]:
    """Yield the upper bounds that a mask is the conjunction of."""
    if isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.BitAnd):
        yield from _bounds(mask.left)
        yield from _bounds(mask.right)
    elif isinstance(mask, ast.Compare) and isinstance(mask.ops[0], ast.Lt):
        yield mask


def _lower(comparison: ast.Compare) -> None:
    old = comparison.comparators[0]
    new = ast.BinOp(old, ast.Sub(), ast.Constant(1))
    comparison.comparators[0] = ast.fix_missing_locations(ast.copy_location(new, old))
