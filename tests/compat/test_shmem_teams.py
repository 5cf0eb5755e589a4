"""Collectives of a team: what arrives, and what they say nothing about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import sundog
from sundog.compat.rank import as_rank
from sundog.errors import CannotInterpret
from sundog.tools.check.schedules import check

from .device_libraries import nvshmem, shmem, stand_in

TYPES = (torch.int32, torch.int8, torch.float32, torch.bfloat16, torch.float64)
REDUCED = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "max": lambda parts: torch.stack(parts).amax(0),
    "min": lambda parts: torch.stack(parts).amin(0),
    "prod": lambda parts: torch.stack(parts).prod(0, dtype=parts[0].dtype),
}


@nvshmem.requires_nvshmem
@triton.jit
def reduce_all(out, x, n, HOW: tl.constexpr):
    nvshmem.reduce(0, out, x, n, HOW)


def numbers(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(n) + 2 * rank) % 5 - 2).to(dtype)


def reduced(n: int, dtype: torch.dtype, how: str, in_place: bool) -> Callable[[], None]:
    def main() -> None:
        dist.init_process_group("nccl")
        symm_mem.set_backend("NVSHMEM")
        x, out = (symm_mem.empty(max(n, 1), dtype=dtype, device="cuda") for _ in range(2))
        for each in (x, out):
            symm_mem.rendezvous(each, dist.group.WORLD)
        x[:n] = numbers(dist.get_rank(), n, dtype)
        dist.barrier()
        reduce_all[(1,)](x if in_place else out, x, n, HOW=how)
        parts = [numbers(rank, n, dtype) for rank in range(dist.get_world_size())]
        assert torch.equal((x if in_place else out)[:n], REDUCED[how](parts))

    return main


@pytest.mark.parametrize("how", REDUCED)
@pytest.mark.parametrize("dtype", TYPES)
def test_reduce_of_torch(dtype: torch.dtype, how: str) -> None:
    for size, n, in_place in ((1, 3, False), (2, 37, True), (3, 0, False), (4, 64, False)):
        sundog.run(reduced(n, dtype, how, in_place), size, "sim", torch=True)


@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_is_clean_in_every_order(in_place: bool) -> None:
    report = check(as_rank(reduced(5, torch.int32, "sum", in_place)), 3, schedules=6, seed=1)
    assert not report.findings, report


@triton.jit
def collect(out, x, n, TEAM: tl.constexpr):
    size = shmem.team_n_pes(TEAM)
    shmem.fcollect_block(TEAM, out, x, n)
    shmem.broadcastmem_block(TEAM, out + size * n, x, n * 4, size - 1)
    shmem.team_sync_block(TEAM)
    place = out + (size + 1) * n
    tl.store(place, shmem.team_my_pe(TEAM))
    tl.store(place + 1, shmem.team_translate_pe(TEAM, size - 1, 0))
    tl.store(place + 2, shmem.team_translate_pe(TEAM, size, 0))


def collected(team: int, n: int = 3) -> Callable[[], list[int]]:
    def main() -> list[int]:
        dist.init_process_group("nccl")
        rank, size = dist.get_rank(), dist.get_world_size()
        x = stand_in.create_tensor(max(n, 1), torch.int32)
        out = stand_in.create_tensor((size + 1) * n + 3, torch.int32).zero_()
        x.copy_(torch.arange(max(n, 1)) + 10 * rank)
        dist.barrier()
        collect[(1,)](out, x, n, TEAM=team)
        return out.tolist()

    return main


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collect_and_broadcast(size: int, n: int) -> None:
    parts = [at + 10 * rank for rank in [*range(size), size - 1] for at in range(n)]
    for team in (0, 2):
        found = sundog.run(collected(team, n), size, "sim", torch=True)
        assert found == [[*parts, rank, size - 1, -1] for rank in range(size)]
    report = check(as_rank(collected(0, n)), size, schedules=4, seed=1)
    assert not report.findings, report


def test_a_team_that_is_not_known() -> None:
    with pytest.raises(CannotInterpret, match="team 7: only the teams of all ranks"):
        sundog.run(collected(7), 2, "sim", torch=True)


@triton.jit
def put_before(data, x, LATE: tl.constexpr):
    """Rank 0 puts; the team meets; rank 1 reads what was put."""
    if shmem.my_pe() == 0:
        shmem.putmem_block(data, x, 4, 1)
        if not LATE:
            shmem.quiet()
    shmem.fcollect_block(0, data + 2, x, 1)
    if shmem.my_pe() == 1:
        tl.store(x + 1, tl.load(data))


def before(late: bool) -> Callable[[], int]:
    def main() -> int:
        dist.init_process_group("nccl")
        x = stand_in.create_tensor(2, torch.int32).fill_(7)
        data = stand_in.create_tensor(4, torch.int32).zero_()
        dist.barrier()
        put_before[(1,)](data, x, LATE=late)
        return int(x[1])

    return main


@pytest.mark.parametrize("late", [False, True])
def test_a_collective_completes_no_earlier_put(late: bool) -> None:
    report = check(as_rank(before(late)), 2, schedules=6, seed=1)
    assert bool(report.findings) is late, report
