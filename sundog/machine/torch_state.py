"""Keep per rank what torch keeps per thread or process, so that switching ranks is not noticed.

Each rank has its own thread, which starts with the caller's grad mode, inference mode, autocast,
default device and modes. What a process has once is exchanged when ranks switch: the random
generators, the default dtype, whether a dispatch mode is active, and whether functions are
compiled.

Ranks switch at every launch and wait, and hardly ever draw random numbers in between. Copying
Python's and numpy's states took 115 of the 135 us of a switch. So they are first compared in
memory, where both are a Mersenne twister and its position. What has not changed is not saved, and
what the last rank left as it should be is not loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from numpy import random as numpy_random  # np.random would be imported on first use, in every child
from torch.utils import _python_dispatch

_AUTOCAST = ("cpu", "cuda")
# torch.compile reads these, and skips a function forever that it meets in a dispatch mode.
_FLAGS = [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]

_TWISTER = struct.Struct("625I")  # 624 words and the position, before or after them
_PYTHON: Any = random.random.__self__  # type: ignore[attr-defined]
_NUMPY: Any = numpy_random.get_state.__self__  # type: ignore[attr-defined]
_NUMPY_TWISTER = _NUMPY._bit_generator


class ThreadState:
    """The state of the thread that makes it, with which another one starts."""

    def __init__(self) -> None:
        self._functions, self._dispatch = pop_modes()
        push_modes(self._functions, self._dispatch)
        self._inference = torch.is_inference_mode_enabled()
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self._device = dict(vars(torch._GLOBAL_DEVICE_CONTEXT))
        self._stream = _current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered(self, modes: list[Any]) -> Iterator[None]:
        """Give a new thread the other's state inside the block, with these modes active."""
        with torch.inference_mode(self._inference):
            torch.set_grad_enabled(self._grad)
            for kind, enabled, dtype in self._autocast:
                torch.set_autocast_enabled(kind, enabled)
                torch.set_autocast_dtype(kind, dtype)
            torch.set_autocast_cache_enabled(self._cached)
            vars(torch._GLOBAL_DEVICE_CONTEXT).update(self._device)
            self.enter_device()
            push_modes([*self._functions, *modes], self._dispatch)
            try:
                yield
            finally:
                pop_modes()

    def enter_device(self) -> None:
        """Enter the device, since a new thread would be on the first GPU."""
        if self._stream is not None:
            torch.cuda.set_device(self._stream[1])
            torch._C._cuda_setStream(*self._stream)


class ProcessState:
    """One rank's, or the caller's, values of what the process has once."""

    def __init__(self) -> None:
        self._generators = Generators()
        self.save()

    def save(self) -> None:
        self._seed = torch.get_rng_state()
        self._generators.save()
        self._default = torch.get_default_dtype()
        self._flags = [getattr(_python_dispatch, name) for name in _FLAGS]
        self._stance = compiler_stance()

    def load(self) -> None:
        """Load the state after another one's `save`, with nothing in between that changes it."""
        torch.set_rng_state(self._seed)
        self._generators.load()
        if self._default != torch.get_default_dtype():
            torch.set_default_dtype(self._default)
        for name, value in zip(_FLAGS, self._flags, strict=True):
            setattr(_python_dispatch, name, value)
        set_compiler_stance(self._stance)


_COMPILER = "torch._dynamo.eval_frame"
_UNCOMPILED = "force_eager"


def compiler_stance() -> Any:
    """Return torch.compiler.set_stance's setting, or what awaits an import of the compiler."""
    compiler: Any = sys.modules.get(_COMPILER)
    return _Import.stance if compiler is None else compiler._stance


def set_compiler_stance(stance: Any) -> None:
    """Do as torch.compiler.set_stance, also while a compiled function runs. None: the default."""
    compiler: Any = sys.modules.get(_COMPILER)
    if compiler is None:
        _Import.stance = stance
        if stance is not None and _IMPORT not in sys.meta_path:
            sys.meta_path.insert(0, _IMPORT)
    elif stance is None or stance == _UNCOMPILED:
        compiler._stance = compiler.DynamoStance(stance or "default")
    else:
        compiler._stance = stance


def uncompiled() -> Any:
    """Return the stance in which compiled functions run as they were written."""
    return _UNCOMPILED


class _Import:
    """Sets the stance when the compiler is imported: a watched rank may be the first to do so."""

    stance: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_set(module: Any) -> None:
            execute(module)
            set_compiler_stance(_Import.stance)

        spec.loader.exec_module = execute_and_set
        return spec


_IMPORT: Any = _Import()


def _current_stream() -> tuple[int, int, int]:
    """Return the stream's number, device and device type, 10 us faster than torch.cuda does."""
    stream: tuple[int, int, int] = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    return stream


def pop_modes() -> tuple[list[Any], list[Any]]:
    """Return and end this thread's function modes and dispatch modes, outermost first."""
    c = torch._C
    functions = [c._pop_torch_function_stack() for _ in range(c._len_torch_function_stack())]
    dispatch = [c._pop_torch_dispatch_stack(None) for _ in range(c._len_torch_dispatch_stack())]
    return functions[::-1], dispatch[::-1]


def push_modes(functions: list[Any], dispatch: list[Any]) -> None:
    for mode in functions:
        torch._C._push_on_torch_function_stack(mode)
    for mode in dispatch:
        torch._C._push_on_torch_dispatch_stack(mode)


class Look(NamedTuple):
    """A view of a generator, equal if its state is."""

    twister: bytes
    rest: Any


class _Kind(NamedTuple):
    look: Callable[[Look | None], Look]  # gets the last one, and returns it if nothing changed
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Generators:
    """One rank's generator states."""

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
        """Load after another rank's `save`, with nothing in between that draws."""
        for name, kind in _kinds():
            if name in self._states and self._states[name][0] != Generators._in_force.get(name):
                kind.set(self._states[name][1])


def _kinds() -> list[tuple[str, _Kind]]:
    return _WITH_CUDA if torch.cuda.is_initialized() else _WITHOUT_CUDA


def _python(before: Look | None) -> Look:
    now = Look(ctypes.string_at(_PYTHON_AT, _TWISTER.size), _PYTHON.gauss_next)
    return before if before == now else now


def _python_slowly(before: Look | None) -> Look:
    """Read a twister that is not where CPython has it, right after the object's head."""
    now = Look(b"", random.getstate())
    return before if before == now else now


def _is_python_there() -> bool:
    position, *words = _TWISTER.unpack(_python(None).twister)
    return random.getstate()[1] == (*words, position)


class _NoTwister:
    """Stands in for numpy's twister, so that `get_state` copies only the rest."""

    state = property(lambda self: {"bit_generator": "none"})


def _numpy(before: Look | None) -> Look:
    if _NUMPY._bit_generator is not _NUMPY_TWISTER:  # the user's own counts as always changed
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
