"""The shadows of all memory that kernels and hosts touch: whose they are, and when they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .memory import Memory, Region
from .shadow import CLEAN, UNWRITTEN, Shadow

__all__ = ["Shadows"]


class Shadows:
    """One per allocation or ordinary tensor's storage. `forget`: told of memory that ended."""

    def __init__(self, memory: Memory, forget: Callable[[int, int], None]) -> None:
        self._memory = memory
        self._forget = forget
        self._shadows: dict[int, Shadow] = {}
        self._owners: dict[int, StorageWeakRef] = {}  # whose memory an ordinary tensor's shadow is

    def __iter__(self) -> Iterator[Shadow]:
        return iter(self._shadows.values())

    def of(self, region: Region) -> Shadow:
        shadow = self._shadows.get(region.start)
        if shadow is None or shadow.end != region.end:
            shadow = self.allocated(region, CLEAN)  # made before we looked
        return shadow

    def allocated(self, region: Region, number: int) -> Shadow:
        """With the number of the state that all of it is in."""
        shadow = Shadow(region.start, region.end, region.itemsize, number)
        self._shadows[region.start] = shadow
        return shadow

    def meet(self, storage: torch.UntypedStorage, unwritten: int) -> None:
        """Before an ordinary tensor is touched: what was known of its memory may be of another.

        Torch may hand out freed memory again without our seeing either, for an unpickled tensor for
        example. An `unwritten` tensor, the size of its elements, was made just now and not filled.
        """
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if start == end or self._memory.is_heap(start, end):
            return
        owner = self._owners.get(start)
        if owner is None or owner.expired():
            self.freed(start)
            self._owners[start] = StorageWeakRef(storage)
            if unwritten:
                region = Region(start, end, "tensor", -1, unwritten, is_heap=False)
                self.allocated(region, UNWRITTEN)

    def freed(self, start: int) -> None:
        shadow = self._shadows.pop(start, None)
        if shadow is not None:
            self._forget(shadow.start, shadow.end)
