"""Heaps whose data and flags lie apart, so that a kernel that takes one for the other is told so.

On a GPU the two may lie in different memories (backends/link.py). Here they are places in one range
of addresses, chosen such that a distance between two ranks' data never leads from flags to flags,
nor one between flags from data to data: whoever uses the wrong one comes to a place of nobody.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..heap import ALIGNMENT

__all__ = ["SplitHeaps"]


@dataclass(frozen=True)
class SplitHeaps:
    data: list[torch.Tensor]
    flags: list[torch.Tensor]

    @staticmethod
    def make(world_size: int, nbytes: int) -> SplitHeaps:
        """Of W ranks, data in the places 0 to W - 1, flags in W + r (W + 1); the rest is empty."""
        pitch = nbytes + -nbytes % ALIGNMENT
        flags = [world_size + rank * (world_size + 1) for rank in range(world_size)]
        whole = _untouched(pitch * (flags[-1] + 1))

        def heap(place: int) -> torch.Tensor:
            return torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=place * pitch)

        return SplitHeaps([heap(place) for place in range(world_size)], [heap(p) for p in flags])

    def mixed_up(self, address: int) -> Iterator[tuple[int, bool]]:
        """What somebody may have meant who came here by the wrong distance, and if it is flags."""
        with torch._C.DisableTorchFunction():
            ranks = [
                (d.data_ptr(), f.data_ptr()) for d, f in zip(self.data, self.flags, strict=True)
            ]
            nbytes = self.data[0].numel()
        for own_data, own_flags in ranks:
            for data, flags in ranks:
                inside = address - (own_flags + data - own_data)
                if 0 <= inside < nbytes:
                    yield flags + inside, True
                inside = address - (own_data + flags - own_flags)
                if 0 <= inside < nbytes:
                    yield data + inside, False


def _untouched(nbytes: int) -> mmap.mmap:
    """Addresses without memory behind them until it is used, however many they are."""
    file = os.memfd_create("sundog-split")
    try:
        os.ftruncate(file, nbytes)
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)
