"""A stand-in for Iris (July 2025): its symmetric heap and its device functions, on a CPU.

`provide()` makes it importable as `iris`. Loads, stores and atomics go to the memory of the rank
that the heap's bases name, with the ordering that the kernel asks for. Compiled for a GPU, they
raise an error that says that they are stand-ins.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as _symm_mem
import triton.language as tl

from ..errors import SundogError
from ..interpreter.numerics import Tile, Value
from .patches import current
from .shmem import stand_in, tensor

symm_mem: Any = _symm_mem
_LARGEST = 1 << 24  # bytes of a simulated heap; programs ask for as much as a GPU has
_ALIGNMENT = 1024


class Iris:
    """A rank's view of the symmetric heap: allocation, and the table of heap bases."""

    def __init__(self, heap_size: int = 1 << 30) -> None:
        if current() is None:
            raise SundogError("sundog's stand-in for Iris works in simulated ranks: use --torch")
        if not dist.is_initialized():
            dist.init_process_group("nccl")
        self.cur_rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.heap_size, self._used = min(heap_size, _LARGEST), 0
        self._pool = symm_mem.empty(self.heap_size, dtype=torch.uint8, device="cuda")
        handle: Any = symm_mem.rendezvous(self._pool, dist.group.WORLD)
        self.device = f"cuda:{self.cur_rank}"
        self.heap_bases = torch.tensor(handle.buffer_ptrs, dtype=torch.uint64)

    def _allocate(self, size: Any, dtype: torch.dtype | None) -> torch.Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)
        kind = dtype or torch.float32
        nbytes = int(np.prod(shape)) * torch.empty(0, dtype=kind).element_size()
        start = self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used > self.heap_size:
            raise SundogError(
                f"Iris: {self._used} bytes on a heap of {self.heap_size}: give the program smaller "
                "tensors, or a larger heap"
            )
        return self._pool[start : start + nbytes].view(kind).view(shape)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        return self._allocate(size, dtype)

    def zeros(self, *size: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        return self._allocate(size, dtype or torch.int32).zero_()

    def ones(self, *size: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        return self._allocate(size, dtype).fill_(1)

    def full(self, size: Any, value: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return self._allocate((size,), dtype).fill_(value)

    def randn(self, *size: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        x = self._allocate(size, dtype)
        return x.copy_(torch.randn(x.shape).to(x.dtype))

    def arange(self, *bounds: Any, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        values = torch.arange(*bounds, dtype=dtype)
        return self._allocate(values.shape, values.dtype).copy_(values)

    def uniform(
        self, size: Any, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return self._allocate((size,), dtype).uniform_(low, high)

    def randint(
        self, size: Any, low: int, high: int, dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        x = self._allocate((size,), dtype)
        return x.copy_(torch.randint(low, high, x.shape))

    def linspace(
        self, start: float, end: float, steps: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return self._allocate((steps,), dtype).copy_(torch.linspace(start, end, steps))

    def deallocate(self, pointer: Any) -> None:
        """Do nothing, as in Iris: the heap ends with the program."""

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        return self.zeros(*x.shape, dtype=x.dtype)

    def get_heap_bases(self) -> torch.Tensor:
        return self.heap_bases

    def get_rank(self) -> int:
        return self.cur_rank

    def get_num_ranks(self) -> int:
        return self.num_ranks

    def get_device(self) -> str:
        return self.device

    def get_cu_count(self) -> int:
        return int(torch.cuda.get_device_properties(0).multi_processor_count)

    def barrier(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        given = [value]
        dist.broadcast_object_list(given, source)
        return given[0]

    def log(self, message: str) -> None:
        print(f"[Iris] [{self.cur_rank}/{self.num_ranks}] {message}")

    log_debug = log_stats = log


def iris(heap_size: int = 1 << 30) -> Iris:
    return Iris(heap_size)


# in kernels


def _at(pointer: Any, cur_rank: Any, target_rank: Any, heap_bases: Any) -> Any:
    bases = tensor(heap_bases)
    here, there = (tl.load(bases + tensor(rank)) for rank in (cur_rank, target_rank))
    distance = there.handle.data.astype(np.uint64) - here.handle.data.astype(np.uint64)
    given = tensor(pointer)
    moved = given.handle.data + distance.reshape((1,) * given.handle.data.ndim)
    return Tile(Value(moved, given.handle.dtype), given.type)


@stand_in
def load(builder: Any, ptr: Any, cur: Any, target: Any, heap_bases: Any, mask: Any = None) -> Any:
    return tl.load(_at(ptr, cur, target, heap_bases), mask=mask)


@stand_in
def store(
    builder: Any, ptr: Any, data: Any, cur: Any, target: Any, heap_bases: Any, mask: Any = None
) -> None:
    tl.store(_at(ptr, cur, target, heap_bases), data, mask=mask)


@stand_in
def get(
    builder: Any, ptr: Any, to: Any, cur: Any, target: Any, heap_bases: Any, mask: Any = None
) -> None:
    tl.store(to, tl.load(_at(ptr, cur, target, heap_bases), mask=mask), mask=mask)


@stand_in
def put(
    builder: Any, ptr: Any, to: Any, cur: Any, target: Any, heap_bases: Any, mask: Any = None
) -> None:
    tl.store(_at(to, cur, target, heap_bases), tl.load(ptr, mask=mask), mask=mask)


@stand_in
def copy(
    builder: Any, ptr: Any, to: Any, source: Any, target: Any, cur: Any, heap_bases: Any,
    mask: Any = None,
) -> None:  # fmt: skip
    found = tl.load(_at(ptr, cur, source, heap_bases), mask=mask)
    tl.store(_at(to, cur, target, heap_bases), found, mask=mask)


@stand_in
def atomic_cas(
    builder: Any, ptr: Any, compare: Any, value: Any, cur: Any, target: Any, heap_bases: Any,
    sem: Any = None, scope: Any = None,
) -> Any:  # fmt: skip
    there = _at(ptr, cur, target, heap_bases)
    return tl.atomic_cas(there, compare, value, sem=sem, scope=scope)


def _atomic(name: str) -> Any:
    def call(
        builder: Any, ptr: Any, value: Any, cur: Any, target: Any, heap_bases: Any,
        mask: Any = None, sem: Any = None, scope: Any = None,
    ) -> Any:  # fmt: skip
        there = _at(ptr, cur, target, heap_bases)
        operand = -tensor(value) if name == "sub" else value
        function = tl.atomic_add if name == "sub" else getattr(tl, f"atomic_{name}")
        return function(there, operand, mask=mask, sem=sem, scope=scope)

    call.__name__ = f"atomic_{name}"
    return stand_in(call)


def provide() -> None:
    """Make the stand-in importable as `iris`."""
    module = ModuleType("iris", "A stand-in of sundog's.")
    atomics = ("add", "sub", "xchg", "and", "or", "xor", "min", "max")
    vars(module).update(
        Iris=Iris, iris=iris, load=load, store=store, get=get, put=put, copy=copy,
        atomic_cas=atomic_cas, **{f"atomic_{name}": _atomic(name) for name in atomics},
    )  # fmt: skip
    sys.modules["iris"] = module
