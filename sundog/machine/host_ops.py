"""What a rank's host does between launches: torch operations, in stream order and in sight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..callsite import caller_frame
from .accessed import Accessed, accessed, tell
from .host_waits import reads_back
from .machine import Machine
from .tasks import Host

__all__ = ["HostMode"]

# Of what a host does with tensors, these only look at shapes and addresses, not at memory.
_METADATA = {
    "__get__", "data_ptr", "untyped_storage", "storage_offset", "size", "stride", "dim", "numel",
    "element_size", "is_contiguous", "is_floating_point", "is_complex", "nelement", "ndimension",
    "__len__", "view", "view_as", "as_strided", "detach", "expand", "narrow", "permute",
    "transpose", "t", "select", "unsqueeze", "squeeze", "is_pinned", "storage_type", "__hash__",
}  # fmt: skip


class HostMode(TorchFunctionMode):
    """Torch operations of a rank's host happen in stream order: behind what it launched."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METADATA or (name == "__getitem__" and _is_slicing(args[1])):
            return func(*args, **(kwargs or {}))
        machine = self.machine
        if isinstance(machine.current, Host):
            if machine.current.recording is not None:
                return machine.current.recording.torch_function(func, args, kwargs or {})
            machine.streams.drain(machine.current.stream)
        if machine.checker is None:
            result = func(*args, **(kwargs or {}))
        else:
            with Recorder() as seen:
                result = func(*args, **(kwargs or {}))
            self._tell(seen, func, args)
            if reads_back(name, args):
                machine.checker.streams.synchronize(machine.host.rank, [machine.host.stream])
        machine.host_wrote()
        return result

    def _tell(self, seen: Recorder, func: Callable, args: tuple) -> None:
        checker, stream = self.machine.checker, self.machine.host.stream
        assert checker is not None
        checker.streams.learn(stream, checker.streams.host(stream.rank))
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):  # not dispatched
            seen.touched.reads += [a for a in args if isinstance(a, torch.Tensor)]
        tell(checker, stream, seen.touched, caller_frame())


class Recorder(TorchDispatchMode):
    """What an operation touched: all that its operators did."""

    def __init__(self) -> None:
        super().__init__()
        self.touched = Accessed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.touched.add(accessed(func, args, kwargs, result))
        return result


def _is_slicing(index: Any) -> bool:
    """x[1:, 3]: a view, whatever the memory holds."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or type(part) in (int, slice, type(...)) for part in parts)
