"""One rank's view of symmetric memory: which allocation a tensor is, and where ranks' copies lie.

A rank has its data and its flags at the same offsets of two segments, which are one and the same
unless a link separates them (docs/gpu.md). Flags are what `world.signals` made, and the context.

The part of a world that is about tensors on its heap: make, free, and find them at peers.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import NotSymmetric
from .backend import Backend
from .capture import ALLOCATION
from .heap import Allocation, Heap
from .poison import heaps, poison_tensor
from .streams import Streams

if TYPE_CHECKING:
    from .world import World

__all__ = ["Shape", "Symmetric", "Tensors"]

Shape = int | Sequence[int]


class Symmetric:
    """The heaps of a world or group, seen from one of its ranks. `origin`: where they start."""

    def __init__(
        self, backend: Backend, ranks: tuple[int, ...], heap: Heap, origin: int = 0
    ) -> None:
        self.heap = heap
        self.origin = origin
        self._backend = backend
        self._ranks = ranks
        self._rank = ranks.index(backend.rank)
        for is_flags in (False, True):
            storage = backend.segment(backend.rank, is_flags).untyped_storage()
            heaps[storage.data_ptr()] = storage
        own = {is_flags: self.base(self._rank, is_flags) for is_flags in (True, False)}
        self._own = [(f, base) for f, base in own.items() if not f or base != own[False]]

    def allocate(self, shape: Shape, dtype: torch.dtype, name: str, kind: str) -> torch.Tensor:
        sizes = _sizes(shape)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"dtype {dtype!r}: expected a torch.dtype; a shape of several sizes is one "
                "argument: world.empty((2, 3))"
            )
        count = math.prod(sizes)
        block = self.heap.alloc(count * dtype.itemsize, name, dtype.itemsize, kind)
        self._backend.allocated(self.base(self._rank, block.is_flags), block)
        tensor = self._view(self._rank, block, dtype, count).view(sizes)
        if self.heap.guard:
            # Nobody's write: it stays unwritten.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                poison_tensor(tensor)
        return tensor

    def free(self, offset: int) -> Allocation:
        block = self.heap.free(offset)
        if not block.is_arena:
            self._backend.freed(self.base(self._rank, block.is_flags), block)
        return block

    def find(self, tensor: torch.Tensor) -> Allocation | None:
        """The live allocation that a tensor of this rank starts in."""
        if tensor.device.type != self._backend.device.type:
            return None
        block = self._at(_address(tensor))
        return None if block is None or block.is_arena else block

    def block_of(self, tensor: torch.Tensor) -> Allocation:
        block = self.find(tensor)
        if block is None:
            raise NotSymmetric(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not a live "
                f"allocation of this world's heap (rank {self._rank} of {len(self._ranks)}): it is "
                "an ordinary tensor, or freed, or from another world. Use world.empty or "
                "world.as_symmetric."
            )
        return block

    def inside(self, tensor: torch.Tensor, block: Allocation) -> int:
        """How many bytes into its allocation a tensor starts."""
        return _address(tensor) - self.base(self._rank, block.is_flags) - block.offset

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The same elements of another rank's copy."""
        block = self.block_of(tensor)
        whole = self._view(rank, block, tensor.dtype, block.size // tensor.itemsize)
        start = whole.storage_offset() + self.inside(tensor, block) // tensor.itemsize
        return whole.as_strided(tensor.shape, tensor.stride(), start)

    def name_of(self, address: int) -> str:
        """name[index] of an own address, for messages."""
        block = self._at(address)
        if block is None:
            return f"address {address:#x}"
        inside = address - self.base(self._rank, block.is_flags) - block.offset
        return f"{block.name}[{inside // block.itemsize}]"

    def base(self, rank: int, is_flags: bool) -> int:
        """Where a rank's heap starts, for this rank's kernels."""
        bases = self._backend.flag_bases if is_flags else self._backend.bases
        return bases[self._ranks[rank]] + self.origin

    def deltas(self) -> list[tuple[int, int]]:
        """How far each rank's data, and its flags, lie from the own ones."""
        return [
            (self._delta(rank, is_flags=False), self._delta(rank, is_flags=True))
            for rank in range(len(self._ranks))
        ]

    @functools.cached_property
    def apart(self) -> int | None:
        """Bytes from each rank's data to the next one's, if the same between all, and upwards."""
        bases = [self.base(rank, is_flags=False) for rank in range(len(self._ranks))]
        steps = {after - before for before, after in itertools.pairwise(bases)}
        step = steps.pop() if steps else self.heap.capacity
        return step if step > 0 and not steps else None

    def _delta(self, rank: int, is_flags: bool) -> int:
        return self.base(rank, is_flags) - self.base(self._rank, is_flags)

    def _at(self, address: int) -> Allocation | None:
        """On the path of every collective: two lookups at most."""
        for is_flags, base in self._own:
            block = self.heap.at(address - base)
            if block is not None and (block.is_flags == is_flags or len(self._own) == 1):
                return block
        return None

    def _view(self, rank: int, block: Allocation, dtype: torch.dtype, count: int) -> torch.Tensor:
        start = self.origin + block.offset
        segment = self._backend.segment(self._ranks[rank], block.is_flags)
        return segment[start : start + count * dtype.itemsize].view(dtype)


def _address(tensor: torch.Tensor) -> int:
    """Where it starts, also if it is empty: data_ptr() would be 0 then."""
    address = tensor.data_ptr()
    if address:
        return address
    storage = tensor.untyped_storage().data_ptr()
    return storage + int(tensor.storage_offset()) * tensor.itemsize


def _sizes(shape: Shape) -> list[int]:
    try:
        sizes = [operator.index(n) for n in ((shape,) if isinstance(shape, int) else shape)]
    except TypeError:
        text = f"shape {shape!r}: expected a whole number or a sequence of them"
        raise ValueError(text) from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape {sizes}: sizes must not be negative")
    return sizes


class Tensors(Streams):
    """The same on every backend."""

    _groups: dict[int, World | None]  # by the offset of their heaps in this one
    _scopes: list[list[int]]  # offsets of what was allocated in each
    _signals: dict[int, torch.Tensor]  # by offset

    def _check_rank(self, rank: int) -> None:
        raise NotImplementedError

    def empty(
        self, shape: Shape, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """A symmetric tensor: the same offset on every rank that makes the same calls. No waiting.

        Peers may touch it after a barrier. What it holds is poison on the simulator.
        """
        return self._allocate(shape, dtype, name, "data")

    def zeros(
        self, shape: Shape, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """As `empty`, zeroed."""
        return self.empty(shape, dtype, name).zero_()

    def full(
        self, shape: Shape, value: float, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """As `empty`, all elements `value`."""
        return self.empty(shape, dtype, name).fill_(value)

    def randn(
        self, shape: Shape, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """As `empty`, random by torch's generator, which each rank seeds for itself."""
        return self.empty(shape, dtype, name).normal_()

    def empty_like(self, other: torch.Tensor, name: str = "") -> torch.Tensor:
        """As `empty`, with the shape and dtype of any tensor."""
        return self.empty(other.shape, other.dtype, name)

    def zeros_like(self, other: torch.Tensor, name: str = "") -> torch.Tensor:
        """As `zeros`, with the shape and dtype of any tensor."""
        return self.zeros(other.shape, other.dtype, name)

    def signals(self, shape: Shape, name: str) -> torch.Tensor:
        """Flags and epochs: zeroed int64, and set back to zero if the world must recover.

        A peer's are reached by `device.signal`, a peer's data by `device.memory`: under a link
        they lie in different memories.
        """
        tensor = self._allocate(shape, torch.int64, name, "flags").zero_()
        self._signals[self._memory.block_of(tensor).offset] = tensor
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Give a symmetric tensor back. Every rank must do so at the same place in its program."""
        self._check_open()
        self._refuse_in_capture("world.free", ALLOCATION, "Free it outside.")
        block = self._memory.block_of(tensor)
        inside = self._memory.inside(tensor, block)
        if inside != 0:
            raise NotSymmetric(
                f"free: this tensor is a part of {block.name}, {inside} bytes into it. Free the "
                "tensor that the world returned."
            )
        self._free(block.offset)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Where a symmetric tensor starts in its heap, in bytes: for an allocation, on every rank
        the same, also where addresses differ in other ways."""
        block = self._memory.block_of(tensor)
        return block.offset + self._memory.inside(tensor, block)

    def _free(self, offset: int) -> None:
        self._check_unused(offset)
        block = self._memory.free(offset)
        if not block.is_arena:
            self._signals.pop(offset, None)
            return
        group = self._groups.pop(offset)
        if group is not None:
            for inner in list(group._heap.live):
                group._free(inner)
            group._end("the group ended with the scope that it was made in")
            group.forget()  # its plans' flags are free: a call that found one would still use them

    def _check_unused(self, offset: int) -> None:
        """Of a group's heap, before any of it is freed, all that is in it."""
        self._check_no_graph_uses(offset)
        group = self._groups.get(offset)
        if group is not None:
            for inner in group._heap.live:
                group._check_unused(inner)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is allocated inside is freed at the end, the latest first."""
        self._scopes.append([])
        try:
            yield
        finally:
            self._end_scope()

    def _end_scope(self) -> None:
        for offset in reversed(self._scopes.pop()):
            if offset in self._memory.heap.live:
                self._free(offset)

    @property
    def heap_calls(self) -> int:
        """How often this rank has allocated or freed: while it stays, so does what is symmetric."""
        return self._memory.heap.num_calls

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Is it, or is it a part of, a live tensor of this world's heap?"""
        return self._memory.find(tensor) is not None

    def as_symmetric(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """The tensor itself if it is on the heap, else a copy of it that is."""
        if self.is_symmetric(tensor):
            return tensor
        return self.empty(tensor.shape, tensor.dtype, name).copy_(tensor)

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A view of the peer's copy, where the host can reach its memory. Orders nothing."""
        self._check_open()
        self._check_rank(rank)
        return self._memory.peer(tensor, rank)

    @property
    def apart(self) -> int | None:
        """Bytes from each rank's copy of a tensor to the next one's, where that is one number.

        Then a descriptor (TMA) with a dimension for the ranks reaches them all.
        """
        return self._memory.apart

    def _allocate(self, shape: Shape, dtype: torch.dtype, name: str, kind: str) -> torch.Tensor:
        self._check_open()
        self._refuse_in_capture("world.empty", ALLOCATION, "Allocate before the capture.")
        tensor = self._memory.allocate(shape, dtype, name, kind)
        if self._scopes:
            self._scopes[-1].append(self._memory.block_of(tensor).offset)
        return tensor
