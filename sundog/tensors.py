"""The part of a world that is about tensors on its heap: make, free, and find them at peers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .capture import ALLOCATION
from .errors import NotSymmetric
from .streams import Streams
from .symmetric import Shape

if TYPE_CHECKING:
    from .world import World

__all__ = ["Tensors"]


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
