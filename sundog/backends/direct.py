"""Launching a kernel again with arguments of the same kinds, without Triton's look at all of them.

Triton binds and specialises all arguments and compares all globals at every launch: most of the
time of a small collective's call on the host. A launch depends on no more than what is in the key
here, so its second time goes straight to the compiled kernel.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from triton.runtime.jit import JITFunction

__all__ = ["Direct", "Known", "in_order", "launched"]

Known = tuple[JITFunction, tuple[int, ...], tuple, dict, Any]  # the last: the compiled kernel
# Where the running rank's launches are noted, if anybody asked; None in the list: not known here.
launched: ContextVar[list[Known | None] | None] = ContextVar("launched", default=None)

_PLAIN = frozenset((int, str, bool, float, type(None), torch.dtype))
_MOST = 1024  # a program that makes ever new kinds of launches is not kept forever


class Direct:
    """Compiled kernels by all that they were compiled for."""

    def __init__(self) -> None:
        # The kernel is kept, so that no other one gets its id.
        self._known: dict[tuple, tuple[JITFunction, Any]] = {}

    def again(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict, stream: int) -> Any:
        """Start it, if such a launch was noted before: the compiled kernel, or None."""
        found = self._look(kernel, grid, args, kwargs)
        if found is None:
            return None
        _, compiled = found
        compiled[(*grid, 1, 1)[:3]](*in_order(kernel, args, kwargs), stream=stream)
        return compiled

    def find(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> Any:
        """The compiled kernel of such a launch, or None; nothing starts."""
        found = self._look(kernel, grid, args, kwargs)
        return None if found is None else found[1]

    def _look(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> Any:
        found = self._known.get(_key(kernel, grid, args, kwargs))
        notes = launched.get()
        if notes is not None:
            notes.append(None if found is None else (kernel, grid, args, kwargs, found[1]))
        return found

    def note(
        self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict, compiled: Any
    ) -> None:
        """Triton gave this compiled kernel, which may not be loaded yet, for such a launch."""
        key = _key(kernel, grid, args, kwargs)
        if key and hasattr(compiled, "packed_metadata"):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = kernel, compiled


def _key(kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> tuple:
    """Empty where there is more to look at. Alive kernels differ by their id."""
    if type(grid) is not tuple or kernel.pre_run_hooks or torch.version.hip:
        return ()  # AMD's code depends on the size of a tensor's storage too
    words: list[Any] = [id(kernel), grid, *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor:
            words += value.dtype, value.data_ptr() % 16
        elif kind in _PLAIN:
            words += kind, value
        else:
            return ()
    return tuple(words)


def in_order(kernel: JITFunction, args: tuple, kwargs: dict) -> tuple:
    """All arguments in their places, as a compiled kernel takes them."""
    return (*args, *[kwargs.get(p.name, p.default) for p in kernel.params[len(args) :]])
