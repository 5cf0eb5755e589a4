"""Kernels of our own on the stand-ins for device libraries: SHMEM, Triton-distributed, Iris."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

from sundog.compat import provide
from sundog.compat import triton_dist as stand_in

provide()

import iris  # type: ignore[import-not-found]  # noqa: E402
import torch.distributed._symmetric_memory._nvshmem_triton as nvshmem  # noqa: E402
import triton_dist.language as dl  # type: ignore[import-not-found]  # noqa: E402
from triton_dist.language.extra import libshmem_device as shmem  # type: ignore  # noqa: E402
from triton_dist.language.extra.language_extra import (  # type: ignore  # noqa: E402
    __syncthreads,
    atomic_cas,
    tid,
)


@triton.jit
def put_and_signal(data, flag, x, out, BLOCK: tl.constexpr, FENCE: tl.constexpr):
    """Rank 0 puts x to rank 1 and signals; rank 1 waits and copies."""
    if dl.rank() == 0:
        shmem.putmem_nbi_block(data, x, BLOCK * 4, 1)
        if FENCE:
            shmem.fence()  # the put reaches rank 1 before the signal does
        if tid(0) == 0:
            shmem.signal_op(flag, 1, shmem.NVSHMEM_SIGNAL_SET, 1)
    else:
        if tid(0) == 0:
            shmem.signal_wait_until(flag, shmem.NVSHMEM_CMP_EQ, 1)
        __syncthreads()  # what thread 0 acquired, all learn
        at = tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(data + at))


@triton.jit
def tell_the_next(word, MEET: tl.constexpr):
    """Put this rank's number to the next rank, as NVSHMEM's first example does."""
    rank = shmem.my_pe()
    shmem.int_p(word, -1 - rank, (rank + 1) % shmem.n_pes())
    if MEET:
        shmem.barrier_all()  # completes the put, and waits for the others'


@nvshmem.requires_nvshmem
@triton.jit
def put_by_torch(data, flag, x, n, FENCE: tl.constexpr):
    """Rank 0 puts x to rank 1 and signals by torch's names; rank 1 waits, and all meet."""
    if nvshmem.my_pe() == 0:
        nvshmem.put(data, x, n, 1)
        if FENCE:
            nvshmem.fence()  # the put reaches rank 1 before the signal does
        nvshmem.signal_op(flag.to(tl.int64), tl.full([], 1, tl.int64), 9, 1)
    else:
        nvshmem.signal_wait_until(flag, 0, 1)
        nvshmem.get(data + n, data, n, 1)  # its own
    nvshmem.barrier_all()


@nvshmem.requires_nvshmem
@triton.jit
def exchange_by_torch(out, x, n):
    """Give each rank its part, then everybody rank 1's."""
    nvshmem.alltoall(0, out, x, n)
    nvshmem.broadcast(0, out + 2 * n, x, n, 1)


@triton.jit
def meet(words, size):
    """Meet all ranks: each thread takes one peer, and leaves its loops when it is done."""
    with dl.simt_exec_region() as (thread, _block):
        if thread < size:
            theirs = dl.symm_at(words + dl.rank(), thread)
            while atomic_cas(theirs, 0, 1, "sys", "release") != 0:
                pass
            while atomic_cas(words + thread, 1, 0, "sys", "acquire") != 1:
                pass
        __syncthreads()


@triton.jit
def produce_and_consume(
    data, flag, out, bases, rank: tl.constexpr, BLOCK: tl.constexpr, SEM: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    if rank == 0:
        iris.store(data + at, at, 0, 1, bases)
        tl.debug_barrier()  # orders the tile before the release
        iris.atomic_xchg(flag, 1, 0, 1, bases, sem=SEM, scope="sys")
    else:
        while iris.atomic_cas(flag, 1, 1, 1, 1, bases, sem="acquire", scope="sys") != 1:
            pass
        tl.store(out + at, tl.load(data + at))


def put(fence: bool) -> Callable[[], list[int]]:
    def main() -> list[int]:
        dist.init_process_group("nccl")
        data = stand_in.create_tensor(32, torch.int32).zero_()
        flag = stand_in.create_tensor(1, torch.int64).zero_()
        dist.barrier()
        x, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
        put_and_signal[(1,)](data, flag, x, out, BLOCK=32, FENCE=fence)
        return out.tolist()

    return main


def by_torch(fence: bool) -> Callable[[], list[list[int]]]:
    def main() -> list[list[int]]:
        dist.init_process_group("nccl")
        symm_mem.set_backend("NVSHMEM")
        data, x, out = (symm_mem.empty(n, dtype=torch.int32, device="cuda") for n in (8, 8, 12))
        handle, *_ = (symm_mem.rendezvous(each, dist.group.WORLD) for each in (data, x, out))
        data.zero_()
        x.copy_(torch.arange(8) + 10 * dist.get_rank())
        flag = handle.get_signal_pad(dist.get_rank(), (1,), dtype=torch.int64)
        dist.barrier()
        put_by_torch[(1,)](data, flag, x, 4, FENCE=fence)
        exchange_by_torch[(1,)](out, x, 4)
        return [data.tolist(), out.tolist()]

    return main


def told(meet: bool) -> Callable[[], int]:
    def main() -> int:
        dist.init_process_group("nccl")
        word = stand_in.create_tensor(1, torch.int32).zero_()
        dist.barrier()
        tell_the_next[(1,)](word, MEET=meet)
        return int(word)

    return main


def barrier() -> None:
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    data = stand_in.create_tensors(8, torch.int32, rank, size)
    words = stand_in.create_tensor(size, torch.int32).zero_()
    dist.barrier()
    data[rank].fill_(rank)
    meet[(1,)](words, size)
    peer = (rank + 1) % size
    assert data[peer].tolist() == [peer] * 8


def message(sem: str) -> Callable[[], list[int]]:
    def main() -> list[int]:
        heap = iris.iris(1 << 16)
        data, flag = heap.zeros(32, dtype=torch.int32), heap.zeros(1, dtype=torch.int32)
        out = torch.zeros(32, dtype=torch.int32)
        heap.barrier()
        produce_and_consume[(1,)](
            data, flag, out, heap.get_heap_bases(), rank=heap.get_rank(), BLOCK=32, SEM=sem
        )
        return out.tolist()

    return main
