"""What torch keeps per thread or process, kept per rank: switching ranks must not be seen.

Ranks are coroutines of one thread. In processes of their own, each would have its own random
state, grad mode, inference mode, autocast, and stack of function modes.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from numpy import random as numpy_random  # np.random is imported on first use: in every child

__all__ = ["TorchState"]

_AUTOCAST = ("cpu", "cuda")


class TorchState:
    """The state of one rank. `leave` when its host stops running, `enter` when it goes on."""

    def __init__(self, modes: list[Any]) -> None:
        functions, self._dispatch = _pop_modes()
        _push_modes(functions, self._dispatch)
        self._modes = [*functions, *modes]
        self._guard: Any = None
        self._first: Any = None
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._autocast = [torch.is_autocast_enabled(kind) for kind in _AUTOCAST]
        self._save()

    def leave(self) -> None:
        # First: saving calls torch, and is no act of the rank.
        self._modes, self._dispatch = _pop_modes()
        self._save()
        # This guard saves the thread's whole autograd and dispatch state and, when it is left,
        # puts exactly that back, whatever happened in between: what we need, by another name.
        self._guard = torch._C._InferenceMode(False)
        self._guard.__enter__()

    def enter(self) -> None:
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
            self._guard = None
        else:  # for the first time: as it was when the world was opened
            if self._inference:
                self._first = torch._C._InferenceMode(True)
                self._first.__enter__()
            torch.set_grad_enabled(self._grad)
            for kind, enabled in zip(_AUTOCAST, self._autocast, strict=True):
                torch.set_autocast_enabled(kind, enabled)
        self._load()
        _push_modes(self._modes, self._dispatch)

    def forget(self) -> None:
        """For one that is never entered again: its guard, left to the garbage collector, would put
        its state in force at some later moment, in the middle of whatever then runs."""
        for guard in (self._first, self._guard):
            if guard is not None:
                guard.__exit__(None, None, None)
        self._first = self._guard = None
        self._modes, self._dispatch = [], []

    def _save(self) -> None:
        self._seeds = torch.get_rng_state(), random.getstate(), numpy_random.get_state()
        self._types = [torch.get_autocast_dtype(kind) for kind in _AUTOCAST]
        self._cached = torch.is_autocast_cache_enabled()
        self._default = torch.get_default_dtype()
        self._cuda = _cuda_state()

    def _load(self) -> None:
        torch.set_rng_state(self._seeds[0])
        random.setstate(self._seeds[1])
        numpy_random.set_state(self._seeds[2])
        for kind, dtype in zip(_AUTOCAST, self._types, strict=True):
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cached)
        torch.set_default_dtype(self._default)
        if self._cuda is not None:
            torch.cuda.set_stream(self._cuda[0])  # carries the device
            torch.cuda.set_rng_state(self._cuda[1])


def _cuda_state() -> Any:
    """Current stream (which carries the device) and random state, if CUDA is in use at all."""
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_stream(), torch.cuda.get_rng_state()


def _pop_modes() -> tuple[list[Any], list[Any]]:
    """Function modes and dispatch modes, outermost first; none is left in force."""
    c = torch._C
    functions = [c._pop_torch_function_stack() for _ in range(c._len_torch_function_stack())]
    dispatch = [c._pop_torch_dispatch_stack(None) for _ in range(c._len_torch_dispatch_stack())]
    return functions[::-1], dispatch[::-1]


def _push_modes(functions: list[Any], dispatch: list[Any]) -> None:
    for mode in functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in dispatch:
        torch._C._push_on_torch_dispatch_stack(mode)
