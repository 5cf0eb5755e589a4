"""The live allocations by address. A kernel that touches anything else fails.

Heap allocations come and go with the allocator. An ordinary tensor is known from the first launch
that takes it until the last such launch ends.

Heaps may store data and flags apart, so that a kernel that takes one for the other fails.

On a GPU the two may be in different memories (backends/_link.py). Here they are in one range of
addresses, laid out such that a distance between two ranks' data never leads from flags to flags,
nor one between flags from data to data: using the wrong one lands in unmapped memory.
"""

from __future__ import annotations

import bisect
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import BadAccess
from ..world.heap import ALIGNMENT

_FREED_KEPT = 1024
_FEW = 16
_FAR = 1 << 16  # bytes from any tensor: too far for a wrong mask


@dataclass(eq=False)
class Region:
    """Addresses [start, end) of one allocation."""

    start: int
    end: int
    name: str
    rank: int
    itemsize: int
    is_heap: bool
    users: int = 1
    is_context: bool = False  # which bounds the waits of a rank
    is_flags: bool = False  # made by world.signals

    def index(self, address: int) -> str:
        """Return name[index] of an address, as one would write it."""
        element, rest = divmod(address - self.start, self.itemsize)
        return f"{self.name}[{element}]" + (f"+{rest} bytes" if rest else "")


