"""torch's symmetric memory on the heap of a world: allocation, rendezvous, and the handle.

As on a GPU, a rendezvous orders only the allocation and the zeroed signal pads. What a rank wrote
to its tensor before, a peer may read only after something that orders memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..errors import CannotInterpret, SundogError
from ..machine.launcher import current_machine
from ..machine.machine import Machine
from ..machine.regions import Region
from . import stream_kernels as kernels
from .shmem import initialise

_LARGEST_PAD = 1 << 18  # bytes; programs that ask for more use the first few words
_MULTICAST = 1 << 56  # no memory is here: multicast addresses begin here


@dataclass(eq=False)
class SymmetricTensor:
    """A symmetric tensor and its signal pad, on one rank."""

    number: int
    tensor: torch.Tensor  # bytes
    pad: torch.Tensor
    known: dict[int, int] | None = None  # for the checker: when the pad was zeroed
    handles: dict[str, SymmetricHandle] = field(default_factory=dict)

    @property
    def start(self) -> int:
        with torch._C.DisableTorchFunction():
            return self.tensor.data_ptr()


def allocate(
    rank: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype,
    device: Any = None, group_name: str | None = None, alloc_id: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Stand in for _SymmetricMemory.empty_strided_p2p."""
    if rank.backend == "NVSHMEM":
        initialise(rank)  # as torch does at the first allocation
    world, number = rank.world, len(rank.allocations)
    itemsize = torch.empty(0, dtype=dtype, device="cpu").element_size()
    numel = (
        1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if min(size, default=1)
        else 0
    )
    nbytes = max(16, numel * itemsize)
    from torch._C._distributed_c10d import _SymmetricMemory

    pad_size = min(_SymmetricMemory.signal_pad_size, _LARGEST_PAD)
    tensor = world.empty(-(-nbytes // itemsize), dtype, f"symm_mem{number}")
    pad = world.zeros(max(64, pad_size // 4), torch.int32, f"signal_pad{number}")
    allocation = SymmetricTensor(number, tensor, pad)
    machine = current_machine()
    if machine is not None and machine.checker is not None:
        streams = machine.checker.streams
        allocation.known = streams.record(machine.host.stream, streams.host(world.rank))
    rank.allocations.append(allocation)
    result = torch.as_strided(tensor, list(size), list(stride))
    if group_name is not None:
        rank.groups_of[number] = group_name
    return result


def find(rank: Any, tensor: torch.Tensor) -> SymmetricTensor | None:
    """Return a tensor's allocation."""
    with torch._C.DisableTorchFunction():
        address = tensor.data_ptr()
    for each in rank.allocations:
        with torch._C.DisableTorchFunction():
            start, nbytes = each.tensor.data_ptr(), each.tensor.nbytes
        if start <= address < start + nbytes:
            return each
    return None


def rendezvous(rank: Any, tensor: torch.Tensor, group_name: str | None = None) -> SymmetricHandle:
    """Stand in for _SymmetricMemory.rendezvous: at first a collective of the group's ranks."""
    allocation = find(rank, tensor)
    if allocation is None:
        raise CannotInterpret(
            f"rendezvous of a tensor of shape {tuple(tensor.shape)} that is not symmetric: "
            "allocate it with torch.distributed._symmetric_memory.empty"
        )
    name = group_name or rank.groups_of.get(allocation.number) or rank.default_group().group_name
    if name not in allocation.handles:
        allocation.handles[name] = _meet(rank, allocation, rank.group_named(name))
    with torch._C.DisableTorchFunction():
        offset = tensor.data_ptr() - allocation.start
    handle = allocation.handles[name]
    return handle if offset == 0 else handle.at(offset)


def _meet(rank: Any, allocation: SymmetricTensor, group: Any) -> SymmetricHandle:
    world = rank.world
    with torch._C.DisableTorchFunction():
        nbytes = allocation.tensor.nbytes
    mine = (allocation.number, nbytes)
    everyone = group.exchange(mine, "rendezvous")
    if len({tuple(each) for each in everyone}) > 1:
        shown = ", ".join(
            f"rank {r}: allocation {each[0]} of {each[1]} bytes"
            for r, each in zip(group.ranks, everyone, strict=True)
        )
        raise SundogError(
            f"rendezvous: the ranks passed different tensors ({shown}). Every rank must allocate "
            "its symmetric tensors in the same order, and pass the same one."
        )
    _learn(rank, group, allocation)
    tensors = [world.peer(allocation.tensor, r) for r in group.ranks]
    pads = [world.peer(allocation.pad, r) for r in group.ranks]
    handle = SymmetricHandle(rank, group, allocation, tensors, pads)
    group.exchange(None, "rendezvous")  # so that no table is missing when a kernel follows
    return handle


def _learn(rank: Any, group: Any, allocation: SymmetricTensor) -> None:
    """Order the peers' allocations, with their zeroed pads, before what this rank does next."""
    machine = current_machine()
    if machine is None or machine.checker is None or allocation.known is None:
        return
    published = rank.shared.setdefault(("known", allocation.number), {})
    published[rank.world.rank] = allocation.known
    group.exchange(None, "rendezvous")
    for known in published.values():
        for stream in machine.streams.of(rank.world.rank):
            machine.checker.streams.learn(stream, known)


class Reach:
    """What each rank's kernels may touch of other ranks: what a rendezvous gave to them."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._met: set[tuple[int, int]] = set()  # a rank, and the start of another rank's region

    @staticmethod
    def of(machine: Machine | None) -> Reach:
        """Return a machine's, and put it in place."""
        assert machine is not None
        if not isinstance(machine.memory.reach, Reach):
            machine.memory.reach = Reach(machine)
        return machine.memory.reach

    def allow(self, rank: int, address: int) -> None:
        region = self._machine.memory.find(address, address + 1)
        if region is not None:
            self._met.add((rank, region.start))

    def __call__(self, region: Region | None, addresses: np.ndarray, verb: str) -> None:
        rank = self._machine.program.rank
        for each in (region,) if region is not None else self._regions(addresses):
            if each.rank != rank and (rank, each.start) not in self._met:
                raise CannotInterpret(
                    f"{verb} of {each.name} of rank {each.rank} by a kernel of rank {rank}, which "
                    "has no rendezvous of it: on GPUs that address is not rank "
                    f"{rank}'s. Allocate the tensor with torch.distributed._symmetric_memory."
                    "empty, and take the address from the handle that rendezvous returns."
                )

    def _regions(self, addresses: np.ndarray) -> list[Region]:
        memory = self._machine.memory
        found = (memory.find(at, at + 1) for at in addresses.ravel().tolist())
        return [region for region in found if region is not None]


class SymmetricHandle:
    """What `rendezvous` returns: torch's _SymmetricMemory, on simulated memory."""

    def __init__(
        self, rank: Any, group: Any, allocation: SymmetricTensor, tensors: list[torch.Tensor],
        pads: list[torch.Tensor], offset: int = 0,
    ) -> None:  # fmt: skip
        self._rank, self._group, self._allocation = rank, group, allocation
        self._tensors, self._pads = tensors, pads
        self.rank, self.world_size = group.rank(), group.size()
        self.offset = offset
        with torch._C.DisableTorchFunction():
            self.buffer_ptrs = [tensor.data_ptr() for tensor in tensors]
            self.signal_pad_ptrs = [pad.data_ptr() for pad in pads]
            self.buffer_size = allocation.tensor.nbytes
        self.signal_pad_size = allocation.pad.numel() * 4
        self._tables = [
            rank.world.empty(len(ptrs), torch.int64, name).copy_(torch.tensor(ptrs))
            for ptrs, name in (
                (self.buffer_ptrs, "buffer_ptrs_dev"),
                (self.signal_pad_ptrs, "signal_pad_ptrs_dev"),
            )
        ]
        with torch._C.DisableTorchFunction():
            self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = (t.data_ptr() for t in self._tables)
        self.device = torch.device("cuda", rank.world.rank)
        self.multicast_ptr = self._make_multicast()
        reach = Reach.of(current_machine())
        for address in (*self.buffer_ptrs, *self.signal_pad_ptrs):
            reach.allow(rank.world.rank, address)

    def at(self, offset: int) -> SymmetricHandle:
        """Return the handle of a tensor that begins inside this allocation."""
        other: SymmetricHandle = SymmetricHandle.__new__(SymmetricHandle)
        vars(other).update(vars(self), offset=offset)
        return other

    def _make_multicast(self) -> int:
        """Return an address that stands for all ranks' memory, or 0 if there is none."""
        machine = current_machine()
        if machine is None:
            return 0
        memory = machine.memory
        ends = [end for _, end, _ in memory.multicasts]
        start = max(ends, default=_MULTICAST) + 4096
        memory.multicasts.append((start, start + self.buffer_size, list(self.buffer_ptrs)))
        return start

    # views

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        return self._view(self._tensors[self._peer(rank)], sizes, dtype, storage_offset)

    def get_remote_tensor(
        self, peer: int, sizes: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        itemsize = torch.empty(0, dtype=dtype, device="cpu").element_size()
        whole = self._tensors[self._peer(peer)]
        return self._view(whole, sizes, dtype, self.offset // itemsize)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        kind = dtype or torch.uint32
        itemsize = torch.empty(0, dtype=kind, device="cpu").element_size()
        shape = tuple(sizes) or (self.signal_pad_size // itemsize - storage_offset,)
        return self._view(self._pads[self._peer(rank)], shape, kind, storage_offset)

    def _view(
        self, whole: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        flat = whole.view(-1).view(torch.uint8).view(dtype)
        count = math.prod(sizes)
        if offset + count > flat.numel():
            raise RuntimeError(
                f"a view of {count} elements at {offset} of symmetric memory that holds "
                f"{flat.numel()} of {dtype}: ask for fewer, or allocate more"
            )
        return flat[offset : offset + count].view(tuple(sizes))

    # order

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Order the ranks by a kernel on the current stream."""
        self._word(channel, self.rank)
        kernels.barrier[(1,)](self.signal_pad_ptrs_dev, self.rank, channel, self.world_size)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        word = self._word(channel, self.rank)
        kernels.send[(1,)](self.signal_pad_ptrs_dev, self._peer(dst_rank), word)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        word = self._word(channel, self._peer(src_rank))
        kernels.wait[(1,)](self.signal_pad_ptrs_dev, self.rank, word)

    def _peer(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            last = self.world_size - 1
            raise ValueError(f"rank {rank}: the group of this handle has ranks 0 to {last}")
        return rank

    def _word(self, channel: int, sender: int) -> int:
        """Return which word of a signal pad a sender signals on."""
        channels = self.signal_pad_size // 4 // self.world_size
        if not 0 <= channel < channels:
            raise ValueError(
                f"channel {channel}: a signal pad of {self.signal_pad_size} bytes has channels "
                f"0 to {channels - 1} for {self.world_size} ranks; set_signal_pad_size gives more"
            )
        return channel * self.world_size + sender

    def stream_write_value32(self, tensor: Any, offset: int = 0, val: int = 0) -> None:
        """Write a word in stream order. torch 2.5 passes (address, value)."""
        if isinstance(tensor, int):
            kernels.write_value[(1,)](tensor, offset)
            return
        self._rank.hold(tensor)
        with torch._C.DisableTorchFunction():
            address = tensor.data_ptr() + 4 * offset
        kernels.write_value[(1,)](address, val)

    def memset32(self, tensor: torch.Tensor, offset: int, val: int, count: int = 1) -> None:
        tensor.view(torch.int32)[offset : offset + count].fill_(val)
