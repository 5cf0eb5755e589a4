"""What a world over machines refuses, with the reason; and a network that is slow."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import sundog
from sundog.errors import CaptureError, PeerLost, RankMismatch, SundogError
from sundog.nodes.pipeline import NodesConfig
from tests.support.namespaces import Cluster

pytestmark = pytest.mark.namespaces


def test_refusals_say_why() -> None:
    with Cluster(2, 2, timeout=60) as cluster:
        cluster.start(_refusals)
        results = cluster.results(limit=90)
    assert results == {rank: "all refused" for rank in range(4)}


def _refusals(world: Any) -> str:
    x = world.zeros(8)
    world.local.all_reduce(x, out=x)
    refused = r"transfer between machines by gloo.*With NCCL"
    with pytest.raises(CaptureError, match=refused), world.capture():
        world.all_reduce(x)
    with pytest.raises(CaptureError, match="collective on the host"), world.capture():
        world.barrier()
    _capture_as_with_nccl(world, x)
    with world.capture() as graph:  # what stays inside the machine can be captured
        world.local.all_reduce(x, out=x)
    graph.replay()
    with pytest.raises(ValueError, match="algo 'ring' is not known; there are: auto, hierarchical"):
        world.all_reduce(x, algo="ring")
    with pytest.raises(ValueError, match="does not split into 4 equal parts; pad it to 8"):
        world.reduce_scatter(torch.zeros(7))
    with pytest.raises(ValueError, match="memory is shared inside a machine only"):
        world.peer(x, (world.rank + 2) % 4)
    with pytest.raises(ValueError, match="splits do not span machines yet"):
        world.all_gather(x, splits=[8] * 4)
    with pytest.raises(SundogError, match=r"world.gather does not span machines yet.*world.local"):
        world.gather(x)
    with pytest.raises(RankMismatch, match=r"(?s)different arguments.*rank 3: all_gather, 11"):
        world.all_gather(torch.zeros(10 + (world.rank == 3)))
    with pytest.raises(RankMismatch, match=r"(?s)different arguments.*reduce to rank, 1"):
        world.reduce(x, int(world.rank == 3))
    _look_at_arguments(world)
    _look_at_products(world)
    _look_at_gradients(world)
    _look_at_meshes(world)
    return "all refused"


def _capture_as_with_nccl(world: Any, x: torch.Tensor) -> None:
    """Transfers that are ordered on streams may be in a graph; gloo stands in for NCCL here."""
    between = world._levels.between
    assert (between.backend, between.is_ordered) == ("gloo", False)
    between.is_ordered = True
    world.all_reduce(x)  # ranks agree on a call once, before a capture
    with world.capture():
        assert world.all_reduce(x).shape == x.shape
    assert torch.equal(world.all_gather(torch.ones(3)), torch.ones(12))  # the same calls, eager
    with pytest.raises(CaptureError, match="collective on the host"), world.capture():
        world.barrier()
    between.is_ordered = False


def _look_at_arguments(world: Any) -> None:
    x, one = torch.zeros(8), [1] * 4
    with pytest.raises(ValueError, match=r"out has 8 elements of torch.int32, expected 8 of torch"):
        world.all_reduce(x, out=x.view(torch.int32))
    with pytest.raises(ValueError, match="in_splits 1 must be 4 numbers"):
        world.all_to_all(x, None, 1, one)
    with pytest.raises(ValueError, match=r"in_splits .* add up to 4, but x has 8 rows"):
        world.all_to_all(x, None, one, one)
    for wrong in ({"algo": "nope"}, {"config": 3}):
        with pytest.raises(ValueError, match=r"algo 'nope' is not known|config 3 is not"):
            world.all_to_all(x[:4], None, one, one, **wrong)
    with pytest.raises(ValueError, match=r"reduce: no reduction of torch.complex64 by max"):
        world.reduce(x.to(torch.complex64), 0, "max")
    for op in (world.all_gather_matmul, world.matmul_reduce_scatter, world.matmul_all_reduce):
        with pytest.raises(ValueError, match=f"{op.__name__}: b is a NoneType, expected a tensor"):
            op(torch.ones(4, 4), None)
        with pytest.raises(ValueError, match="a is on the meta device"):
            op(torch.ones(4, 4, device="meta"), torch.ones(4, 4))
        with pytest.raises(ValueError, match=r"a of shape \(4,\): expected two dimensions"):
            op(torch.ones(4), torch.ones(4, 4))


def _look_at_products(world: Any) -> None:
    """Whole numbers: every order of adding gives these bits."""
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(-2, 3, (8, 64), generator=generator).float()
    b = torch.randint(-2, 3, (64, 16), generator=generator).float()
    bias = torch.arange(16.0)
    rows, columns = a.chunk(4)[world.rank], a.chunk(4, dim=1)[world.rank].contiguous()
    assert torch.equal(world.all_gather_matmul(rows, b, bias, shard="m"), a @ b + bias)
    assert torch.equal(world.all_gather_matmul(columns, b, bias, shard="k"), a @ b + bias)
    assert torch.equal(world.all_gather_matmul(columns, b.T.contiguous().T, shard="k"), a @ b)
    part, of_part = columns, b.chunk(4)[world.rank]
    want = (a @ b + bias).chunk(4)[world.rank]
    assert torch.equal(world.matmul_reduce_scatter(part, of_part, bias), want)
    with pytest.raises(ValueError, match="does not split into 4 equal parts; pad it to 8"):
        world.matmul_reduce_scatter(part[:7], of_part)
    assert torch.equal(world.matmul_all_reduce(part, of_part, bias), a @ b + bias)
    rows = world.matmul_all_reduce(part[:5], of_part, bias, config=NodesConfig(400))
    assert torch.equal(rows, (a @ b + bias)[:5]), "which four ranks do not share evenly"


def _look_at_gradients(world: Any) -> None:
    """The loss is the sum of all ranks' losses, each weighted by its rank + 1."""
    mine, ranks = world.rank + 1.0, range(world.size)
    want = {
        "all_reduce": torch.full((8,), 10.0),  # every rank's output has x
        "all_gather": torch.full((8,), 10.0),
        "reduce_scatter": torch.tensor([r + 1.0 for r in ranks for _ in range(2)]),
        "all_to_all": torch.tensor([r + 1.0 for r in ranks for _ in range(2)]),
        "broadcast": torch.full((8,), 10.0 if world.rank == 0 else 0.0),
    }
    for name, gradient in want.items():
        x = torch.arange(8.0, requires_grad=True)
        (mine * getattr(world, name)(x).sum()).backward()
        assert torch.equal(x.grad, gradient), (name, x.grad)
    total = world.reduce(torch.arange(3.0), 2, "sum")
    assert total is None if world.rank != 2 else total.tolist() == [0, 4, 8]
    for shard in ("m", "k"):
        _look_at_gradients_of_products(world, shard)


