"""Mutants of a kernel: every synchronisation removed or weakened, one at a time.

Made on the syntax tree of a kernel and of the functions that it calls:

    drop      a CTA barrier, a signal, words with flags, a wait, a `while` loop that polls, a proxy
              fence, a barrier of ranks or programs
    relax     acquire, release: relaxed; acq_rel: acquire and release; defaults and parameters too
    narrow    scope sys: gpu and cta; gpu: cta
    epoch     one less, in a wait or a signal; one more, in a wait
    swap      a signal with the store before it, a wait with the access after it
    shift     the peer or the flag of a signal, the peer of a store, the flag of a wait
    shrink    the mask of a store, an atomic or a signal

Mutants of hosts are in tools/check/mutation.py.

Not the barrier in `signal._hold_loads`: it stops the compiler, which is not simulated, and
tests/device/test_wait_codegen.py compiles without it.

A checker that does not object to a mutant has a hole, or the synchronisation is not needed.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from triton.runtime.jit import JITFunction

from ..callsite import relative
from ..device.context import SIZE
from ..interpreter.interpreter import replaced
from ..interpreter.rewrite import function_tree

Edit = tuple[str, int, Callable[[], None]]  # words, line, and how it is carried out

ATOMICS = {"atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or"}
ATOMICS |= {"atomic_store", "atomic_xchg", "atomic_xor"}
_BEFORE_CONTEXT = {"store", "put"} | ATOMICS  # these have the peer there
_PEERS = {"signal": 1, "put_signal": 3}
_FLAGS = {"signal": 0, "wait": 0, "put_signal": 2}
_NUM_RANKS = f"_sundog.tl.load(ctx + {SIZE.value})"  # see `interpreter.rewrite`
_MASKED = {"store", "put", "put_signal"} | ATOMICS
_RELAXED = {"acquire": ["relaxed"], "release": ["relaxed"], "acq_rel": ["acquire", "release"]}
_NARROWED = {"sys": ["gpu", "cta"], "gpu": ["cta"]}
_WEAKER = {"sem": _RELAXED, "scope": _NARROWED}
_SIGNALS = {"signal", "signal_all", "put_signal"}
_WAITS = {"wait", "wait_all"}
_WORDS = {"set_words"}  # data and epoch in one: there is no other form of them to try
_CTA_BARRIERS = {"debug_barrier", "barrier", "thread_barrier"}  # the latter two are Gluon's
_BARRIERS = {"barrier_ranks", "barrier_programs", "fence"} | _CTA_BARRIERS
_STORES = {"store", "put"}
_ACCESSES = {"load", "store", "get", "put", "put_signal", "copy"} | ATOMICS
_PLAIN = (ast.Assign, ast.AugAssign, ast.Expr, ast.If, ast.Pass)  # what the body of a poll has
_LANGUAGES = {"tl", "gl", "ttgl"}
Used = Set[tuple[str, int, str, str]]  # atomics that ran: file, line, sem and scope
_FOR_THE_COMPILER = {"_hold_loads"}
_OF_EXPIRED_WAITS = {"_polls_allowed", "_run_out"}  # no wait expires in a check


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
    if function.fn.__name__ in _FOR_THE_COMPILER | _OF_EXPIRED_WAITS:
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
    idle = [*_never_ran(tree, seen), *_idle_branches(tree, seen)]
    skipped = recording | {inner for node in idle for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Call):
            yield from _weaker(node, seen)
            yield from _other_epoch(node)
        if isinstance(node, ast.While):
            yield from _earlier_poll(node)
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(body, list):
                yield from _dropped(body, skipped)
                yield from _swapped(body)
                yield from [] if is_library else _late_waits(body, skipped)
    yield from [] if is_library else shifted(tree, skipped)


def _never_ran(tree: ast.FunctionDef, seen: Seen) -> Iterator[ast.stmt]:
    """Yield the atomics that are statements, or give a name its value, and did not run."""
    ran = {line for line, *_ in seen}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr | ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        is_atomic = called(node.value) in ATOMICS and _is_language(node.value)
        if is_atomic and ran and ran.isdisjoint(lines):
            yield node


def _idle_branches(tree: ast.FunctionDef, seen: Seen) -> Iterator[ast.stmt]:
    """Yield the statements of `if` branches that have atomics, none of which ran."""
    ran, idle = {line for line, *_ in seen}, {*_never_ran(tree, seen)}
    for node in ast.walk(tree):
        for branch in (node.body, node.orelse) if isinstance(node, ast.If) else ():
            lines = {getattr(inner, "lineno", 0) for each in branch for inner in ast.walk(each)}
            if ran.isdisjoint(lines) and idle & {i for each in branch for i in ast.walk(each)}:
                yield from branch


def idle_atomics(functions: list[JITFunction], used: Used) -> Iterator[str]:
    """Say which atomics of the user's kernels did not run: no mutant is made of them."""
    for function in functions:
        if (function.fn.__module__ or "").startswith(("triton.", "sundog.device.")):
            continue
        path = function.fn.__code__.co_filename
        here = {entry[1:] for entry in used if entry[0] == path}
        for node in _never_ran(function_tree(function), here):
            where = f"{relative(path)}:{node.lineno}"
            yield f"{where}: {ast.unparse(node)} did not run, so no mutant is made of it"


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
    place = (_context(call) or 0) - 1
    ways = {"less": ast.Sub(), "more": ast.Add()} if name in _WAITS else {"less": ast.Sub()}
    for way, how in ways.items() if place >= 0 else ():
        yield f"{name}: the epoch is one {way}", call.lineno, partial(_shift, call.args, place, how)


