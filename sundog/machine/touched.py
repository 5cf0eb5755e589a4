"""What a host's torch operation touches, from its operator's schema.

A checked host asks this for every operation, so each operator's schema is read once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from .accesses import MAKE, READ, WRITE, Touch
from .regions import Region
from .tasks import Stream

if TYPE_CHECKING:
    from ..checker.checker import Checker

_OVERWRITES = ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_")
_BY_ROW, _BY_COLUMN = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_SPARSE: dict[torch.layout, tuple[str, ...] | None] = {  # the parts of each layout; None: dense
    torch.strided: None, torch.jagged: None, torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: (*_BY_ROW, "values"), torch.sparse_bsr: (*_BY_ROW, "values"),
    torch.sparse_csc: (*_BY_COLUMN, "values"), torch.sparse_bsc: (*_BY_COLUMN, "values"),
}  # fmt: skip
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that are no wrappers
_INDEXED_WRITES = {
    "index_put_", "_index_put_impl_", "index_copy_", "index_fill_", "index_add_", "scatter_",
    "scatter_add_", "masked_fill_", "masked_scatter_", "put_",
}  # fmt: skip
_INDEXED_READS = {"index", "index_select", "gather", "take", "embedding", "masked_select"}
_VALUES = ("value", "values", "source", "src")  # names of the arguments that are written
_LARGEST = 1 << 24  # elements; a larger tensor counts as touched whole


@dataclass
class Accessed:
    """Tensors that were read, written, made, or left empty."""

    reads: list[torch.Tensor] = field(default_factory=list)
    writes: list[torch.Tensor] = field(default_factory=list)
    made: list[torch.Tensor] = field(default_factory=list)
    unwritten: list[torch.Tensor] = field(default_factory=list)
    only: dict[int, np.ndarray] = field(default_factory=dict)  # elements, by id of the tensor


class _Argument(NamedTuple):
    place: int
    name: str
    reads: bool
    writes: bool


def accessed(func: Any, args: tuple, kwargs: dict, result: Any) -> Accessed:
    """Return what one call of an operator touched."""
    found = Accessed()
    if is_view(func):
        return found
    if (elements := _chosen(func, args, kwargs)) is not None:
        found.only[id(args[0])] = elements
    for place, name, reads, writes in _arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        tensors = tensors_in(value)
        if writes:
            found.writes += tensors
        if reads:
            found.reads += tensors
    if not func._schema.is_mutable:
        tensors = found.unwritten if "empty" in func._opname else found.made
        tensors += tensors_in(result)
    return found


@functools.cache
def _arguments(func: Any) -> list[_Argument]:
    """List the arguments that may be tensors which the operator reads or writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (writes and func._opname in _OVERWRITES) and "empty" not in func._opname
        if (reads or writes) and "Tensor" in str(argument.type):
            found.append(_Argument(place, argument.name, reads, writes))
    return found


@functools.cache
def is_view(func: Any) -> bool:
    """Return whether an operator returns a view, or peers' memory as tensors, and touches none."""
    if func._opname == "get_remote_tensors":
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def words_held(func: Any, args: tuple) -> bytes:
    """Return the 64-bit words that a copy of such words will overwrite; else nothing."""
    if func is not torch.ops.aten.copy_.default:
        return b""
    into, source = args[:2]
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        words = into.dtype == source.dtype == torch.int64 and into.numel() == source.numel()
        if not words or not into.is_contiguous() or into.is_meta:
            return b""
        return bytes(into.numpy())


