"""What torch keeps per thread or process, kept per rank: switching ranks must not be seen.

Ranks are coroutines of one thread. In processes of their own, each would have its own random
state, grad mode, inference mode, autocast, stack of function modes, and handler of warnings.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .random_states import Generators

__all__ = ["TorchState"]

_AUTOCAST = ("cpu", "cuda")

# While torch is in C++ its thread has a handler of warnings, on the stack. A rank that waits inside
# (in `.item()`, say) must not leave it to the others: its stack is not there when it does not run,
# and the next warning outside of such a call ended the process. Python has no name for it.
_C10 = ctypes.CDLL("libc10.so")  # found by its name: it is loaded
_get_handler: Any = _C10._ZN3c1012WarningUtils19get_warning_handlerEv
_set_handler: Any = _C10._ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE
_get_handler.restype, _set_handler.argtypes = ctypes.c_void_p, [ctypes.c_void_p]


class TorchState:
    """The state of one rank. `leave` when its host stops running, `enter` when it goes on."""

    _in_force: tuple = ()  # one per process: the types that were last saved

    def __init__(self, modes: list[Any]) -> None:
        functions, self._dispatch = _pop_modes()
        _push_modes(functions, self._dispatch)
        self._modes = [*functions, *modes]
        self._guard: Any = None
        self._first: Any = None
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._autocast = [torch.is_autocast_enabled(kind) for kind in _AUTOCAST]
        self._handler = None  # torch's own
        self._generators = Generators()
        self._save()

    def leave(self) -> None:
        # First: saving calls torch, and is no act of the rank.
        self._handler = _get_handler()
        _set_handler(None)
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
        _set_handler(self._handler)

    def forget(self) -> None:
        """For one that is never entered again: its guard, left to the garbage collector, would put
        its state in force at some later moment, in the middle of whatever then runs."""
        for guard in (self._first, self._guard):
            if guard is not None:
                guard.__exit__(None, None, None)
        self._first = self._guard = None
        self._modes, self._dispatch = [], []

    def _save(self) -> None:
        self._seed = torch.get_rng_state()
        self._generators.save()
        self._types = TorchState._in_force = (
            *(torch.get_autocast_dtype(kind) for kind in _AUTOCAST),
            torch.get_default_dtype(),
            torch.is_autocast_cache_enabled(),
        )
        self._stream = _current_stream() if torch.cuda.is_initialized() else None

    def _load(self) -> None:
        torch.set_rng_state(self._seed)
        if self._types != TorchState._in_force:
            *types, default, cached = self._types
            for kind, dtype in zip(_AUTOCAST, types, strict=True):
                torch.set_autocast_dtype(kind, dtype)
            torch.set_default_dtype(default)
            torch.set_autocast_cache_enabled(cached)
        if self._stream is not None:
            torch._C._cuda_setStream(*self._stream)
        self._generators.load()


def _current_stream() -> tuple[int, int, int]:
    """Its number, its device and the kind of that: what torch.cuda.set_stream sets, 10 us later."""
    stream: tuple[int, int, int] = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    return stream


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
