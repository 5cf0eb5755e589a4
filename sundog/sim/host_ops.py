"""What a rank's host does between launches: torch operations, in stream order and in sight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..source import caller_frame
from .host_waits import reads_back
from .machine import Machine
from .memory import Region
from .races import MAKE, READ, WRITE
from .shadow import Touch
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
        with torch._C.DisableTorchFunction():
            for tensor in seen.unwritten:
                checker.meet(tensor.untyped_storage(), unwritten=tensor.element_size())
        at = caller_frame()
        reads = [*seen.reads]
        if getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"):  # not dispatched
            reads += [a for a in args if isinstance(a, torch.Tensor)]
        for tensors, verb in ((reads, READ), (seen.writes, WRITE), (seen.made, MAKE)):
            for tensor in tensors:
                if tensor.numel():
                    with torch._C.DisableTorchFunction():
                        checker.meet(tensor.untyped_storage())
                    checker.host_access(stream, _touch(tensor), verb, at)


@dataclass
class Recorder(TorchDispatchMode):
    """Which tensors an operation read, wrote, made or left empty, by the operators' schemas."""

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    unwritten: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return result  # a view: nothing was touched
        overwrites = func._opname in ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_")
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in (t for t in tree_leaves(value) if isinstance(t, torch.Tensor)):
                if written:
                    self.writes.append(tensor)
                if not (written and overwrites) and "empty" not in func._opname:
                    self.reads.append(tensor)
        made = [] if schema.is_mutable else tree_leaves(result)
        place = self.unwritten if "empty" in func._opname else self.made
        place += [t for t in made if isinstance(t, torch.Tensor)]
        return result


def _is_slicing(index: Any) -> bool:
    """x[1:, 3]: a view, whatever the memory holds."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or type(part) in (int, slice, type(...)) for part in parts)


def _storage(tensor: torch.Tensor) -> tuple[int, int, int]:
    """start, end and element size of the memory behind a tensor."""
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes(), tensor.element_size()


def _touch(tensor: torch.Tensor) -> Touch:
    start, end, itemsize = _storage(tensor)
    region = Region(start, end, "tensor", -1, itemsize, is_heap=False)
    return Touch(_addresses(tensor), itemsize, region)


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    """The address of every element, also of a view with gaps."""
    with torch._C.DisableTorchFunction():
        if tensor.is_contiguous():
            start, size = tensor.data_ptr(), tensor.element_size()
            return np.arange(start, start + tensor.numel() * size, size, dtype=np.uint64)
        offsets = np.zeros((1,) * max(tensor.dim(), 1), np.int64)
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            shape = [1] * tensor.dim()
            shape[axis] = size
            offsets = offsets + (np.arange(size) * stride).reshape(shape)
        flat = np.unique(offsets.ravel()) if 0 in tensor.stride() else offsets.ravel()
        return (flat * tensor.element_size() + tensor.data_ptr()).astype(np.uint64)
