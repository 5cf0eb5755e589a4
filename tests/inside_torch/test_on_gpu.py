"""The process group, DTensor and the symm_mem ops of CUDA tensors; debugged here on CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.jobs import job
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import sundog
import sundog.torch.process_group
from sundog.torch.symm_mem import world_of_group

NAME = "cuda:sundog,cpu:gloo"


def use_group(rank: int, size: int, device: str) -> None:
    """Collectives of the device's tensors and of the CPU's, DTensor, the fused ops.

    In a group beside the default one, which the ranks of `symm` have already.
    """
    group = dist.new_group(list(range(size)), timedelta(seconds=30), backend=NAME)
    for where in (device, "cpu"):
        x = torch.arange(4.0, device=where) + rank
        dist.all_reduce(x, group=group)
        assert x.tolist() == [size * n + size * (size - 1) / 2 for n in range(4)]
        whole = torch.empty(2 * size, device=where)
        mine = torch.full((2,), float(rank), device=where)
        dist.all_gather_into_tensor(whole, mine, group=group)
        assert whole.tolist() == [float(r) for r in range(size) for _ in range(2)]
    mesh = DeviceMesh.from_group(group, device)
    full = torch.arange(4.0 * size, device=device).view(2 * size, 2)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(rows.redistribute(placements=[Shard(1)]).full_tensor(), full)
    with sundog.torch.enable(cuda=device == "cuda", explain=True):
        use_fused(rank, size, device, group.group_name)
        assert world_of_group(group.group_name, device == "cuda") is group.world
    dist.barrier(group)
    dist.destroy_process_group(group)


def use_fused(rank: int, size: int, device: str, group: str) -> None:
    ones = torch.ones(4, device=device)
    total = torch.ops.symm_mem.one_shot_all_reduce(ones, "sum", group)
    assert torch.equal(total, size * ones)
    a = torch.full((16, 16), float(rank), device=device, dtype=torch.bfloat16)
    b = torch.eye(16, device=device, dtype=torch.bfloat16)
    gathered, (product,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group)
    assert torch.equal(gathered, product)
    assert gathered[:, 0].tolist() == [float(r) for r in range(size) for _ in range(16)]


@pytest.mark.gpu("symm")
def test_a_group_of_two_devices(ranks: Any, capfd: pytest.CaptureFixture) -> None:
    """`enable(cuda=True)` puts sundog's kernels in place of torch's, and says which ran."""
    use_group(ranks._rank, ranks._size, "cuda")
    said = capfd.readouterr().err
    assert "symm_mem.one_shot_all_reduce of [(4,)]: sundog's CUDA kernel" in said
    assert "symm_mem.fused_all_gather_matmul of [(16, 16)]: sundog's CUDA kernel" in said


@pytest.mark.sim_only
def test_the_same_on_a_cpu(capfd: pytest.CaptureFixture) -> None:
    job(lambda rank: use_group(rank, 2, "cpu"), 2)
    said = capfd.readouterr().err
    assert "symm_mem.one_shot_all_reduce of [(4,)]: sundog's CPU kernel" in said


@pytest.mark.gpu("symm")
def test_torchs_graph_outlives_the_cache_of_plans(run: Callable[..., list]) -> None:
    """torch.cuda.graph holds a call whose plan would be evicted; the replay still gives the sum."""

    def main(world: sundog.World) -> None:
        x, out = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
        for _ in range(3):
            world.all_reduce(x, out=out)
        world.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            world.all_reduce(x, out=out)
        world.max_plans = 1
        for length in range(65, 70):
            world.all_reduce(torch.ones(length, device="cuda"))
        world.free_plans()
        x.fill_(3)
        world.barrier()
        graph.replay()
        world.synchronize()
        assert out.tolist() == [3.0 * world.size] * 64

    run(main, 2)
