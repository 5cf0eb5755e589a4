"""What a kernel may touch: the live allocations, by address. Outside of them is an error.

Heap allocations come and go with the allocator; an ordinary tensor is known from the first launch
that is given it until the last such launch ends.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import BadAccess
from .numerics import is_raw

__all__ = ["Memory", "Region", "poison_like", "poison_tensor"]

_NEVER = (1, 0)
POISON_BYTE = 0xA5


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

    def index(self, address: int) -> str:
        """name[index] of an address, as a person would write it."""
        element, rest = divmod(address - self.start, self.itemsize)
        return f"{self.name}[{element}]" + (f"+{rest} bytes" if rest else "")


class Memory:
    """All regions of one machine, sorted by address. Regions never overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._freed: dict[int, Region] = {}  # the latest at each start: to name a use after free
        self._recent: tuple[int, int] | Region = _NEVER

    def add(self, region: Region) -> None:
        at = bisect.bisect_left(self._starts, region.start)
        self._starts.insert(at, region.start)
        self._regions.insert(at, region)
        self._freed.pop(region.start, None)

    def remove(self, start: int) -> None:
        at = bisect.bisect_left(self._starts, start)
        region = self._regions.pop(at)
        assert region.start == start
        del self._starts[at]
        self._freed[start] = region
        self._recent = _NEVER

    def hold(self, tensor: torch.Tensor, name: str, rank: int) -> int | None:
        """Make an ordinary tensor's storage known; `drop` what this returns when the kernel ends."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            start, nbytes = storage.data_ptr(), storage.nbytes()
            itemsize = tensor.element_size()
        if nbytes == 0:
            return None
        known = self.find(start, start + 1)
        if known is None:
            self.add(Region(start, start + nbytes, name, rank, itemsize, is_heap=False))
        elif known.is_heap:
            return None
        else:
            known.users += 1
        return start

    def drop(self, starts: Iterable[int]) -> None:
        for start in starts:
            region = self.find(start, start + 1)
            assert region is not None
            region.users -= 1
            if region.users == 0:
                self.remove(start)
                del self._freed[start]  # an ordinary tensor goes back to torch, not to nobody

    def find(self, lo: int, hi: int) -> Region | None:
        """The region that holds all of [lo, hi)."""
        at = bisect.bisect_right(self._starts, lo) - 1
        if at >= 0 and hi <= self._regions[at].end:
            return self._regions[at]
        return None

    def check(self, addresses: np.ndarray, size: int, verb: str) -> None:
        """Every address starts an element of `size` bytes in a live region, or BadAccess."""
        if addresses.size == 1:
            lo = int(addresses.flat[0])
            hi = lo + size
        elif addresses.size == 0:
            return
        else:
            lo, hi = int(addresses.min()), int(addresses.max()) + size
        recent = self._recent
        if isinstance(recent, Region) and recent.start <= lo and hi <= recent.end:
            return
        region = self.find(lo, hi)
        if region is not None:
            self._recent = region
            return
        for address in addresses.flat:  # several allocations in one access, or a wrong one
            if self.find(int(address), int(address) + size) is None:
                raise BadAccess(self._explain(int(address), size, verb))

    def named(self, name: str, rank: int) -> list[Region]:
        """A rank's regions of one name."""
        return [r for r in self._regions if r.name == name and r.rank == rank]

    def name(self, address: int) -> str:
        region = self.find(address, address + 1)
        return region.index(address) if region is not None else f"address {address:#x}"

    def _explain(self, address: int, size: int, verb: str) -> str:
        freed = next((r for r in self._freed.values() if r.start <= address < r.end), None)
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
        return (
            f"{verb} of {size} bytes outside any live allocation: {where} of rank {near.rank} "
            f"({count} elements of {near.itemsize} bytes). Check the mask and the offsets."
        )


def poison_tensor(tensor: torch.Tensor) -> None:
    """NaN for floats, a pattern for integers: what nobody wrote must not look like an answer."""
    if tensor.numel() == 0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.view(torch.uint8).fill_(0xFF)  # all ones is a NaN in every float format
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.view(torch.uint8).fill_(POISON_BYTE)


def poison_like(shape: tuple[int, ...], np_dtype: np.dtype, dtype: object) -> np.ndarray:
    """The same for a value inside a kernel: what a masked-off lane reads."""
    floating = np_dtype.kind == "f" or is_raw(dtype)  # type: ignore[arg-type]
    if np_dtype == np.bool_:
        return np.ones(shape, np_dtype)
    byte = 0xFF if floating else POISON_BYTE
    return np.full(shape, byte, np.uint8).repeat(np_dtype.itemsize).view(np_dtype).reshape(shape)
