"""The random generators that Python, numpy and CUDA have one of per process, kept per rank.

Ranks take turns at every launch and wait, and hardly ever draw in between; to copy Python's and
numpy's states at each turn took 115 of its 135 us. So they are looked at first: in memory, where
both are a Mersenne twister and its position. What looks the same is neither saved nor loaded.
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


class _Kind(NamedTuple):
    look: Callable[[], Any]  # differs if the state does, and costs little
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Generators:
    """One rank's states."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[Any, Any]] = {}  # how each looked, and what it was

    def save(self) -> None:
        for name, kind in _kinds():
            seen = kind.look()
            if name not in self._states or self._states[name][0] != seen:
                self._states[name] = seen, kind.get()

    def load(self) -> None:
        for name, kind in _kinds():
            if name in self._states and self._states[name][0] != kind.look():
                kind.set(self._states[name][1])


def _kinds() -> list[tuple[str, _Kind]]:
    return [*_KINDS.items()][: 3 if torch.cuda.is_initialized() else 2]


def _python() -> Any:
    return ctypes.string_at(_PYTHON_AT, _TWISTER.size), _PYTHON.gauss_next


def _python_is_there() -> bool:
    """Is the twister where CPython has it, right behind the head of the object?"""
    position, *words = _TWISTER.unpack(_python()[0])
    return random.getstate()[1] == (*words, position)


class _NoTwister:
    """In the place of numpy's twister, so that `get_state` copies only what comes beside it."""

    state = property(lambda self: {"bit_generator": "none"})


def _numpy() -> Any:
    twister = _NUMPY._bit_generator
    if type(twister) is not numpy_random.MT19937:  # the user's own: as if it had always changed
        return object()
    _NUMPY._bit_generator = _NO_TWISTER
    try:
        rest = _NUMPY.get_state(legacy=False)
    finally:
        _NUMPY._bit_generator = twister
    words = ctypes.string_at(twister.ctypes.state_address, _TWISTER.size)
    return words, rest["has_gauss"], rest["gauss"]


def _generator() -> torch.Generator:
    return torch.cuda.default_generators[torch._C._cuda_getDevice()]


def _cuda() -> Any:
    return _generator().initial_seed(), _generator().get_offset()


_NO_TWISTER = _NoTwister()
_PYTHON_AT = id(_PYTHON) + object.__basicsize__
_KINDS = {
    "python": _Kind(
        _python if _python_is_there() else random.getstate, random.getstate, random.setstate
    ),
    "numpy": _Kind(_numpy, numpy_random.get_state, numpy_random.set_state),
    "cuda": _Kind(
        _cuda, lambda: _generator().get_state(), lambda state: _generator().set_state(state)
    ),
}