def _look_at_gradients_of_products(world: Any, shard: str) -> None:
    """Those of one rank that has all of A, with whole numbers; every rank's loss has its weight."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(-2, 3, (8, 64), generator=generator).float()
    b = torch.randint(-2, 3, (64, 16), generator=generator).float()
    bias = torch.arange(16.0)
    weights = torch.randint(-2, 3, (world.size, 8, 16), generator=generator).float()
    mine = a.chunk(world.size, dim="mk".index(shard))[world.rank].contiguous()
    given = [each.clone().requires_grad_() for each in (mine, b, bias)]
    product = world.all_gather_matmul(*given, shard=shard)
    (product * weights[world.rank]).sum().backward()
    of_a = (weights.sum(0) @ b.T).chunk(world.size, dim="mk".index(shard))[world.rank]
    want = of_a, a.T @ weights[world.rank], weights[world.rank].sum(0)
    for name, tensor, gradient in zip(("a", "b", "bias"), given, want, strict=True):
        assert torch.equal(tensor.grad, gradient), (shard, name)
    left = mine.detach().clone().requires_grad_()  # rank r's loss has the weight r + 1
    if shard == "k":
        total = world.matmul_reduce_scatter(left, b.chunk(world.size)[world.rank])
        (total.sum() * (world.rank + 1)).backward()
        weight = torch.arange(1.0, world.size + 1).repeat_interleave(8 // world.size)[:, None]
        of_left = b.chunk(world.size)[world.rank].sum(1)
        assert torch.equal(left.grad, weight * of_left)
        left.grad = None
        total = world.matmul_all_reduce(left, b.chunk(world.size)[world.rank])
        (total.sum() * (world.rank + 1)).backward()
        assert torch.equal(left.grad, (10 * of_left).expand_as(left))


def _look_at_meshes(world: Any) -> None:
    """A world over both dimensions of a mesh, and one over that of a machine."""
    world.close()  # all ranks together are a group that can have one world
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("node", "gpu"))
    with sundog.init("shm", mesh=mesh, dim=("node", "gpu"), timeout=30) as both:
        assert (both.num_nodes, both.size, both.rank) == (2, 4, world.rank)
        assert both.all_reduce(torch.ones(3)).tolist() == [4, 4, 4]
    with sundog.init("shm", mesh=mesh, dim="gpu", timeout=30) as inside:
        assert (inside.num_nodes, inside.size, inside.node) == (1, 2, 0)
    with sundog.init("shm", mesh=mesh, dim="node", timeout=30) as across:
        assert (across.num_nodes, across.local.size) == (2, 1)
        assert across.all_gather(torch.tensor([world.rank])).tolist() == [
            world.local_rank,
            world.local_rank + 2,
        ]
    dist.barrier()  # rank 0 ends last: its process has the store through which others open worlds


def test_a_slow_network_is_waited_for_or_named() -> None:
    """A relay carries every packet after a delay; then it stops, and no process has died."""
    with Cluster(2, 1, relay=True, timeout=12) as cluster:
        cluster.start(_work_slowly)
        cluster.relay.start(delay=0.02)
        cluster.wait_until_told()
        cluster.relay.stop()
        results = cluster.results(limit=60)
    for rank, (fast_enough, text) in results.items():
        assert fast_enough == "waited", rank
        other = 1 - rank
        assert f"machine {other} (machine{other}) does not answer" in text, text


def test_reset_connections_are_named_and_no_rank_is_blamed() -> None:
    with Cluster(2, 1, relay=True, timeout=12) as cluster:
        cluster.start(_work_slowly)
        cluster.relay.start(delay=0.02)
        cluster.wait_until_told()
        cluster.relay.start(delay=0, resets=True)
        results = cluster.results(limit=60)
    texts = {rank: text for rank, (_, text) in results.items()}
    answered = "All ranks answer and are there too: the network"
    assert any(answered in text for text in texts.values()), texts
    for rank, text in texts.items():
        assert "died" not in text, text
        assert "does not answer" not in text, text
        assert f"rank {rank} (machine {rank}" in text, text


def _work_slowly(world: Any) -> tuple[str, str]:
    x = torch.arange(3000.0)
    begin = time.monotonic()
    assert torch.equal(world.all_reduce(x, config=NodesConfig(4000)), 2 * x)
    seconds = time.monotonic() - begin
    world.barrier()
    Cluster.tell()
    try:
        while True:
            world.all_reduce(x)
    except PeerLost as error:
        return "waited" if seconds > 0.02 else "too fast for this network", str(error)
