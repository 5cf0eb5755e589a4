"""Mutants of other people's kernels: is every synchronisation of theirs needed, in our eyes?

Sundog's own kinds (`sundog.checker.mutants`), and the same kinds in the idioms of theirs: what is
written in inline PTX, passed to a function as a semantics or a flag, or a call of a barrier of
their own. A kernel with a finding is repaired first. Kernels share barriers: a mutant counts once
per repository, and one program that objects to it is enough.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from triton.runtime.jit import JITFunction

from sundog.callsite import relative
from sundog.checker.mutants import _WEAKER as KINDS
from sundog.checker.mutants import ATOMICS, Edit, Mutant, called, mutants
from sundog.compat.cuda import provide
from sundog.compat.rank import as_rank
from sundog.interpreter.interpreter import recorded
from sundog.interpreter.rewrite import function_tree
from sundog.tools.check.mutation import find_mutants, mutate

from .case import repaired
from .one import NAMES, cases

_SCHEDULES, _SECONDS = 8, 900  # of one mutant; for one program, on a machine with other work
_ASM = "inline_asm_elementwise"
RELAXED, NARROWED = KINDS["sem"], KINDS["scope"]
_WEAKER = {r"\.(acquire|release|acq_rel)\b": RELAXED, r"\.(sys|gpu)\b": NARROWED}
_ORDERS = re.compile(r"\b(atom|red|st|fence|membar|bar)\.")


def foreign_mutants(functions: list[JITFunction]) -> Iterator[Mutant]:
    """Yield the mutants in inline PTX, and of calls of functions that synchronise."""
    synchronise = _synchronising(functions)
    for function in functions:
        path = function.fn.__code__.co_filename
        for number, (what, line, _) in enumerate(_edits(function_tree(function), synchronise)):
            tree = function_tree(function)
            list(_edits(tree, synchronise))[number][2]()
            yield Mutant(function, tree, what, f"{relative(path)}:{line}", "")


def _synchronising(functions: list[JITFunction]) -> set[str]:
    """Return the names of the functions that synchronise, themselves or by what they call."""
    trees = {function.fn.__name__: function_tree(function) for function in functions}
    found, before = {"debug_barrier", *ATOMICS}, set[str]()
    while found != before:
        before = set(found)
        for name, tree in trees.items():
            calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
            if any(called(call) in found or _orders(call) for call in calls):
                found.add(name)
    return found & set(trees)


def _orders(call: ast.Call) -> bool:
    return called(call) == _ASM and bool(_ORDERS.search(_text(call)))


def _text(call: ast.Call) -> str:
    return "".join(str(each.value) for each in _strings(call.args[0]))


def _strings(tree: ast.AST) -> list[ast.Constant]:
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [node for node in found if isinstance(node.value, str)]


def _edits(tree: ast.FunctionDef, synchronise: set[str]) -> Iterator[Edit]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == _ASM:
            yield from _weaker_text(node)
        elif isinstance(node, ast.Call) and called(node) in synchronise:
            yield from _weaker_call(node)
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            yield from _dropped(body, synchronise) if isinstance(body, list) else ()


def _weaker_text(call: ast.Call) -> Iterator[Edit]:
    """Relax and narrow what the text says; leave out a barrier of threads or a fence."""
    for part in _strings(call.args[0]):
        text = str(part.value)
        for pattern, weaker in _WEAKER.items():
            for match in re.finditer(pattern, text):
                for weak in weaker[match[1]]:
                    new = f"{text[: match.start(1)]}{weak}{text[match.end(1) :]}"
                    line = text[text.rfind("\n", 0, match.start()) + 1 :].split(";")[0].strip()
                    what = f"`{line}`: {match[1]} becomes {weak}"
                    yield what, call.lineno, partial(setattr, part, "value", new)
        for match in re.finditer(r"(bar\.sync|fence|membar)[^;]*;", text):
            new = text[: match.start()] + text[match.end() :]
            yield f"`{match[0]}`: dropped", call.lineno, partial(setattr, part, "value", new)


def _weaker_call(call: ast.Call) -> Iterator[Edit]:
    for value in [string for argument in call.args for string in _strings(argument)]:
        for weak in RELAXED.get(str(value.value), ()):
            what = f'{called(call)}: "{value.value!s}" becomes "{weak}"'
            yield what, call.lineno, partial(setattr, value, "value", weak)
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
            what = f"{called(call)}: {keyword.arg}=True becomes False"
            yield what, call.lineno, partial(setattr, keyword.value, "value", False)


def _dropped(body: list[ast.stmt], synchronise: set[str]) -> Iterator[Edit]:
    for place, statement in enumerate(body):
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call) and (called(call) in synchronise or _orders(call)):
            what = f"{called(call)}(...): dropped"
            yield what, statement.lineno, partial(body.__setitem__, place, ast.Pass())


def mutate_all(name: str, path: str, commit: str) -> dict[str, Any]:
    """Try the mutants of all kernels of a repository, each until one program objects."""
    outcomes: dict[str, str] = {}
    failures = []
    for number, case in enumerate(cases(name).CASES):
        mended = repaired(path, cases(name).PACKAGE, case)
        with mended if case.repairs else nullcontext(os.path.realpath(path)) as folder:
            found = _in_process(name, folder, number, [n for n, by in outcomes.items() if by])
        failures += [f"{case.kernel}: {why}" for why in found["unclean"]]
        for mutant, by in found["outcomes"].items():
            outcomes[mutant] = outcomes.get(mutant) or by
        killed = sum(map(bool, outcomes.values()))
        print(f"{name} {case.kernel}: {killed} of {len(outcomes)} killed so far", *found["unclean"])
    equivalent: dict[str, str] = getattr(cases(name), "EQUIVALENT", {})
    alive = [mutant for mutant, by in outcomes.items() if not by]
    return {
        "repository": NAMES[name],
        "commit": commit,
        "mutants": len(outcomes),
        "killed": killed,
        "equivalent": {each: equivalent[each] for each in alive if each in equivalent},
        "survived": [each for each in alive if each not in equivalent],
        "failures": failures,
        "outcomes": outcomes,
    }


def _in_process(name: str, path: str, number: int, killed: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", f"{__package__}.mutate", name, path, str(number)]
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _SECONDS}
    try:
        done = subprocess.run(command, input=json.dumps(killed), check=False, **how)
    except subprocess.TimeoutExpired:
        return {"unclean": [f"no result within {_SECONDS} s"], "outcomes": {}}
    if done.returncode:
        return {"unclean": done.stderr.strip().splitlines()[-1:], "outcomes": {}}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main(name: str, path: str, number: int, killed: set[str]) -> dict[str, Any]:
    """Try the mutants of one program that no other has killed; return the outcome of each."""
    os.environ["SUNDOG_PEERS_CHECKOUT"] = path
    sys.path.insert(0, path)
    provide()
    case = cases(name).CASES[number]
    program = as_rank(case.program)
    with recorded() as functions:
        _, report = find_mutants(program, case.world, case.num_sms)
    theirs = [f for f in functions if f.fn.__code__.co_filename.startswith(path + os.sep)]
    own = [mutant for mutant in mutants(theirs, report.atomics) if not _counts(mutant)]
    every = [*own, *foreign_mutants(theirs)]
    left = [mutant for mutant in every if _name(mutant) not in killed]
    given = case.world, left, _SCHEDULES
    found = mutate(
        program, *given, num_sms=case.num_sms, strict=not report.remarks, expected=report.results
    )
    unclean = [f.rule or f.kind for f in report.findings]
    return {"unclean": unclean, "outcomes": {_name(o.mutant): o.killed_by for o in found}}


def _counts(mutant: Mutant) -> bool:
    """Return whether it is the bound of a loop that stores tiles: such a loop waits for nothing."""
    line = int(mutant.where.rpartition(":")[2])
    loops = [
        node
        for node in ast.walk(function_tree(mutant.function))
        if isinstance(node, ast.While) and node.lineno == line
    ]
    calls = {called(node) for loop in loops for node in ast.walk(loop)}
    return mutant.what.startswith("while ") and "store" in calls


def _name(mutant: Any) -> str:
    return f"{Path(mutant.where).name} {mutant.owner}: {mutant.what}"


if __name__ == "__main__":
    given = set(json.loads(sys.stdin.read()))
    print("\n" + json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), given)))