def _earlier_poll(loop: ast.While) -> Iterator[Edit]:
    for node in ast.walk(loop.test):
        if not isinstance(node, ast.Compare) or "limit" in ast.unparse(node):
            continue  # the bound of a wait is not what it waits for
        if isinstance(node.ops[0], ast.Lt | ast.Eq | ast.NotEq):
            what = f"while {ast.unparse(node)}: waits for one less"
            yield what, node.lineno, partial(_shift, node.comparators, 0, ast.Sub())


def _shift(expressions: list[ast.expr], place: int, how: ast.operator) -> None:
    """Add one to an expression, or subtract it."""
    old = expressions[place]
    new = ast.BinOp(old, how, ast.Constant(1))
    expressions[place] = ast.fix_missing_locations(ast.copy_location(new, old))


def _dropped(body: list[ast.stmt], skipped: Set[ast.AST]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        if statement in skipped:
            continue
        name = called(statement) if isinstance(statement, ast.Expr) else ""
        what = f"{ast.unparse(statement).splitlines()[0].removesuffix(':')}: dropped"
        is_poll = isinstance(statement, ast.While) and _polls(statement)
        if is_poll or name in _BARRIERS | _SIGNALS | _WAITS | ATOMICS | _WORDS:
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
    """Return whether a loop does nothing but read, until it reads what it waits for."""
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


# to the wrong place: another peer, flag or part of a tile, where a kernel calls our primitives


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
        yield f"{name}: to peer 0 only", call.lineno, partial(_put_expression, call, place, new)
    else:
        new = f"({ast.unparse(peer)} + 1) % {_NUM_RANKS}"
        yield f"{name}: the next peer", call.lineno, partial(_put_expression, call, place, new)


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
        yield f"{name}: the next flag", call.lineno, partial(_put_expression, call, place, new)


def _context(call: ast.Call) -> int | None:
    return next((i for i, a in enumerate(call.args) if ast.unparse(a) == "ctx"), None)


def _put_expression(call: ast.Call, place: int, text: str) -> None:
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
        yield what, bound.lineno, partial(_shift, bound.comparators, 0, ast.Sub())


def _reads(call: ast.Call, tree: ast.FunctionDef) -> bool:
    """Return whether an atomic adds nothing: it is a load, whose mask says nothing about writes."""
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
