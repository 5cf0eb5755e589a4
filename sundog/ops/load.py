"""Turn words into objects: an op's name, module or file into its module, name=value into a Problem.

An op is named all_gather, all_gather.push, package.module or path/file.py. Fields of problems and
configs are written block=4096, or in JSON.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ..callsite import raised_at, relative
from ..errors import SundogError
from .op import FUNCTIONS, OPS, SHAPE

_KINDS = {int: "a whole number", bool: "true or false", torch.dtype: "a dtype of torch"}


def functions() -> dict[str, Callable[..., Any]]:
    """Return every op's function of a world by name, from the file named like the op."""
    found = dict(FUNCTIONS)
    for key, path in OPS.items():
        name = key.partition(".")[0]
        found.setdefault(name, f"{path.rpartition('.')[0]}.{name}")
    return {name: getattr(load(path), name) for name, path in found.items()}


@functools.cache
def algorithms(name: str) -> dict[str, ModuleType]:
    """Return an op's algorithms by name; only that one for 'all_gather.push' or a module's path."""
    own = [key.partition(".")[2] for key in OPS if key.partition(".")[0] == name]
    if own:
        return {algo: find(f"{name}.{algo}") for algo in own}
    return {name.partition(".")[2] if name in OPS else "": find(name)}


def find(name: str) -> ModuleType:
    """Find an op's first algorithm, one by name, or a module or file with the names of SHAPE."""
    name = next((key for key in OPS if key.partition(".")[0] == name), name)
    try:
        module = load(OPS.get(name, name))
    except ModuleNotFoundError:
        raise ValueError(_unknown(name)) from None
    if not is_op(module):
        missing = [each for each in SHAPE if not hasattr(module, each)]
        hint = f"; did you mean its function, {name}:main?" if hasattr(module, "main") else ""
        raise ValueError(f"{name} is not an op: it lacks {', '.join(missing)}{hint}")
    return module


def is_op(module: ModuleType) -> bool:
    return all(hasattr(module, each) for each in SHAPE)


def _unknown(name: str) -> str:
    known = list(dict.fromkeys(key.partition(".")[0] for key in OPS))
    near = difflib.get_close_matches(name, [*known, *OPS], 1)
    if near:
        return f"op {name!r} is not known: did you mean {near[0]!r}?"
    return f"op {name!r} is not known, and no module has that name; ops: {', '.join(known)}"


def load(name: str) -> ModuleType:
    """Load a module, or a file if the name ends in .py.

    Raises ModuleNotFoundError if the module does not exist, and ValueError, with the line, if it
    can't be imported.
    """
    if not name.endswith(".py"):
        return _imported(name, lambda: importlib.import_module(name))
    if not os.path.exists(name):
        raise ValueError(f"{name}: no such file")
    return _imported(name, lambda: _load_file(os.path.abspath(name)))


def load_package(folder: str) -> ModuleType:
    """Load a folder with an __init__.py, whose files may import each other."""
    name = os.path.basename(os.path.normpath(folder))
    path = os.path.join(folder, "__init__.py")
    places = [folder]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    module = sys.modules[name] = _new_module(spec)
    return _imported(folder, lambda: _executed(module))


@functools.cache  # by path: all ranks need the same classes and kernels
def _load_file(path: str) -> ModuleType:
    name = os.path.splitext(os.path.basename(path))[0]
    module = _new_module(importlib.util.spec_from_file_location(name, path))
    sys.modules.setdefault(name, module)  # a script with a module's name must not replace it
    return _executed(module)


def _imported(name: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name} cannot be imported: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """Return a sentence that says where an error was raised, and which."""
    path, line, _ = raised_at(error)
    place = "" if isinstance(error, SyntaxError) else f"{relative(path)}:{line}: "
    return f"{place}{type(error).__name__}: {error}"


def _new_module(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def _executed(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    return module


@contextmanager
def running(what: str) -> Iterator[None]:
    """Turn what a user's op or function raises into a sentence with its line."""
    try:
        yield
    except (SundogError, ValueError):
        raise
    except Exception as error:
        raise SundogError(f"{what} failed: {sentence(error)}") from error


# fields of a problem or a config


def value(word: str) -> Any:
    """Read a number, a torch dtype or a bool; return any other word itself."""
    kind = getattr(torch, word, None)
    if isinstance(kind, torch.dtype):
        return kind
    if word in ("true", "false"):
        return word == "true"
    try:
        return int(word)
    except ValueError:
        return word


def parse(text: str) -> dict[str, Any]:
    """Read 'block=4096,dtype=bfloat16' as a dictionary."""
    found = {}
    for word in filter(None, text.split(",")):
        name, equals, rest = word.partition("=")
        if not (name and equals and rest):
            raise ValueError(f"{word!r} in {text!r}: expected name=value,name=value,...")
        found[name] = value(rest)
    return found


def changed(made: Any, changes: dict[str, Any]) -> Any:
    """Change some fields of a problem or config. Raise ValueError where that is not possible."""
    known = {field.name: str(field.type) for field in dataclasses.fields(made)}
    for name, new in changes.items():
        if name not in known:
            raise ValueError(f"{type(made).__name__} has no {name!r}: {', '.join(known)}")
        old = getattr(made, name)
        kind = torch.dtype if "dtype" in known[name] else type(new if old is None else old)
        if type(new) is not kind:
            raise ValueError(f"{name}={new}: expected {_KINDS.get(kind, kind.__name__)}")
        if isinstance(new, int) and new < 0:
            raise ValueError(f"{name}={new} is negative")
        if name == "size" and new != old:
            raise ValueError(f"size={new}: the world has {old} ranks")
    return dataclasses.replace(made, **changes)


def plain(made: Any) -> dict[str, Any]:
    """Return a problem or config as JSON data, with a dtype by its name."""
    words = {
        k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v
        for k, v in dataclasses.asdict(made).items()
    }
    found: dict[str, Any] = json.loads(json.dumps(words))
    return found
