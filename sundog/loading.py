"""A user's code by its name on the command line, package.module or path/file.py; what it raises."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

from .errors import SundogError
from .source import raised_at, relative

__all__ = ["load", "load_package", "running"]


def load(name: str) -> ModuleType:
    """A module, or a file if the name ends in .py.

    ModuleNotFoundError if there is no module of that name; ValueError, with the line, if it is
    there and can't be imported.
    """
    if not name.endswith(".py"):
        return _imported(name, lambda: importlib.import_module(name))
    if not os.path.exists(name):
        raise ValueError(f"{name}: no such file")
    return _imported(name, lambda: _load_file(os.path.abspath(name)))


def load_package(folder: str) -> ModuleType:
    """A folder with an __init__.py, whose files may import each other."""
    name = os.path.basename(os.path.normpath(folder))
    path = os.path.join(folder, "__init__.py")
    places = [folder]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    module = sys.modules[name] = _made(spec)
    return _imported(folder, lambda: _executed(module))


@functools.cache  # by path: all ranks must mean the same classes and kernels
def _load_file(path: str) -> ModuleType:
    name = os.path.splitext(os.path.basename(path))[0]
    module = _made(importlib.util.spec_from_file_location(name, path))
    sys.modules.setdefault(name, module)  # a script named as a module must not take its place
    return _executed(module)


def _imported(name: str, run: Callable[[], ModuleType]) -> ModuleType:
    try:
        return run()
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{name} cannot be imported: {_sentence(error)}") from error


@contextmanager
def running(what: str) -> Iterator[None]:
    """A tool runs somebody's op or function: what that raises becomes a sentence with the line."""
    try:
        yield
    except (SundogError, ValueError):
        raise
    except Exception as error:
        raise SundogError(f"{what} failed: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    path, line, _ = raised_at(error)
    place = "" if isinstance(error, SyntaxError) else f"{relative(path)}:{line}: "
    return f"{place}{type(error).__name__}: {error}"


def _made(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def _executed(module: ModuleType) -> ModuleType:
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    return module
