"""Return a kernel's source with everything that it calls, as the same bytes in every checkout.

    kernel_source(kernel)  ->  [{"name", "path", "text", "captures", "options"}, ...]  kernel first

A kernel is a plain function or anything with `.fn` (Triton's JITFunction, Autotuner and Heuristics,
Helion's Kernel): neither package is imported. What a function calls is read from its bytecode:
global names, closure variables, and attributes of modules; functions are followed, constants kept
as `captures`. Python's, torch's, triton's and helion's own functions are not followed: `versions`
stands for those.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from .plain import plain, relative_path

_LIBRARIES = frozenset({"torch", "triton", "helion", "numpy", "builtins"})
# What changes a jit function's code without being in its text.
_JIT_OPTIONS = ("noinline", "do_not_specialize", "do_not_specialize_on_alignment")
_MISSING = object()


def kernel_source(kernel: object) -> list[dict[str, Any]]:
    """Return the kernel and, in order of first use, every function and class that it reaches."""
    found: list[dict[str, Any]] = []
    queue: deque[object] = deque([kernel])
    seen: list[object] = []  # objects, not ids, since a bound method made meanwhile would be freed
    while queue:
        item, options = _unwrap(queue.popleft(), queue)
        if any(item is other for other in seen):
            continue
        seen.append(item)
        if isinstance(item, type):
            found.append(_describe_class(item, queue))
        elif isinstance(item, types.FunctionType):
            found.append(_describe_function(item, options, queue))
        else:
            found.append(_entry(getattr(item, "__name__", type(item).__name__), None, None))
    return found


def _entry(name: str, path: str | None, text: str | None) -> dict[str, Any]:
    return {"name": name, "path": path, "text": text, "captures": {}, "options": {}}


def _unwrap(item: object, queue: deque[object]) -> tuple[object, dict[str, Any]]:
    """Return the function inside wrappers, with the options that they carry."""
    options: dict[str, Any] = {}
    while not isinstance(item, (types.FunctionType, type)):
        for name in _JIT_OPTIONS:
            if getattr(item, name, None):
                options[name] = plain(getattr(item, name))
        if isinstance(item, functools.partial):
            options["partial"] = [plain(item.args), plain(item.keywords)]
            queue.extend(v for v in (*item.args, *item.keywords.values()) if _is_called(v))
            item = item.func
        elif isinstance(item, types.MethodType):
            item = item.__func__
        elif callable(getattr(item, "fn", None)):
            item = item.fn  # type: ignore[attr-defined]
        else:
            break
    return item, options


def _describe_function(
    fn: types.FunctionType, options: dict[str, Any], queue: deque[object]
) -> dict[str, Any]:
    text, exact = _text(fn)
    entry = _entry(fn.__qualname__, relative_path(fn.__code__.co_filename), text)
    entry["options"] = options
    if not exact:
        entry["options"] = {**options, "bytecode": _bytecode_hash(fn.__code__)}
    for name, value in _used(fn):
        if _is_called(value):
            queue.append(value)
        elif not _is_library(value):
            entry["captures"][name] = plain(value)
            queue.extend(_called_inside(value))
    defaults = (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    queue.extend(value for value in defaults if _is_called(value))
    return entry


def _describe_class(cls: type, queue: deque[object]) -> dict[str, Any]:
    try:
        text, path = textwrap.dedent(inspect.getsource(cls)), inspect.getfile(cls)
    except (OSError, TypeError):
        return _entry(cls.__qualname__, None, None)
    for member in vars(cls).values():
        fn = getattr(member, "__func__", getattr(member, "fn", member))
        # Generated methods (a dataclass's) have no file of their own, and no meaning of their own.
        if isinstance(fn, types.FunctionType) and fn.__code__.co_filename == path:
            queue.extend(value for _, value in _used(fn) if _is_called(value))
    return _entry(cls.__qualname__, relative_path(path), text)


def _text(fn: types.FunctionType) -> tuple[str | None, bool]:
    """Return the function's text without its decorators, and whether the text is complete.

    The decorators are left out because they hold what is being searched (configs) or what is
    recorded elsewhere (settings): the same kernel under `@autotune` is the same kernel.
    """
    try:
        text = textwrap.dedent(inspect.getsource(fn.__code__))
    except (OSError, TypeError):
        return None, False
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a lambda in the middle of an expression
        return text, False
    if fn.__name__ != "<lambda>":
        first = tree.body[0]
        skip = first.lineno - 1 if isinstance(first, ast.FunctionDef) else 0
        return "".join(text.splitlines(keepends=True)[skip:]), True
    lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return (ast.unparse(lambdas[0]), True) if len(lambdas) == 1 else (text, False)


def _bytecode_hash(code: types.CodeType) -> str:
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for const in code.co_consts:
        inner = _bytecode_hash(const) if isinstance(const, types.CodeType) else repr(const)
        digest.update(inner.encode())
    return digest.hexdigest()


def _used(fn: types.FunctionType) -> Iterator[tuple[str, object]]:
    """(dotted name, value) of every global, closure variable and module attribute in `fn`."""
    scope: dict[str, object] = dict(fn.__globals__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            scope.pop(name, None)
    known: set[str] = set()
    for chain in _chains(fn.__code__):
        name, value = _resolve(chain, scope)
        if value is not _MISSING and name not in known:
            known.add(name)
            yield name, value


def _chains(code: types.CodeType) -> Iterator[list[str]]:
    """`a.b.c` of the code as ["a", "b", "c"], where `a` is global or from a closure."""
    chain: list[str] = []
    for op in dis.get_instructions(code):
        if op.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(op.argval)
        elif op.opname in ("CACHE", "PUSH_NULL"):
            continue
        else:
            if chain:
                yield chain
            chain = [op.argval] if op.opname in _LOADS else []
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _chains(const)


_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})


def _resolve(chain: list[str], scope: dict[str, object]) -> tuple[str, object]:
    """Follow modules and plain objects to a function, a class or the chain's end."""
    value = scope.get(chain[0], _MISSING)
    name = chain[0]
    for attribute in chain[1:]:
        if value is _MISSING or _is_called(value) or _is_library(value):
            break
        inner = getattr(value, attribute, _MISSING)
        if inner is _MISSING:
            break
        name, value = f"{name}.{attribute}", inner
    if isinstance(value, types.ModuleType) or _is_method_of_plain(value):
        return name, _MISSING
    return name, value


def _is_method_of_plain(value: object) -> bool:
    # [].append and the like, which are not the user's code.
    return isinstance(value, (types.BuiltinFunctionType, types.MethodWrapperType))


def _is_called(value: object) -> bool:
    """Return True for a function or class of the user's, or a wrapper of one."""
    if _is_library(value) or isinstance(value, types.ModuleType):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
        return True
    return callable(getattr(value, "fn", None))


def _called_inside(value: object) -> list[object]:
    """Find functions in a captured list, tuple or dict (a table of epilogues)."""
    if isinstance(value, dict):
        value = list(value.values())
    return [v for v in value if _is_called(v)] if isinstance(value, (list, tuple)) else []


def _is_library(value: object) -> bool:
    inner = getattr(value, "fn", value)
    if isinstance(value, types.ModuleType):
        module: object = value.__name__
    elif isinstance(inner, (types.FunctionType, types.MethodType, type)):
        module = getattr(inner, "__module__", None)
    else:
        return False  # an instance: a constant, whatever its class
    top = str(module).partition(".")[0]
    return top in _LIBRARIES or top in sys.stdlib_module_names
