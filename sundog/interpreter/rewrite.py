"""Rewrite a kernel's source for the interpreter: Python's syntax with Triton's meaning.

Some of Python's syntax can't be overloaded, so it is rewritten: assigned numbers become tensors, a
`range` yields tensors, `and`, `or` and `not` work on tiles, a call of a GPU's math library says
that it can't be simulated, and Gluon's functions become their twins. The result runs in the
kernel's own globals, which stay unchanged: the new code needs only one free variable.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from ..callsite import relative
from ..errors import CannotInterpret
from .branches import NOT_TAKEN, TAKEN, Branch, SomeThreads, assigned_names, selecting
from .folding import Turns, carried_names, watch_turns
from .gluon_twins import Gluon, not_for_gluon, twin_name

_HELPERS = "_sundog"
_BUILTIN = "__triton_builtin__"
_LIBRARY = ("ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt")
_CHAIN = "_InterpreterComparison"  # Triton 3.9's name for a chain of comparisons


def _is_foreign_builtin(called: Any) -> bool:
    """Return whether a user's module made it with Triton's `builtin` or `extern`."""
    module = getattr(called, "__module__", None) or ""  # our stand-ins need no semantic
    return hasattr(called, _BUILTIN) and not module.startswith(("triton.", "sundog."))


class Helpers:
    """What rewritten kernels call."""

    tl = tl
    variables = builtins.locals  # of the kernel that calls it

    def __init__(self, semantic: TritonSemantic) -> None:
        self.semantic = semantic
        self.gluon = Gluon(semantic.builder)

    def assigned(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = map(self.assigned, value)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, tl.core.tuple):  # a shape
            return tuple(map(self.assigned, value))
        return self.semantic.to_tensor(value, False)

    def range(self, first: Any, last: Any = None, step: Any = 1, *hints: Any, **more: Any) -> Turns:
        """Stand in for `range` and `tl.range`, whose hints are for compilers."""
        bounds = (0, first, step) if last is None else (first, last, step)
        dtype = tl.int32
        for bound in bounds:
            dtype = self.semantic.integer_promote_impl(dtype, self.semantic.to_tensor(bound).dtype)
        numbers = range(*(int(tl.core._unwrap_if_constexpr(bound)) for bound in bounds))
        return Turns(self.semantic.builder, numbers, dtype)

    def both(self, first: Any, *rest: Callable[[], Any]) -> Any:
        return self._logical(first, rest, "logical_and", False)

    def either(self, first: Any, *rest: Callable[[], Any]) -> Any:
        return self._logical(first, rest, "logical_or", True)

    def _logical(self, value: Any, rest: Any, method: str, decides: bool) -> Any:
        """Do as the compiler: values known at compile time short-circuit, tensors do not."""
        result = None
        for place in range(1 + len(rest)):
            value = tl.core._unwrap_if_constexpr(rest[place - 1]() if place else value)
            if isinstance(value, tl.tensor):
                result = value if result is None else getattr(result, method)(value)
            elif bool(value) is decides:
                return value
        return value if result is None else result

    def inverted(self, value: Any) -> Any:
        return self.semantic.not_(value) if isinstance(value, tl.tensor) else not value

    def truth(self, value: Any) -> bool:
        """Return the truth of a condition. In Triton's own code a tensor is an object, so true."""
        value = tl.core._unwrap_if_constexpr(value)
        if not isinstance(value, tl.tensor):
            return bool(value)
        data = value.handle.data
        if data.size != 1:
            data = self._in_threads(value, data)
        return bool(data.item())

    def _in_threads(self, value: Any, data: np.ndarray) -> np.ndarray:
        """Return the one truth that a value per thread has in all threads that read it."""
        if value.type.is_block():
            raise ValueError(f"a condition of {data.size} elements; reduce it, or use tl.where")
        mask = self.semantic.builder.machine.program.mask
        seen = np.unique(data if mask is None else data[mask])
        if seen.size > 1:
            raise CannotInterpret(
                "threads of one program disagree about a condition that is not an `if` without "
                "`else`, `return`, `break` or `continue`: only such a branch is simulated per "
                "thread"
            )
        return seen[:1] if seen.size else np.zeros(1, bool)

    def _per_thread(self, value: Any) -> bool:
        """Return whether each thread has its own truth. A trial of turns has no threads, and ends
        if it is asked for their mask (folding.py)."""
        if not isinstance(value, tl.tensor) or value.handle.data.size == 1 or value.type.is_block():
            return False
        return self.semantic.builder.machine.program.mask is not Ellipsis

    def branch(self, value: Any) -> Branch:
        """Return what runs the body of an `if`, for the threads where its condition is true."""
        if not self._per_thread(value):
            return TAKEN if self.truth(value) else NOT_TAKEN
        return SomeThreads(self.semantic.builder.machine.program, value.handle.data.astype(bool))

    def turn(self, value: Any, together: bool = False) -> bool:
        """Return the truth of a loop's condition, once per turn; threads leave one by one.

        A loop with a `return`, `break` or `continue` needs them all `together`.
        """
        self.semantic.builder.machine.accesses.turned()
        if not together and self._per_thread(value):
            program = self.semantic.builder.machine.program
            holds = value.handle.data.astype(bool)
            program.mask = holds if program.mask is None else program.mask & holds
            return bool(program.mask.any())
        return self.truth(value)

    def threads(self) -> Branch:
        """Return what keeps the current threads, since some may leave a loop inside."""
        program = self.semantic.builder.machine.program
        return SomeThreads(program, np.ones(1, bool))

    def chosen(self, value: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """Return one of two values, per thread if the condition is a value per thread."""
        if self._per_thread(value):
            return tl.where(value, yes(), no())
        return yes() if self.truth(value) else no()

    def min(self, first: Any, *rest: Any) -> Any:
        return self._least(tl.minimum, min, first, rest)

    def max(self, first: Any, *rest: Any) -> Any:
        return self._least(tl.maximum, max, first, rest)

    def _least(self, on_tensors: Callable, plain: Callable, first: Any, rest: tuple) -> Any:
        values = [tl.core._unwrap_if_constexpr(value) for value in (first, *rest)]
        if not any(isinstance(value, tl.tensor) for value in values):
            return plain(*values)
        return functools.reduce(on_tensors, values)

    def imported(self, function: Callable) -> Callable:
        """Return a function of `tl` that a kernel's module has imported by name."""
        return self.builtin(getattr(function, "__wrapped__", function))

    def builtin(self, function: Callable) -> Callable:
        """Return a function of `tl.extra`, or a user's own, as a kernel calls it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs, _semantic=self.semantic)

        return call

    def library(self, name: str) -> Callable:
        """Return tl's function for one of libdevice that tl has too; others are refused."""
        short = name.rpartition(".")[2]
        if short in _LIBRARY:
            return self.imported(getattr(tl.math, short))

        def call(*args: Any, **kwargs: Any) -> Any:
            raise CannotInterpret(f"library function {name} runs only on a GPU; use tl operations")

        return call


def function_tree(kernel: JITFunction) -> ast.FunctionDef:
    """Return the kernel's syntax tree, with the line numbers that it has in its file."""
    tree = ast.parse(textwrap.dedent("".join(kernel.raw_src))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    ast.increment_lineno(tree, kernel.starting_line_number - 1)
    return tree


def called_by_gluon(kernel: JITFunction) -> list[JITFunction]:
    """Return a Gluon kernel and all functions, ours and the user's, that it may call."""
    found = {kernel.fn: kernel}
    todo = [kernel]
    while todo:
        function = todo.pop()
        names = _Names(function.fn)
        for node in ast.walk(function_tree(function)):
            thing = names.find(node)
            reason = not_for_gluon(thing, ast.unparse(node)) if thing is not None else None
            if reason is not None:
                raise _refused(function.fn, node, reason)
            if not isinstance(thing, JITFunction) or thing.fn in found:
                continue
            if not str(thing.fn.__module__).startswith("triton."):
                found[thing.fn] = thing
                todo.append(thing)
    return list(found.values())


def rewrite(fn: Callable, tree: ast.FunctionDef, helpers: Helpers) -> Callable:
    """Make a function like `fn` with the body of `tree`, rewritten."""
    given = {_HELPERS: helpers, _CHAIN: getattr(stock, _CHAIN, None)}
    names = [*given, *fn.__code__.co_freevars]
    outer = ast.parse(f"def outer({', '.join(names)}):\n    return None").body[0]
    assert isinstance(outer, ast.FunctionDef)
    ast.increment_lineno(outer, tree.lineno - 1)
    outer.body.insert(0, _Rewriter(fn).visit(_without_signature(tree)))
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, fn.__code__.co_filename, "exec")
    body = _code_named(_code_named(code, "outer"), fn.__name__)
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells.update({name: types.CellType(value) for name, value in given.items()})
    if fn.__name__ not in cells:  # unless it calls itself, which `outer` would define
        cells[fn.__name__] = types.CellType(fn.__globals__.get(fn.__name__))
    closure = tuple(cells[name] for name in body.co_freevars)
    twin = types.FunctionType(body, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    twin.__kwdefaults__ = fn.__kwdefaults__
    return twin


class _Names:
    """What names, and names in modules, mean outside of a function."""

    def __init__(self, fn: Callable) -> None:
        known = inspect.getclosurevars(fn)
        # all globals, since the code does not use the names in annotations
        self.known = {**known.builtins, **fn.__globals__, **known.nonlocals}
        self.local = fn.__code__.co_varnames

    def find(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            owner = self.find(node.value)
            return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
        if not isinstance(node, ast.Name) or node.id in self.local:
            return None
        return self.known.get(node.id)


class _Rewriter(stock.ASTTransformer):
    """Extends Triton's rewriter, which handles chains of comparisons from 3.9 on."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn
        self.names = _Names(fn)
        self.num_branches = 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) > 1:
            raise self._refused(node, "a = b = c is not in Triton's language")
        return ast.copy_location(
            ast.Assign(node.targets, _call("assigned", self.visit(node.value))), node
        )

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        value = self.visit(node.value) if node.value is not None else None
        if value is not None and self.names.find(node.annotation) is not tl.constexpr:
            value = _call("assigned", value)
        return ast.copy_location(
            ast.AnnAssign(node.target, node.annotation, value, node.simple), node
        )

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Turn x += y into x = x + y, as the compiler has it."""
        old = ast.copy_location(_loaded(node.target), node.target)
        changed = ast.copy_location(ast.BinOp(old, node.op, node.value), node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], changed), node))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) == 1:
            return self.generic_visit(node)
        if not hasattr(stock, _CHAIN):
            raise self._refused(node, "a < b < c is not in the language of this Triton; use &")
        return super().visit_Compare(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        call, carried = node.iter, carried_names(node)
        called = self.names.find(call.func) if isinstance(call, ast.Call) else None
        if isinstance(call, ast.Call) and called is builtins.range:
            node.iter = _call("range", *call.args)
        self.generic_visit(node)
        is_range = called in (builtins.range, tl.range, tl.core.range)
        if carried is not None and is_range:
            watch_turns(node, carried, f"{_HELPERS}_turns{node.lineno}")
        return node

    def _condition(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        node.test = ast.copy_location(_call("truth", node.test), node.test)
        return node

    visit_Assert = _condition

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        nothing = ast.arguments([], [], None, [], [], None, [])
        both = (ast.Lambda(nothing, each) for each in (node.body, node.orelse))
        return ast.copy_location(_call("chosen", node.test, *both), node)

    def visit_If(self, node: ast.If) -> ast.AST:
        if node.orelse or _leaves(node):
            return self._condition(node)
        branch, names = self._new_branch(), assigned_names(node.body)
        self.generic_visit(node)
        taken = ast.Attribute(ast.Name(branch, ast.Load()), "is_taken", ast.Load())
        body = ast.copy_location(ast.If(taken, selecting(node, names, branch, _HELPERS), []), node)
        item = ast.withitem(_call("branch", node.test), ast.Name(branch, ast.Store()))
        return ast.copy_location(ast.With([item], [body]), node)

    def visit_While(self, node: ast.While) -> ast.AST:
        branch, names, together = self._new_branch(), assigned_names(node.body), _leaves(node)
        self.generic_visit(node)
        node.test = ast.copy_location(_call("turn", node.test, ast.Constant(together)), node.test)
        if not together:
            node.body = selecting(node, names, branch, _HELPERS)
        item = ast.withitem(_call("threads"), ast.Name(branch, ast.Store()))
        return ast.copy_location(ast.With([item], [node]), node)

    def _new_branch(self) -> str:
        """Return a name for a branch, since one may be in another."""
        self.num_branches += 1
        return f"{_HELPERS}_branch{self.num_branches}"

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        first, *rest = (self.visit(value) for value in node.values)
        nothing = ast.arguments([], [], None, [], [], None, [])
        name = "both" if isinstance(node.op, ast.And) else "either"
        later = (ast.Lambda(nothing, value) for value in rest)
        return ast.copy_location(_call(name, first, *later), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.copy_location(_call("inverted", node.operand), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = self.names.find(node.func)
        module = getattr(called, "__module__", None) or ""
        if called in (builtins.min, builtins.max):  # the compiler replaces them by tl's
            node.func = ast.copy_location(_helper(called.__name__), node.func)
            return self.generic_visit(node)
        in_tl = module.startswith("triton.language.") and ".extra." not in module
        if isinstance(node.func, ast.Name) and in_tl and hasattr(called, _BUILTIN):
            self.generic_visit(node)
            node.func = ast.copy_location(_call("imported", node.func), node.func)
            return node
        if module.startswith("triton.language.extra.") and module.endswith(".libdevice"):
            name = ast.copy_location(ast.Constant(ast.unparse(node.func)), node)
            node.func = ast.copy_location(_call("library", name), node.func)
        elif module.startswith("triton.language.extra.") or _is_foreign_builtin(called):
            self.generic_visit(node)
            node.func = ast.copy_location(_call("builtin", node.func), node.func)
            return node
        return self.generic_visit(node)

    def visit_Attribute(self, node: Any) -> ast.AST:
        """Replace a name in a module, and a bare name."""
        thing = self.names.find(node)
        try:
            twin = twin_name(thing, ast.unparse(node)) if thing is not None else None
        except LookupError as error:
            raise self._refused(node, str(error)) from None
        if twin is None:
            return self.generic_visit(node)
        return ast.copy_location(_helper(*twin.split(".")), node)

    visit_Name = visit_Attribute

    def _refused(self, node: ast.AST, reason: str) -> CannotInterpret:
        return _refused(self.fn, node, reason)


def _refused(fn: Callable, node: ast.AST, reason: str) -> CannotInterpret:
    at = f"{relative(fn.__code__.co_filename)}:{getattr(node, 'lineno', 0)}"
    return CannotInterpret(f"kernel {fn.__name__} at {at}: {reason}")


def _leaves(node: ast.AST) -> bool:
    """Return whether a body may end early."""
    return any(isinstance(each, ast.Return | ast.Break | ast.Continue) for each in ast.walk(node))


def _loaded(target: ast.AST) -> ast.expr:
    """Return the target of an assignment as an expression."""
    return ast.parse(ast.unparse(target), mode="eval").body


def _call(name: str, *args: ast.AST) -> ast.Call:
    return ast.Call(_helper(name), list(args), [])  # type: ignore[arg-type]


def _helper(*names: str) -> ast.expr:
    found: ast.expr = ast.Name(_HELPERS, ast.Load())
    for name in names:
        found = ast.Attribute(found, name, ast.Load())
    return found


def _without_signature(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Drop decorators, annotations and defaults, since only the body is rewritten."""
    tree.decorator_list = []
    tree.returns = None
    arguments = tree.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.defaults = []
    arguments.kw_defaults = [None for _ in arguments.kwonlyargs]
    return tree


def _code_named(code: types.CodeType, name: str) -> types.CodeType:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and constant.co_name == name:
            return constant
    raise AssertionError(f"no code object named {name}")
