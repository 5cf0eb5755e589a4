"""Symmetric memory, seen from one rank: a tensor's allocation, and where the ranks' copies are.

A rank's data and flags have one numbering of offsets, and one segment unless a link separates them
(docs/gpu.md). Flags are what `world.signals` allocates, and the context.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import NotSymmetric
from ..ops.op import checked_tensor
from .heap import Allocation, Heap

if TYPE_CHECKING:
    from .backend import Backend
    from .world import World

# The heaps of all worlds of this process, by address, to recognise a tensor that is on one.
heaps: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

POISON_BYTE = 0xA5
NAN_BYTE = 0xFF  # all ones is a NaN in every float format
FNUZ_NAN_BYTE = 0x80  # except in those without negative zero


def poison_tensor(tensor: torch.Tensor) -> None:
    """Fill unwritten memory with NaN, or a pattern, so that it does not look like an answer."""
    if tensor.numel() == 0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        fnuz = tensor.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        tensor.view(-1).view(torch.uint8).fill_(FNUZ_NAN_BYTE if fnuz else NAN_BYTE)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)


Shape = int | Sequence[int]


class Symmetric:
    """The heaps of a world or group, seen from one of its ranks. They start at `origin`.

    `check_unused` raises if a graph still uses what is at an offset.
    """

    def __init__(
        self, backend: Backend, ranks: tuple[int, ...], heap: Heap, origin: int,
        check_unused: Callable[[Symmetric, int], None],
    ) -> None:  # fmt: skip
        self.heap = heap
        self.origin = origin
        self.flags: dict[int, torch.Tensor] = {}  # by offset: a recovery sets them to zero
        self.groups: dict[int, World | None] = {}  # by the offset of their heaps in this one
        self._scopes: list[list[int]] = []  # offsets of each one's allocations
        self._backend = backend
        self._ranks = ranks
        self._rank = ranks.index(backend.rank)
        self._check_unused = check_unused
        for is_flags in (False, True):
            storage = backend.segment(backend.rank, is_flags).untyped_storage()
            heaps[storage.data_ptr()] = storage
        own = {is_flags: self.base(self._rank, is_flags) for is_flags in (True, False)}
        self._own = [(f, base) for f, base in own.items() if not f or base != own[False]]

    # allocate and free

    def allocate(
        self, shape: Shape, dtype: torch.dtype, name: str, kind: str, scoped: bool = True
    ) -> torch.Tensor:
        sizes = _sizes(shape)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"dtype {dtype!r}: expected a torch.dtype; a shape of several sizes is one "
                "argument: world.empty((2, 3))"
            )
        count = math.prod(sizes)
        block = self.heap.alloc(count * dtype.itemsize, name, dtype.itemsize, kind)
        block.ranks = self._ranks
        self._backend.allocated(self.base(self._rank, block.is_flags), block)
        tensor = self._view(self._rank, block, dtype, count).view(sizes)
        if self.heap.guard:
            # Unseen by the checker, for which the memory stays unwritten.
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                poison_tensor(tensor)
        if kind == "flags":
            self.flags[block.offset] = tensor.zero_()
        if scoped:
            self._add_to_scope(block.offset)
        return tensor

    def allocate_arena(self, nbytes: int, name: str) -> Allocation:
        """Allocate the heap of a group."""
        arena = self.heap.alloc(nbytes, name, kind="arena")
        self.groups[arena.offset] = None
        self._add_to_scope(arena.offset)
        return arena

    def own_groups(self) -> list[World]:
        """Return the groups that this rank is a member of."""
        return [group for group in self.groups.values() if group is not None]

    def free_tensor(self, tensor: torch.Tensor) -> None:
        block = self.block_of(tensor)
        inside = self.inside(tensor, block)
        if inside != 0:
            raise NotSymmetric(
                f"free: this tensor is a part of {block.name}, {inside} bytes into it. Free the "
                "tensor that the world returned."
            )
        self.free(block.offset)

    def free(self, offset: int) -> None:
        self.check_unused(offset)
        block = self.heap.free(offset)
        if not block.is_arena:
            self._backend.freed(self.base(self._rank, block.is_flags), block)
            self.flags.pop(offset, None)
            return
        group = self.groups.pop(offset)
        if group is not None:
            for inner in list(group._memory.heap.live):
                group._memory.free(inner)
            group._end("the group ended with the scope that it was made in")
            group._forget()  # its plans' flags are freed, so no call may find a plan

    def check_unused(self, offset: int) -> None:
        """Raise if a graph uses it; for a group's heap, before any of it is freed."""
        self._check_unused(self, offset)
        group = self.groups.get(offset)
        if group is not None:
            for inner in group._memory.heap.live:
                group._memory.check_unused(inner)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Free what is allocated inside when the block ends, the latest first.

        Members of a group meet at a barrier before that, because kernels may still use the memory
        of its plans, which no user sees. After an error they do not: it may be this rank's alone.
        """
        self._scopes.append([])
        try:
            yield
            for group in [self.groups.get(offset) for offset in self._scopes[-1]]:
                if group is not None and not group._closed:
                    group.barrier()
        finally:
            self.end_scope()

    @contextmanager
    def own_scope(self) -> Iterator[list[int]]:
        """Collect what is allocated inside, apart from the caller's scope, and do not free it."""
        scopes, self._scopes = self._scopes, [[]]
        try:
            yield self._scopes[0]
        finally:
            self._scopes = scopes

    def end_scope(self) -> None:
        for offset in reversed(self._scopes.pop()):
            if offset in self.heap.live:
                self.free(offset)

    def _add_to_scope(self, offset: int) -> None:
        if self._scopes:
            self._scopes[-1].append(offset)

    # find

    def find(self, tensor: torch.Tensor) -> Allocation | None:
        """Return the live allocation that a tensor of this rank starts in."""
        if checked_tensor(tensor).device.type != self._backend.device.type:
            return None
        block = self._at(_address(tensor))
        return None if block is None or block.is_arena else block

    def block_of(self, tensor: torch.Tensor) -> Allocation:
        block = self.find(tensor)
        if block is None:
            self.refuse_freed("a tensor", tensor)
            raise NotSymmetric(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not a live "
                f"allocation of this world's heap (rank {self._rank} of {len(self._ranks)}): it is "
                "an ordinary tensor, or freed, or from another world. Use world.empty or "
                "world.as_symmetric."
            )
        return block

    def refuse_freed(self, what: str, tensor: torch.Tensor) -> None:
        """Raise if a tensor lies in this heap but in no live allocation: it was freed."""
        address = _address(tensor)
        if self._at(address) is not None:
            return  # on the heap of a group
        if tensor.numel() and any(0 <= address - b < self.heap.capacity for _, b in self._own):
            raise NotSymmetric(
                f"{what} of shape {tuple(tensor.shape)} was on the heap of this world and has been "
                "freed (world.free, the end of its scope, or of its group). Its memory may be "
                "another tensor's soon: free it later, and once."
            )

    def inside(self, tensor: torch.Tensor, block: Allocation) -> int:
        """Return how many bytes into its allocation a tensor starts."""
        return _address(tensor) - self.base(self._rank, block.is_flags) - block.offset

    def offset_of(self, tensor: torch.Tensor) -> int:
        block = self.block_of(tensor)
        return block.offset + self.inside(tensor, block)

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the same elements of another rank's copy."""
        block = self.block_of(tensor)
        whole = self._view(rank, block, tensor.dtype, block.size // tensor.itemsize)
        start = whole.storage_offset() + self.inside(tensor, block) // tensor.itemsize
        return whole.as_strided(tensor.shape, tensor.stride(), start)

    def name_of(self, address: int) -> str:
        """Name an address of this rank as name[index], for messages."""
        block = self._at(address)
        if block is None:
            return f"address {address:#x}"
        inside = address - self.base(self._rank, block.is_flags) - block.offset
        return f"{block.name}[{inside // block.itemsize}]"

    def base(self, rank: int, is_flags: bool) -> int:
        """Return where a rank's heap starts, for this rank's kernels."""
        bases = self._backend.flag_bases if is_flags else self._backend.bases
        return bases[self._ranks[rank]] + self.origin

    def deltas(self) -> list[tuple[int, int]]:
        """Return how far each rank's data, and its flags, are from this rank's."""
        return [
            (self._delta(rank, is_flags=False), self._delta(rank, is_flags=True))
            for rank in range(len(self._ranks))
        ]

    @functools.cached_property
    def rank_stride(self) -> int | None:
        """Return the bytes from each rank's data to the next one's, if equal and positive."""
        bases = [self.base(rank, is_flags=False) for rank in range(len(self._ranks))]
        steps = {after - before for before, after in itertools.pairwise(bases)}
        step = steps.pop() if steps else self.heap.capacity
        return step if step > 0 and not steps else None

    def _delta(self, rank: int, is_flags: bool) -> int:
        return self.base(rank, is_flags) - self.base(self._rank, is_flags)

    def _at(self, address: int) -> Allocation | None:
        """Find the block of an address, in two lookups at most, since every collective asks."""
        for is_flags, base in self._own:
            block = self.heap.at(address - base)
            if block is not None and (block.is_flags == is_flags or len(self._own) == 1):
                return block
        return None

    def _view(self, rank: int, block: Allocation, dtype: torch.dtype, count: int) -> torch.Tensor:
        start = self.origin + block.offset
        segment = self._backend.segment(self._ranks[rank], block.is_flags)
        # A view made in inference mode could be written only there. No checker needs to see it.
        with torch.inference_mode(False), torch._C.DisableTorchFunction():
            return segment[start : start + count * dtype.itemsize].view(dtype)


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor starts, even if it is empty: data_ptr() would then be 0."""
    with torch._C.DisableTorchFunction():  # a checker looks at no addresses of ours
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