def tell(
    checker: Checker, stream: Stream, found: Accessed, at: tuple[str, int, str], held: bytes = b""
) -> None:
    """Report that an operation on this stream touched these tensors; `held`: see `words_held`."""
    with torch._C.DisableTorchFunction():
        for tensor in found.unwritten:
            checker.meet(tensor.untyped_storage(), unwritten=tensor.element_size())
        lists = ((found.reads, READ), (found.writes, WRITE), (found.made, MAKE))
        for tensors, verb in lists:
            for tensor in tensors:
                only = found.only.get(id(tensor))
                if tensor.numel() and (only is None or only.size):
                    storage = tensor.untyped_storage()
                    checker.meet(storage)
                    was = held if verb == WRITE else b""
                    checker.host_access(stream, _touch(tensor, storage, only), verb, at, was)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors with their own memory: no wrappers, and no fake tensors of a compiler."""
    if value is None:
        return []
    leaves = [value] if type(value) in _PLAIN else tree_leaves(value)
    own = [each for each in leaves if type(each) in _PLAIN or _is_own(each)]
    with torch._C.DisableTorchFunction():
        dense = [part for each in own for part in _parts(each)]
        return [each for each in dense if each.untyped_storage().device.type != "meta"]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor, or those of which a sparse one is made; others have no memory to see."""
    names = _SPARSE.get(tensor.layout, ())
    return [getattr(tensor, name)() for name in names] if names is not None else [tensor]


def _is_own(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value)


def _touch(
    tensor: torch.Tensor, storage: torch.UntypedStorage, only: np.ndarray | None = None
) -> Touch:
    """Say what an operation touched of a tensor: one large element if it has no gaps."""
    start, itemsize = storage.data_ptr(), tensor.element_size()
    region = Region(start, start + storage.nbytes(), "tensor", -1, itemsize, is_heap=False)
    if only is not None:
        return Touch(np.unique(_places(tensor)[only]), itemsize, region)
    if tensor.is_contiguous():
        at = np.array([tensor.data_ptr()], np.uint64)
        return Touch(at, tensor.numel() * itemsize, region)
    at = _places(tensor)
    return Touch(np.unique(at) if 0 in tensor.stride() else at, itemsize, region)


def _places(tensor: torch.Tensor) -> np.ndarray:
    """Return the address of every element."""
    offsets = np.zeros((1,) * max(tensor.dim(), 1), np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = size
        offsets = offsets + (np.arange(size) * stride).reshape(shape)
    return (offsets.ravel() * tensor.element_size() + tensor.data_ptr()).astype(np.uint64)


# Which elements an operator with indices touches: ranks write rows of one peer's tensor so. The
# operator itself says it: it runs once more, on a tensor of zeros into which it writes ones, or on
# one whose elements are their own numbers.


def _chosen(func: Any, args: tuple, kwargs: dict) -> np.ndarray | None:
    """Return the numbers of the first tensor's elements that are touched; None: all may be."""
    name = func._opname
    if name not in _INDEXED_WRITES and name not in _INDEXED_READS:
        return None
    tensor: torch.Tensor = args[0]
    if type(tensor) not in _PLAIN or "reduce" in func._overloadname:
        return None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        if tensor.numel() > _LARGEST or tensor.is_meta or tensor.layout is not torch.strided:
            return None
        find = _written if name in _INDEXED_WRITES else _read
        return find(func, tensor, args, kwargs)


def _written(func: Any, tensor: torch.Tensor, args: tuple, kwargs: dict) -> np.ndarray:
    marks = torch.zeros(tensor.shape)
    names = [argument.name for argument in func._schema.arguments]
    rest = [_ones(value) if name in _VALUES else value for name, value in zip(names, args)][1:]  # noqa: B905
    more = {name: _ones(value) if name in _VALUES else value for name, value in kwargs.items()}
    more.pop("alpha", None)
    func(marks, *rest, **more)
    return np.flatnonzero(marks.numpy())


def _ones(value: Any) -> Any:
    return torch.ones(value.shape) if isinstance(value, torch.Tensor) else 1.0


def _read(func: Any, tensor: torch.Tensor, args: tuple, kwargs: dict) -> np.ndarray:
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    return np.unique(func(numbers, *args[1:], **kwargs).numpy())
