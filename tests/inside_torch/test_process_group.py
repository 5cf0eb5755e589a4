"""dist.init_process_group("sundog"): c10d, functional collectives, DTensor, FSDP2 and DDP on it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.jobs import job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import sundog.torch.process_group

pytestmark = pytest.mark.sim_only  # names its backend itself, so once is enough
RANKS = 2


def test_collectives() -> None:
    job(call_all, RANKS, "sundog")


def call_all(rank: int, by_gloo: bool = False) -> None:
    x = torch.arange(4.0) + rank
    for op, expected in {
        dist.ReduceOp.SUM: [1.0, 3.0, 5.0, 7.0],
        dist.ReduceOp.MAX: [1.0, 2.0, 3.0, 4.0],
        dist.ReduceOp.AVG: [0.5, 1.5, 2.5, 3.5],
        dist.ReduceOp.PRODUCT: [0.0, 2.0, 6.0, 12.0],
    }.items():
        y = x.clone()
        dist.all_reduce(y, op)
        assert y.tolist() == expected, op
    y = x.clone()
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    assert y.tolist() == [1, 3, 5, 7]
    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, x)
    assert whole.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    parts = [torch.empty(4) for _ in range(RANKS)]
    dist.all_gather(parts, x)
    assert torch.equal(torch.cat(parts), whole)
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, x)
    assert mine.tolist() == [[1, 3], [5, 7]][rank]
    dist.reduce_scatter(mine, list(x.chunk(2)))
    assert mine.tolist() == [[1, 3], [5, 7]][rank]
    y = x.clone()
    dist.broadcast(y, 1)
    assert y.tolist() == [1, 2, 3, 4]
    dist.reduce(y, 0)
    if rank == 0 or not by_gloo:  # gloo uses the others' tensors for its sums
        assert y.tolist() == [[2, 4, 6, 8], [1, 2, 3, 4]][rank]
    gathered = parts if rank == 0 else None
    dist.gather(x, gathered, 0)
    assert rank or torch.equal(torch.cat(parts), whole)
    dist.scatter(mine, list(torch.arange(4.0).chunk(2)) if rank else None, 1)
    assert mine.tolist() == [[0, 1], [2, 3]][rank]
    y = torch.empty(4)
    dist.all_to_all_single(y, x)
    assert y.tolist() == [[0, 1, 1, 2], [2, 3, 3, 4]][rank]
    uneven = torch.empty(2 if rank == 0 else 6)
    dist.all_to_all_single(uneven, x, [1, 1] if rank == 0 else [3, 3], [1, 3])
    assert uneven.tolist() == [[0, 1], [1, 2, 3, 2, 3, 4]][rank]
    outs = [torch.empty(2) for _ in range(RANKS)]
    dist.all_to_all(outs, list(x.chunk(2)))
    assert torch.equal(torch.cat(outs), y)
    objects = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.barrier()


def test_a_sum_of_scaled_tensors() -> None:
    """PREMUL_SUM, of a number or a tensor; FSDP2 asks for it by set_gradient_divide_factor."""

    def main(rank: int) -> None:
        x = torch.arange(4.0) + rank
        for factor in (0.5, torch.tensor([0.5])):
            half = dist.ReduceOp.PREMUL_SUM(factor)
            y, mine = x.clone(), torch.empty(2)
            dist.all_reduce(y, half)
            dist.reduce_scatter_tensor(mine, x, half)
            assert y.tolist() == [0.5, 1.5, 2.5, 3.5]
            assert torch.equal(mine, y.chunk(2)[rank])
        layer = fully_shard(nn.Linear(3, 2, bias=False))
        layer.set_gradient_divide_factor(4)
        layer(torch.full((1, 3), rank + 1.0)).sum().backward()
        assert layer.weight.grad.full_tensor().tolist() == [[0.75] * 3] * 2

    job(main, RANKS, "sundog")


def test_a_result_of_another_dtype_is_refused() -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"elements of torch.float32, .* and torch.float64"):
            dist.all_gather_into_tensor(torch.empty(8, dtype=torch.float64), torch.ones(4))

    job(main, RANKS, "sundog")


def test_coalesced_and_functional_collectives() -> None:
    def main(rank: int) -> None:
        group = dist.group.WORLD
        x = torch.arange(4.0) + rank
        total = functional.all_reduce(x, "sum", group)
        assert total.tolist() == [1, 3, 5, 7]
        assert functional.all_gather_tensor(x, 0, group).shape == (8,)
        assert functional.reduce_scatter_tensor(x, "sum", 0, group).shape == (2,)
        for each in functional.all_reduce_coalesced([x, x + 1], "sum", group):
            assert each.shape == (4,)
        one, other = functional.all_gather_into_tensor_coalesced([x, x[:2]], group)
        assert (one.shape, other.shape) == ((8,), (4,))
        one, other = functional.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 0], group)
        assert one.tolist() == other.tolist() == [[1, 3], [5, 7]][rank]

        def fn(x: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(x * 2, "sum", group) + 1

        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), fn(x))

    job(main, RANKS, "sundog")


def test_what_it_has_no_kernel_for_goes_to_gloo_and_says_so_once(
    capfd: pytest.CaptureFixture,
) -> None:
    def main(rank: int) -> list[int]:
        x = torch.tensor([5, 3][rank])
        for _ in range(2):
            y = x.clone()
            dist.all_reduce(y, dist.ReduceOp.BAND)
        several = [x.clone(), x + 2]
        dist.all_reduce_coalesced(several, dist.ReduceOp.BAND)
        assert several == [1, 5]
        many = functional.all_reduce(x.expand(100_000).contiguous(), "band", dist.group.WORLD)
        assert many.eq(1).all()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        return [y.item(), x.item()]

    assert job(main, RANKS, "sundog") == [[1, 5], [1, 5]]
    lines = [line for line in capfd.readouterr().err.splitlines() if "goes to gloo" in line]
    assert len(lines) == 2
    assert "allreduce goes to gloo: no kernel for BAND of torch.int64" in lines[0]
    assert "send goes to gloo: no kernel for messages with tags" in lines[1]


def test_sparse_tensors_go_to_gloo(capfd: pytest.CaptureFixture) -> None:
    """DDP reduces the sparse gradients of an embedding."""
    job(reduce_sparse, RANKS, "sundog")
    assert capfd.readouterr().err.count("goes to gloo: no kernel for sparse tensors") == 1


def reduce_sparse(rank: int) -> None:
    x = torch.eye(3).to_sparse() * (rank + 1)
    dist.all_reduce(x)
    assert torch.equal(x.to_dense(), torch.eye(3) * 3)
    words = nn.parallel.DistributedDataParallel(nn.Embedding(4, 2, sparse=True))
    words(torch.tensor([rank, 2])).sum().backward()
    found = words.module.weight.grad.to_dense()[:, 0]
    assert found.tolist() == [0.5, 0.5, 1.0, 0.0]  # the average of both ranks


def test_what_the_heap_has_no_room_for_goes_to_gloo(
    capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors have gloo's results; small ones, before and after, the world's kernels."""

    def main(rank: int) -> list[int]:
        counts, large = [], torch.arange(150_000.0) + rank
        calls = dist.group.WORLD.world._plans
        for x in (torch.arange(4.0) + rank, large, large, torch.arange(4.0) + rank):
            before, whole, mine = calls.count, torch.empty(2 * len(x)), torch.empty(len(x) // 2)
            total = x.clone()
            dist.all_reduce(total)
            dist.all_gather_into_tensor(whole, x)
            dist.reduce_scatter_tensor(mine, x)
            start = torch.arange(float(len(x)))
            assert torch.equal(total, 2 * start + 1)
            assert torch.equal(whole, torch.cat([start, start + 1]))
            assert torch.equal(mine, (2 * start + 1).chunk(2)[rank])
            later = functional.all_gather_tensor(x, 0, dist.group.WORLD)
            assert torch.equal(functional.wait_tensor(later), whole)
            several = [x.clone(), torch.ones(3)]
            dist.all_reduce_coalesced(several)
            assert torch.equal(several[0], total)
            assert several[1].tolist() == [2.0] * 3
            counts.append(calls.count - before)
        return counts

    monkeypatch.setenv("SUNDOG_HEAP_SIZE", "1M")
    counts = job(main, RANKS, "sundog")
    assert counts[0] == counts[1]
    assert counts[0][0] == counts[0][3] == 6
    assert counts[0][1] == counts[0][2] < 6
    lines = [line for line in capfd.readouterr().err.splitlines() if "no room" in line]
    assert len(lines) == 1
    assert "goes to gloo: no kernel for what has no room on the heap; SUNDOG_HEAP_SIZE" in lines[0]


@pytest.mark.parametrize("name", ["cuda:sundog,cpu:gloo", "cpu:gloo,cuda:sundog"])
def test_tensors_on_another_device_go_to_gloo(name: str, capfd: pytest.CaptureFixture) -> None:
    """All collectives; the world's device is called cuda here, as it is on a GPU."""

    def main(rank: int) -> int:
        group = dist.group.WORLD
        assert isinstance(group, sundog.torch.process_group.SundogGroup)
        call_all(rank)  # by the world, which is on the CPU where there is no GPU
        group._device_type = "cuda"
        before = group.world._plans.count
        call_all(rank, by_gloo=True)
        return group.world._plans.count - before

    assert job(main, RANKS, name) == [0, 0]
    lines = [line for line in capfd.readouterr().err.splitlines() if "goes to gloo" in line]
    assert [line for line in lines if "tensors on cpu" in line] == [
        "sundog: allreduce goes to gloo: no kernel for tensors on cpu"
    ]


def test_unequal_parts_parameters_and_groups_that_end() -> None:
    def main(rank: int) -> str:
        parts = [torch.empty(1), torch.empty(2)]
        dist.all_gather(parts, torch.full((rank + 1,), float(rank)))
        assert [part.tolist() for part in parts] == [[0.0], [1.0, 1.0]]
        weight = nn.Parameter(torch.full((2,), float(rank)))
        views = weight.chunk(2)
        dist.broadcast(weight, 1)
        assert [view.tolist() for view in views] == [[1.0], [1.0]]
        sum(views).backward()  # as with gloo: autograd takes no note of a collective
        assert weight.grad.tolist() == [1.0, 1.0]
        assert weight.tolist() == [1.0, 1.0]
        pair = dist.new_group([0, 1])
        dist.all_reduce(weight, group=pair)
        assert weight.tolist() == [2.0, 2.0]
        dist.barrier()
        dist.destroy_process_group(pair)
        with pytest.raises(ValueError, match="the result has 4 elements") as error:
            dist.all_gather_into_tensor(torch.empty(3), torch.ones(2))
        return str(error.value)

    said = "the tensor for it has shape (3,) and torch.float32: pass one that holds it"
    assert all(said in text for text in job(main, RANKS, "sundog"))


def test_cuda_tensors_without_a_kernel_go_to_nccl(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """Where each rank has a GPU to itself. A gloo stands for NCCL here, CPU tensors for CUDA's."""

    class Nccl:
        Options = staticmethod(lambda: timedelta(seconds=30))

        def __new__(cls, *given: object) -> object:
            return dist.ProcessGroupGloo(*given)

    def main(rank: int) -> list[int]:
        group = dist.group.WORLD
        group.world.owns_gpu = True
        x = torch.tensor([5, 3][rank]).as_subclass(OnCuda)
        dist.all_reduce(x, dist.ReduceOp.BAND)
        y = torch.tensor(7 + rank).as_subclass(OnCuda)
        if rank == 0:
            dist.send(y, 1)
        else:
            dist.recv(y, 0)
        assert group._nccl is not None
        group.world.owns_gpu = False  # two ranks on one GPU: gloo, through host memory
        z = torch.tensor(8 + rank).as_subclass(OnCuda)
        if rank == 0:
            dist.send(z, 1)
        else:
            dist.recv(z, 0)
        return [int(each) for each in (x, y, z)]

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert job(main, RANKS, "sundog") == [[1, 7, 8], [1, 7, 8]]
    lines = [line for line in capfd.readouterr().err.splitlines() if "goes to" in line]
    assert lines == [
        "sundog: allreduce goes to nccl: no kernel for BAND of torch.int64",
        "sundog: send goes to nccl: no kernel for messages with tags",
    ]


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is CUDA's."""

    is_cuda = True  # type: ignore[assignment]

    def cpu(self, *given: object) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


def test_dtensor() -> None:
    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        torch.manual_seed(0)
        whole = torch.randn(4, 6)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(rows.full_tensor(), whole)
        assert torch.equal(rows.redistribute(placements=[Shard(1)]).full_tensor(), whole)
        assert torch.equal(rows.redistribute(placements=[Replicate()]).to_local(), whole)
        product = rows.t() @ rows  # a partial sum on every rank
        assert product.placements == (Partial(),)
        torch.testing.assert_close(product.full_tensor(), whole.t() @ whole)

    job(main, RANKS, "sundog")


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_data_parallel_training_equals_one_ranks(how: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    def train(net: nn.Module, x: torch.Tensor) -> list[float]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch.manual_seed(1)
    data = torch.randn(8, 4)

    def main(rank: int) -> list[float]:
        net = model()
        if how == "ddp":
            net = nn.parallel.DistributedDataParallel(net)
        else:
            fully_shard(net, mesh=init_device_mesh("cpu", (RANKS,)))
        return train(net, data.chunk(RANKS)[rank])

    found = torch.tensor(job(main, RANKS, "sundog")).mean(0)
    torch.testing.assert_close(found, torch.tensor(train(model(), data)), rtol=1e-4, atol=1e-5)
