"""Triton's interpreter, on demand: a `JITFunction` stays one, and its twin runs on numpy.

`twin(kernel)` is the kernel's Python function, rewritten by Triton's own rewriter. While programs
run (`with_language`), `triton.language` computes with numpy and calling a JITFunction calls its
twin; afterwards every attribute is put back, so the same object compiles for a GPU before, after
and in between. No environment variable is involved.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
import weakref
from collections.abc import Callable
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from ..errors import CannotInterpret
from .builder import Builder
from .numerics import is_raw

__all__ = ["Language", "convert_argument", "language", "twin"]

_MISSING = object()
_twins: weakref.WeakKeyDictionary[Callable, Callable] = weakref.WeakKeyDictionary()


class Language:
    """`triton.language` with every attribute that the interpreter replaces, in both versions."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.semantic = TritonSemantic(self.builder)
        self.patched = False
        self._changes: list[tuple[Any, str, Any, Any]] = []  # owner, name, theirs, ours
        ours = {**self._stock_changes(), **self._own_changes()}
        for (owner, name), value in ours.items():
            self._changes.append((owner, name, vars(owner).get(name, _MISSING), value))

    def patch(self) -> None:
        if not self.patched:
            for owner, name, _, ours in self._changes:
                setattr(owner, name, ours)
            self.patched = True

    def restore(self) -> None:
        if self.patched:
            for owner, name, theirs, _ in reversed(self._changes):
                _put_back(owner, name, theirs)
            self.patched = False

    def _stock_changes(self) -> dict[tuple[Any, str], Any]:
        """Let Triton patch once with our builder, note what it did, and put everything back.

        By comparing, since Triton's own restore copies inherited attributes down the hierarchy.
        """
        classes = [member for member in vars(tl.core).values() if inspect.isclass(member)]
        owners = [tl, tl.core, tl.math, tl.standard, *classes]
        before = [dict(vars(owner)) for owner in owners]
        builders = stock.interpreter_builder, stock.interpreter_semantic
        stock.interpreter_builder, stock.interpreter_semantic = self.builder, self.semantic
        try:
            stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        finally:
            stock.interpreter_builder, stock.interpreter_semantic = builders
        changes = {}
        for owner, theirs in zip(owners, before, strict=True):
            for name, value in dict(vars(owner)).items():
                if value is not theirs.get(name, _MISSING):
                    changes[owner, name] = self._bind(value, name)
                    _put_back(owner, name, theirs.get(name, _MISSING))
        return changes

    def _bind(self, patched: Any, name: str) -> Any:
        """Triton's wrapper filters its keywords on every call; passing ours once is enough."""
        if name in ("reduce", "associative_scan"):
            return self._on_numbers(patched)
        member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
        if member is None:
            return patched
        semantic = self.semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        return call

    def _on_numbers(self, reduction: Callable) -> Callable:
        """Reductions and scans run in numpy, so bfloat16 is widened before and narrowed after."""

        def call(values: Any, *args: Any, **kwargs: Any) -> Any:
            many = values if isinstance(values, tuple) else (values,)
            raw = [v.dtype if is_raw(v.dtype) else None for v in many]
            if not any(raw):
                return reduction(values, *args, **kwargs)
            wide = tuple(self.semantic.cast(v, tl.float32) if d else v for v, d in zip(many, raw, strict=True))
            out = reduction(wide if isinstance(values, tuple) else wide[0], *args, **kwargs)
            outs = out if isinstance(out, tuple) else (out,)
            narrowed = tuple(self.semantic.cast(v, d) if d else v for v, d in zip(outs, raw, strict=True))
            return narrowed if isinstance(out, tuple) else narrowed[0]

        return call

    def _own_changes(self) -> dict[tuple[Any, str], Any]:
        changes: dict[tuple[Any, str], Any] = {
            (JITFunction, "__call__"): _call_twin,
            # numpy 2.4 refuses int() of an array with one axis
            (tl.tensor, "__index__"): lambda tensor: int(tensor.handle.data.item()),
        }
        for name, member in vars(tl.tensor).items():
            if isinstance(member, JITFunction):  # x.sum(): a method only once it is a function
                changes[tl.tensor, name] = _as_method(member)
        return changes


@functools.cache
def language() -> Language:
    """The one Language of this process: what it patches is process-wide too."""
    return Language()


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _as_method(function: JITFunction) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _call_twin(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    return twin(self)(*args, **kwargs)


def twin(kernel: JITFunction) -> Callable:
    """The Python function that the interpreter runs for a kernel, made once."""
    if kernel.fn not in _twins:
        _twins[kernel.fn] = rewrite(kernel.fn, function_tree(kernel.fn))
    return _twins[kernel.fn]


def function_tree(fn: Callable) -> ast.FunctionDef:
    """The function's syntax tree, with the line numbers that it has in its file."""
    try:
        lines, first = inspect.getsourcelines(fn)
    except (OSError, TypeError):
        raise CannotInterpret(
            f"kernel {fn.__name__}: its source can't be found, so it can't be simulated. Define it "
            "in a file, not with exec or at a prompt."
        ) from None
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    ast.increment_lineno(tree, first - 1)
    return tree


def rewrite(fn: Callable, tree: ast.FunctionDef) -> Callable:
    """Triton's rewriting of a kernel, in the kernel's own globals, which stay as they are.

    The names that the rewriter needs become free variables of the result instead of globals.
    """
    helpers = {
        "interpreter_semantic": language().semantic,
        "_InterpreterComparison": getattr(stock, "_InterpreterComparison", None),
    }
    inner = stock.FunctionRewriter.ast_transformer.visit(_without_signature(tree))
    names = [*helpers, *fn.__code__.co_freevars]
    outer = ast.parse(f"def outer({', '.join(names)}):\n    return None").body[0]
    assert isinstance(outer, ast.FunctionDef)
    ast.increment_lineno(outer, tree.lineno - 1)
    outer.body.insert(0, inner)
    module = ast.fix_missing_locations(ast.Module([outer], []))
    code = compile(module, inspect.getsourcefile(fn) or "<kernel>", "exec")
    body = _code_named(_code_named(code, "outer"), fn.__name__)
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    cells.update({name: types.CellType(value) for name, value in helpers.items()})
    closure = tuple(cells[name] for name in body.co_freevars)
    twin = types.FunctionType(body, fn.__globals__, fn.__name__, fn.__defaults__, closure)
    twin.__kwdefaults__ = fn.__kwdefaults__
    return twin


def _without_signature(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Decorators, annotations and defaults belong to the original; only the body is rewritten."""
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


def convert_argument(value: Any) -> Any:
    """A launch argument as the kernel sees it: scalars and pointers become `tl.tensor`s."""
    if isinstance(value, tl.constexpr):
        return value.value
    return stock._implicit_cvt(value)
