"""Which tensors a torch operation touched, by its operators' schemas, and telling the checker."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from .accesses import MAKE, READ, WRITE, Observer, Touch
from .regions import Region
from .tasks import Stream

__all__ = ["Accessed", "accessed", "is_view", "tell"]

_OVERWRITES = ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_")


@dataclass
class Accessed:
    """Tensors that were read, written, made, or left empty."""

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    unwritten: list[torch.Tensor] = field(default_factory=list)


def accessed(func: Any, args: tuple, kwargs: dict, result: Any) -> Accessed:
    """Of one call of an operator."""
    touched = Accessed()
    schema = func._schema
    if is_view(func):
        return touched
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
    for argument, value in given:
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            if written:
                touched.writes.append(tensor)
            if not (written and func._opname in _OVERWRITES) and "empty" not in func._opname:
                touched.reads.append(tensor)
    if not schema.is_mutable:
        place = touched.unwritten if "empty" in func._opname else touched.made
        place += _tensors(result)
    return touched


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an operator returns a view: it touches no memory."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def tell(checker: Observer, stream: Stream, touched: Accessed, at: tuple[str, int, str]) -> None:
    """An operation on this stream touched these tensors."""
    with torch._C.DisableTorchFunction():
        for tensor in touched.unwritten:
            checker.meet(tensor.untyped_storage(), unwritten=tensor.element_size())
    lists = ((touched.reads, READ), (touched.writes, WRITE), (touched.made, MAKE))
    for tensors, verb in lists:
        for tensor in tensors:
            if tensor.numel():
                with torch._C.DisableTorchFunction():
                    checker.meet(tensor.untyped_storage())
                checker.host_access(stream, _touch(tensor), verb, at)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


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
