"""A host's torch operations between launches, ordered on the stream and reported to the checker.

Usually they need not be watched: a launch returns when its stream has ended (`Streams.settle`), so
that whatever reads memory next, in Python, C++ or another thread, finds the results. They are
watched while work is left on the host's stream, in a capture, and for the checker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from ..callsite import caller_frame
from .torch_state import (
    compiler_stance,
    pop_modes,
    push_modes,
    set_compiler_stance,
    uncompiled,
)
from .touched import Accessed, accessed, is_view, tell, tensors_in, words_held

if TYPE_CHECKING:
    from ..checker.checker import Checker
    from .machine import Machine
    from .tasks import Host

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_ADDRESSES = ("data_ptr", "untyped_storage")  # through which memory can be read unnoticed
_READS = ("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__")  # without an operator

_IN_PYTHON = ("sundog", "symm_mem", "_c10d_functional")  # namespaces of CPU kernels in Python

# These operations read only shapes and addresses of tensors, not their memory.
_METADATA = {
    "__get__", "data_ptr", "untyped_storage", "storage_offset", "size", "stride", "dim", "numel",
    "element_size", "is_contiguous", "is_floating_point", "is_complex", "nelement", "ndimension",
    "__len__", "view", "view_as", "as_strided", "detach", "expand", "narrow", "permute",
    "transpose", "t", "select", "unsqueeze", "squeeze", "is_pinned", "storage_type", "__hash__",
}  # fmt: skip

# The host must know the result of these, or its size.
_WAITING = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "equal", "allclose", "nonzero", "unique", "masked_select", "__repr__", "__format__", "__iter__",
    "__contains__", "__reduce_ex__", "is_nonzero", "argwhere", "bincount", "repeat_interleave",
    "multinomial",
}  # fmt: skip
_MAY_WAIT = _WAITING | {"to", "cuda", "tensor", "as_tensor", "copy_", "__getitem__", "__setitem__"}


class Sight:
    """Two modes that watch a host's torch operations while there is a reason to."""

    def __init__(self, machine: Machine) -> None:
        self._functions, self._operators = HostFunctions(machine), HostOperators(machine)
        self._is_on = False
        self._stance: Any = None  # of the compiler, before

    def set(self, on: bool) -> None:
        """Enter or leave the modes in the host's thread, below those that its code enters."""
        if on == self._is_on or self._operators.is_inside:
            return
        functions, operators = pop_modes()
        if on:
            at = sum(isinstance(mode, DeviceContext) for mode in functions[:1])
            functions.insert(at, self._functions)
            operators.insert(0, self._operators)
            self._stance = compiler_stance()
            set_compiler_stance(uncompiled())  # compiled code would bypass the modes
        else:
            functions.remove(self._functions)
            operators.remove(self._operators)
            set_compiler_stance(self._stance)
        push_modes(functions, operators)
        self._is_on = on

    @contextmanager
    def off(self) -> Iterator[None]:
        before = self._is_on
        self.set(False)
        try:
            yield
        finally:
            self.set(before)


class HostFunctions(TorchFunctionMode):
    """Orders torch functions called from Python after what the rank launched on the stream.

    It also sees what reads memory without an operator: `numpy`, `tolist`, pickling.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ADDRESSES and not _is_ours(sys._getframe(1)):
            self.machine.streams.drain(self.machine.host.stream)
        if name in _METADATA or (name == "__getitem__" and _is_slicing(args[1])):
            if type(args[0]) is not torch.Tensor or torch._C._len_torch_dispatch_stack() > 1:
                return func(*args, **(kwargs or {}))
            with torch._C._DisableTorchDispatch():  # the other mode need not see a view either
                return func(*args, **(kwargs or {}))
        host = self.machine.host
        if host.recording is not None and not _is_our_op(func):
            return host.recording.torch_function(func, args, kwargs or {})
        self.machine.streams.drain(host.stream)
        result = func(*args, **(kwargs or {}))
        if self.machine.checker is not None:
            self._tell(self.machine.checker, host, name, args, kwargs or {})
        return result

    def _tell(self, checker: Checker, host: Host, name: str, args: tuple, kwargs: dict) -> None:
        if name in _READS:
            read = Accessed(reads=[a for a in args if isinstance(a, torch.Tensor)])
            _tell_host(checker, host, read)
        if reads_back(name, args, kwargs):
            checker.streams.synchronize(host.rank, [host.stream])


class HostOperators(TorchDispatchMode):
    """Does the same for torch's operators, which autograd, jit and function transforms call too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator imports the compiler, which takes a second

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.is_inside = False  # an op of ours, entered a second time, must not remove the mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_in_python(func, args):  # its kernel's operations are seen, as in a plain call
            before, self.is_inside = self.is_inside, True
            try:
                with self:
                    return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
            finally:
                self.is_inside = before
        host = self.machine.host
        if host.recording is not None:
            return host.recording.operator(func, args, kwargs)
        if is_view(func):
            return func(*args, **kwargs)
        self.machine.streams.drain(host.stream)
        checker = self.machine.checker
        held = words_held(func, args) if checker is not None else b""
        result = func(*args, **kwargs)
        if checker is not None:
            _tell_host(checker, host, accessed(func, args, kwargs, result), held)
        return result


def _tell_host(checker: Checker, host: Host, touched: Accessed, held: bytes = b"") -> None:
    checker.streams.learn(host.stream, checker.streams.host(host.rank))
    tell(checker, host.stream, touched, caller_frame(), held)


def _is_our_op(func: Any) -> bool:
    """Return whether this is a collective as an op of torch (sundog/torch/library.py)."""
    name: str = getattr(func, "_name", "") or getattr(func, "_qualified_op_name", "")
    return name.startswith("sundog::")


def _is_in_python(func: Any, args: tuple) -> bool:
    """Return whether Python code does this; a compiler's fake tensors have another kernel."""
    if func.namespace not in _IN_PYTHON or not tensors_in(args):
        return func.namespace == "sundog"
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU")


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_HERE)


def _is_slicing(index: Any) -> bool:
    """Return whether an index is like x[1:, 3], which gives a view whatever the memory holds."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or type(part) in (int, slice, type(...)) for part in parts)


def waits(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether this torch function makes the host wait, or copies to or from the GPU."""
    if name not in _MAY_WAIT:  # most of them; this runs at every call
        return False
    if reads_back(name, args, kwargs):
        return True
    if name in ("to", "cuda", "tensor", "as_tensor"):
        places = [*args[1:], kwargs.get("device")]
        return name == "cuda" or any(isinstance(p, str | torch.device) for p in places)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return name in ("copy_", "__setitem__") and len({t.device for t in tensors}) > 1


def reads_back(name: str, args: tuple, kwargs: dict) -> bool:
    """Return whether the host needs device memory, as the call says it, also on a CPU."""
    if name == "to":  # not by a tensor: comparing with one is an operation
        given = [a for a in (*args[1:], kwargs.get("device")) if isinstance(a, str | torch.device)]
        return "cpu" in map(str, given) and not kwargs.get("non_blocking")
    return name in _WAITING or (name in ("__getitem__", "__setitem__") and _by_mask(args))


def _by_mask(args: tuple) -> bool:
    index: Any = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) for i in index)
