"""The random generators that Python, numpy and CUDA have one of per process, kept per rank.

Ranks take turns at every launch and wait, and hardly ever draw in between; to copy Python's and
numpy's states at each turn took 115 of its 135 us. So they are looked at first: in memory, where
both are a Mersenne twister and its position. What has not changed is not saved, and what the last
rank left as it should be is not loaded.
"""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from numpy import random as numpy_random  # np.random is imported on first use: in every child

__all__ = ["Generators"]

_TWISTER = struct.Struct("625I")  # 624 words and the position, before or behind them
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: Any = numpy_random.get_state.__self__  # type: ignore[attr-defined]
_NUMPY_TWISTER = _NUMPY._bit_generator


class Look(NamedTuple):
    """What a generator looks like: equal if its state is."""

    twister: bytes
    rest: Any


class _Kind(NamedTuple):
    look: Callable[[Look | None], Look]  # given the last one, which it returns if nothing changed
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Generators:
    """One rank's states."""

    _in_force: dict[str, Look] = {}  # noqa: RUF012 -- one per process: how they were last saved

    def __init__(self) -> None:
        self._states: dict[str, tuple[Look, Any]] = {}

    def save(self) -> None:
        for name, kind in _kinds():
            before = self._states[name][0] if name in self._states else None
            seen = kind.look(before)
            if seen is not before:
                self._states[name] = seen, kind.get()
            Generators._in_force[name] = seen

    def load(self) -> None:
        """Behind another rank's `save`, with nothing in between that draws."""
        for name, kind in _kinds():
            if name in self._states and self._states[name][0] != Generators._in_force.get(name):
                kind.set(self._states[name][1])


def _kinds() -> list[tuple[str, _Kind]]:
    return _WITH_CUDA if torch.cuda.is_initialized() else _WITHOUT_CUDA


def _python(before: Look | None) -> Look:
    now = Look(ctypes.string_at(_PYTHON_AT, _TWISTER.size), _PYTHON.gauss_next)
    return before if before == now else now


def _python_slowly(before: Look | None) -> Look:
    """Where the twister is not where CPython has it, right behind the head of the object."""
    now = Look(b"", random.getstate())
    return before if before == now else now


def _is_python_there() -> bool:
    position, *words = _TWISTER.unpack(_python(None).twister)
    return random.getstate()[1] == (*words, position)


class _NoTwister:
    """In the place of numpy's twister, so that `get_state` copies only what comes beside it."""

    state = property(lambda self: {"bit_generator": "none"})


def _numpy(before: Look | None) -> Look:
    if _NUMPY._bit_generator is not _NUMPY_TWISTER:  # the user's own: as if it always changed
        return Look(b"", object())
    _NUMPY._bit_generator = _NO_TWISTER
    try:
        told = _NUMPY.get_state(legacy=False)
    finally:
        _NUMPY._bit_generator = _NUMPY_TWISTER
    words = ctypes.string_at(_NUMPY_AT, _TWISTER.size)
    now = Look(words, (told["has_gauss"], told["gauss"]))
    return before if before == now else now


def _generator() -> torch.Generator:
    return torch.cuda.default_generators[torch._C._cuda_getDevice()]


def _cuda(before: Look | None) -> Look:
    generator = _generator()
    now = Look(b"", (generator.initial_seed(), generator.get_offset()))
    return before if before == now else now


_NO_TWISTER = _NoTwister()
_PYTHON_AT = id(_PYTHON) + object.__basicsize__
_NUMPY_AT = _NUMPY_TWISTER.ctypes.state_address
_WITHOUT_CUDA = [
    (
        "python",
        _Kind(_python if _is_python_there() else _python_slowly, random.getstate, random.setstate),
    ),
    ("numpy", _Kind(_numpy, numpy_random.get_state, numpy_random.set_state)),
]
_WITH_CUDA = [
    *_WITHOUT_CUDA,
    ("cuda", _Kind(_cuda, lambda: _generator().get_state(), lambda s: _generator().set_state(s))),
]
