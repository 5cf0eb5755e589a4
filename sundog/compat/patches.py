"""Replace what torch has once per process by answers per rank, and undo it at the end.

A replacement is called only by threads that are ranks; every other thread gets torch's own.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

_here = threading.local()
_lock = threading.Lock()
_users = 0
_MISSING = object()


def current() -> Any:
    """Return the rank of the calling thread, or None."""
    return getattr(_here, "rank", None)


class Patches:
    """Attributes that are replaced while a rank is entered."""

    def __init__(self) -> None:
        self._changes: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._changes.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def set_everywhere(self, owner: Any, values: dict[str, Any]) -> None:
        """Replace a module's attributes, also where others have them by `from owner import name`.

        A program is imported before its ranks begin, so it may hold torch's own. torch's modules
        keep the classes, from which they derive.
        """
        for module, name, key in _holders(owner, tuple(values), len(sys.modules)):
            if vars(module).get(name) is getattr(owner, key) or module is owner:
                self.set(module, name, values[key])

    def undo(self) -> None:
        for owner, name, value in reversed(self._changes):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._changes.clear()


@functools.lru_cache(maxsize=8)  # a check enters its ranks for each schedule: 25 ms a time
def _holders(owner: Any, names: tuple[str, ...], num_modules: int) -> list[tuple[Any, str, str]]:
    """Find the modules with these attributes. The owner is last: its values lead to the others."""
    wanted = {id(getattr(owner, name)): name for name in names}
    found = []
    for key, module in [*sys.modules.items()]:
        is_torch = key.partition(".")[0] == "torch"
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if id(value) in wanted and not (is_torch and isinstance(value, type)):
                found.append((module, name, wanted[id(value)]))
    others = [each for each in found if each[0] is not owner]
    return [*others, *((owner, name, name) for name in names)]


_patches = Patches()
_undo: list[Callable[[], None]] = []


@contextmanager
def entered(rank: Any, install: Callable[[Patches], list[Callable[[], None]]]) -> Iterator[None]:
    """Make the calling thread this rank. The first one installs all, and the last one undoes it."""
    global _users
    with _lock:
        if _users == 0:
            _undo.extend(install(_patches))
        _users += 1
    _here.rank = rank
    try:
        yield
    finally:
        _here.rank = None
        with _lock:
            _users -= 1
            if _users == 0:
                _patches.undo()
                while _undo:
                    _undo.pop()()


def for_ranks(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function(rank, ...)` in ranks, and torch's own elsewhere."""

    def call(*args: Any, **kwargs: Any) -> Any:
        rank = current()
        return original(*args, **kwargs) if rank is None else function(rank, *args, **kwargs)

    call.__name__ = getattr(original, "__name__", "call")
    call.__doc__ = getattr(original, "__doc__", None)
    return call


class PerRank(MutableMapping):
    """A module's dictionary, one for each rank."""

    def __init__(self, name: str, original: Any) -> None:
        self._name, self._original = name, original

    @property
    def _mine(self) -> Any:
        rank = current()
        return self._original if rank is None else rank.dicts.setdefault(self._name, {})

    def __getitem__(self, key: Any) -> Any:
        return self._mine[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._mine[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._mine[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)


class Environment(dict):
    """The process's variables, overridden by those that torchrun gives each rank."""

    def _own(self) -> dict:
        rank = current()
        return {} if rank is None else rank.environment

    def __getitem__(self, key: Any) -> Any:
        own = self._own()
        return own[key] if key in own else super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        return key in self._own() or super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        own = self._own()
        return iter([*(key for key in super().__iter__() if key not in own), *own])


def variables(rank: int, size: int) -> dict[Any, Any]:
    """Return a rank's variables, as os.environ holds them."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
             "GROUP_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}  # fmt: skip
    environment: Any = os.environ
    return {
        environment.encodekey(k): environment.encodevalue(str(value)) for k, value in given.items()
    }