class Memory:
    """All regions of one machine, sorted by address. Regions never overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._freed: dict[int, Region] = {}  # the latest last, to name a use after free
        self._recent: Region | None = None
        self._table: tuple[np.ndarray, np.ndarray] | None = None  # starts, sizes
        self.split: SplitHeaps | None = None  # where data and flags are apart
        # in a program for torch: refuses what the running rank may not touch
        self.reach: Callable[[Region | None, np.ndarray, str], None] | None = None
        self.multicasts: list[tuple[int, int, list[int]]] = []  # start, end, start on each rank

    def add(self, region: Region) -> None:
        at = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)
        self._freed.pop(region.start, None)
        self._table = None

    def remove(self, start: int) -> None:
        at = bisect.bisect_left(self._starts, start)
        region = self._regions.pop(at)
        assert region.start == start
        del self._starts[at]
        self._recent = self._table = None
        self._freed.pop(start, None)
        self._freed[start] = region
        if len(self._freed) > _FREED_KEPT:
            del self._freed[next(iter(self._freed))]

    def hold(self, tensor: torch.Tensor, name: str, rank: int) -> int | None:
        """Make an ordinary tensor's storage known. `drop` the result at the kernel's end."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
            itemsize = tensor.element_size()
        if nbytes == 0 or self.is_heap(start, start + nbytes):
            return None
        known = self.find(start, start + 1)
        if known is None:
            self.add(Region(start, start + nbytes, name, rank, itemsize, is_heap=False))
        else:
            known.users += 1
        return start

    def is_heap(self, start: int, end: int) -> bool:
        """Return whether a storage is a heap, of which only allocations are known."""
        at = bisect.bisect_left(self._starts, start)
        return at < len(self._starts) and self._starts[at] < end and self._regions[at].is_heap

    def drop(self, starts: Iterable[int]) -> None:
        for start in starts:
            region = self.find(start, start + 1)
            assert region is not None
            region.users -= 1
            if region.users == 0:
                self.remove(start)
                del self._freed[start]  # an ordinary tensor goes back to torch

    def find(self, lo: int, hi: int) -> Region | None:
        """Return the region that holds all of [lo, hi)."""
        at = bisect.bisect_right(self._starts, lo) - 1
        if at >= 0 and hi <= self._regions[at].end:
            return self._regions[at]
        return None

    def check(self, addresses: np.ndarray, size: int, verb: str) -> Region | None:
        """Raise BadAccess unless every address starts `size` bytes of a live region.

        Returns the region, if one holds them all.
        """
        if addresses.size == 0:
            return None
        if addresses.size == 1:
            lo = hi = addresses.item()
        else:
            lo, hi = int(addresses.min()), int(addresses.max())
        recent = self._recent
        if recent is None or not (recent.start <= lo and hi + size <= recent.end):
            self._recent = recent = self.find(lo, hi + size)
        if recent is None:  # several allocations in one access, or a wrong address
            outside = self._outside(addresses.ravel(), size)
            if outside.size:
                raise BadAccess(self._explain(int(outside[0]), size, verb))
        if self.reach is not None:
            self.reach(recent, addresses, verb)
        return recent

    def _outside(self, addresses: np.ndarray, size: int) -> np.ndarray:
        if addresses.size <= _FEW:  # a flag on each rank does not need the table
            found = [self.find(at, at + size) is not None for at in addresses.tolist()]
            return addresses[~np.array(found)]
        if self._table is None:
            nbytes = [region.end - region.start for region in self._regions]
            self._table = np.array(self._starts, np.uint64), np.array(nbytes, np.int64)
        starts, sizes = self._table
        at = np.searchsorted(starts, addresses, side="right") - 1
        if not len(starts):
            return addresses
        room = np.maximum(sizes - size + 1, 0).astype(np.uint64)  # where an element may start
        inside = (at >= 0) & (addresses - starts[at] < room[at])
        return addresses[~inside]

    def multicast(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Return the addresses on each rank that multicast addresses stand for."""
        first, last = int(addresses.min()), int(addresses.max())
        for start, end, ranks in self.multicasts:
            if start <= first and last < end:
                return [addresses - np.uint64(start) + np.uint64(base) for base in ranks]
        raise BadAccess(
            f"multimem at {first:#x}: that is not a multicast address. Pass the multicast_ptr of a "
            "symmetric memory handle, plus an offset inside the tensor."
        )

    def name(self, address: int) -> str:
        region = self.find(address, address + 1)
        return region.index(address) if region is not None else f"address {address:#x}"

    def _explain(self, address: int, size: int, verb: str) -> str:
        mixed_up = self._mixed_up(address)
        if mixed_up:
            return f"{verb} of {size} bytes {mixed_up}"
        latest = reversed(self._freed.values())
        freed = next((r for r in latest if r.start <= address < r.end), None)
        if freed is not None:
            return (
                f"{verb} of {size} bytes in freed memory: {freed.index(address)} of rank "
                f"{freed.rank} was freed. Free it after the last kernel that uses it has ended."
            )
        if not self._regions:
            return f"{verb} of {size} bytes at {address:#x}: there is no live allocation at all"
        near = min(self._regions, key=lambda r: max(r.start - address, address + size - r.end))
        if address < near.start:
            where = f"{near.start - address} bytes before {near.name}"
        else:
            where = f"{address + size - near.end} bytes past the end of {near.name}"
        count = (near.end - near.start) // near.itemsize
        # A peer outside the world is past its table, or has no address (NOBODY).
        far = max(near.start - address, address - near.end) > _FAR
        peer = (near.is_context and not far) or address - near.end > 1 << 60
        hint = "the peer: is it a rank of this world?" if peer else "the mask and the offsets."
        if far and not peer:
            hint += (
                " An ordinary tensor that is reached by an address in memory must be an argument "
                "of the launch too."
            )
        return (
            f"{verb} of {size} bytes outside any live allocation: {where} of rank {near.rank} "
            f"({count} elements of {near.itemsize} bytes). Check {hint}"
        )

    def _mixed_up(self, address: int) -> str:
        """Explain flags that were taken for data, or the reverse, where the two are apart."""
        for meant, is_flags in self.split.mixed_up(address) if self.split else ():
            region = self.find(meant, meant + 1)
            if region is None:
                continue
            what = "flags, and was taken for data" if is_flags else "data, and was taken for flags"
            return (
                f"where nothing lies: {region.index(meant)} of rank {region.rank} is {what}. Reach "
                "a peer's flags (world.signals) by device.signal and its data by device.memory: "
                "they may lie in different memories."
            )
        return ""


@dataclass(frozen=True)
class SplitHeaps:
    data: list[torch.Tensor]
    flags: list[torch.Tensor]

    @staticmethod
    def make(world_size: int, nbytes: int) -> SplitHeaps:
        """Lay out W ranks: data at places 0 to W - 1, flags at W + r (W + 1), the rest empty."""
        pitch = nbytes + -nbytes % ALIGNMENT
        flags = [world_size + rank * (world_size + 1) for rank in range(world_size)]
        whole = _untouched(pitch * (flags[-1] + 1))

        def heap(place: int) -> torch.Tensor:
            return torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=place * pitch)

        return SplitHeaps([heap(place) for place in range(world_size)], [heap(p) for p in flags])

    def mixed_up(self, address: int) -> Iterator[tuple[int, bool]]:
        """Guess what an access at the wrong distance meant, and whether that is flags."""
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
    """Reserve addresses, which get memory only when used."""
    file = os.memfd_create("sundog-split")
    try:
        os.ftruncate(file, nbytes)
        return mmap.mmap(file, nbytes)
    finally:
        os.close(file)
