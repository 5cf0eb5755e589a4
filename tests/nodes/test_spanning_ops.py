"""Collectives over machines that are namespaces, against gloo's over the same ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.nodes_bytes import count, least_bytes, together
from sundog.collectives._reduce import reference
from sundog.nodes.pipeline import NodesConfig
from tests.support.namespaces import Cluster

pytestmark = pytest.mark.namespaces

SMALL = NodesConfig(chunk_bytes=800)  # several chunks, the last one shorter


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 4), (3, 2), (4, 2)])
def test_ops_give_what_gloo_gives(nodes: int, ranks: int) -> None:
    """Moves bit by bit on random data; reductions on whole numbers, which no order rounds."""
    with Cluster(nodes, ranks, timeout=60) as cluster:
        cluster.start(_compare_with_gloo)
        results = cluster.results(limit=90)
    assert results == {rank: "same" for rank in range(nodes * ranks)}


def _compare_with_gloo(world: Any) -> str:
    assert (world.node, world.local_rank) == divmod(world.rank, world.local.size)
    assert world.num_nodes * world.local.size == world.size == dist.get_world_size()
    torch.manual_seed(world.rank)
    _compare_moves(world)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        _compare_sums(world, dtype)
    _compare_operators(world)
    _compare_strided(world)
    assert world.exchange(world.rank * 3) == [3 * rank for rank in range(world.size)]
    assert world.broadcast_object(f"from {world.rank}", 1) == "from 1"
    for empty in (torch.empty(0), torch.empty(0, 3)):
        assert world.all_reduce(empty).shape == empty.shape
    world.barrier()
    return "same"


def _compare_moves(world: Any) -> None:
    x = torch.randn(307)
    want = [torch.empty_like(x) for _ in range(world.size)]
    dist.all_gather(want, x)
    for config in (None, SMALL):
        assert torch.equal(world.all_gather(x, config=config), torch.cat(want))
        for src in (0, world.size - 1):
            assert torch.equal(world.broadcast(x, src, config=config), want[src])
    parts = torch.randn(world.size, 41)
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts)
    assert torch.equal(world.all_to_all(parts, config=SMALL), got)
    handle = world.all_to_all(parts, async_op=True)
    assert torch.equal(handle.wait(), got)
    sent = [(world.rank + 2 * to) % 4 for to in range(world.size)]
    due = [(of + 2 * world.rank) % 4 for of in range(world.size)]
    uneven, got = torch.randn(sum(sent), 3), torch.empty(sum(due), 3)
    dist.all_to_all_single(got, uneven, due, sent)
    assert torch.equal(world.all_to_all(uneven, None, sent, due), got)


def _compare_sums(world: Any, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 10, (world.size, 33)).to(dtype)
    wide = x.to(torch.int64)
    dist.all_reduce(wide)
    several = (None, SMALL, NodesConfig(700, one_shot=True)) if dtype == torch.float32 else (None,)
    for algo in ("hierarchical", "chain"):
        for config in several:
            assert torch.equal(world.all_reduce(x, algo=algo, config=config), wide.to(dtype)), algo
        part = world.reduce_scatter(x, algo=algo)
        assert torch.equal(part.view(-1), wide[world.rank].to(dtype)), algo
    mode = None if dtype.is_floating_point else "trunc"
    mean = torch.div(
        wide.to(torch.float32 if mode is None else torch.int64), world.size, rounding_mode=mode
    )
    assert torch.equal(world.all_reduce(x, "avg"), mean.to(dtype))


def _compare_operators(world: Any) -> None:
    x = torch.randint(-9, 10, (101,)).float()
    for op, kind in (("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
        want = x.clone()
        dist.all_reduce(want, kind)
        assert torch.equal(world.all_reduce(x, op), want), op
    world.all_reduce(x, "min", out=x)  # in place
    assert torch.equal(x, want)


def _compare_strided(world: Any) -> None:
    """A strided input has the result of its contiguous copy, as on one machine."""
    x = torch.randint(-9, 10, (33, world.size)).float().t()
    plain = x.contiguous()
    calls = {
        "all_reduce": world.all_reduce,
        "reduce_scatter": world.reduce_scatter,
        "all_gather": world.all_gather,
        "all_to_all": world.all_to_all,
        "broadcast": world.broadcast,
    }
    for name, call in calls.items():
        assert torch.equal(call(x), call(plain)), name
    assert torch.equal(world.all_reduce(x, async_op=True).wait(), world.all_reduce(plain))
    out = torch.empty(33, world.size).t()
    for name in ("all_reduce", "all_to_all", "broadcast"):
        with pytest.raises(ValueError, match=r"out of shape .* not contiguous"):
            calls[name](plain, out=out)


def test_bits_depend_on_machines_and_ranks_alone() -> None:
    """`chain` has the bits of one machine with as many ranks, `hierarchical` no config's own."""
    with Cluster(3, 2, timeout=60) as cluster:
        cluster.start(_look_at_bits)
        results = cluster.results(limit=90)
    assert set(results.values()) == {("equal", "another order rounds differently")}


def _look_at_bits(world: Any) -> tuple[str, str]:
    torch.manual_seed(7)
    inputs = [torch.randn(world.size * 67) * 10.0 ** (rank % 5) for rank in range(world.size)]
    differs = False
    for dtype in (torch.float32, torch.bfloat16):
        parts = [each.to(dtype) for each in inputs]
        x, flat = parts[world.rank], reference("sum", parts)
        assert torch.equal(world.all_reduce(x, algo="chain", config=SMALL), flat)
        assert torch.equal(world.all_reduce(x, "avg", algo="chain"), reference("avg", parts))
        mine = world.reduce_scatter(x, algo="chain", config=SMALL)
        assert torch.equal(mine, flat.view(world.size, -1)[world.rank])
        sums = [reference("sum", parts[n * 2 : n * 2 + 2]) for n in range(3)]
        for config in (None, SMALL, NodesConfig(one_shot=True), NodesConfig(900, one_shot=True)):
            assert torch.equal(world.all_reduce(x, config=config), reference("sum", sums))
        differs |= not torch.equal(reference("sum", sums), flat)
    return "equal", "another order rounds differently" if differs else "no difference seen"


_MUCH, _LITTLE = 384_000, 24_000  # bytes of a rank


def test_the_network_carries_no_byte_twice() -> None:
    """By the interfaces' counters: at most 1.1 times the minimum, and less than flat gloo."""
    nodes, ranks = 3, 2
    with Cluster(nodes, ranks, timeout=60) as cluster:
        cluster.start(partial(count, sizes=(_MUCH, _LITTLE), calls=2))
        results = cluster.results(limit=110)
    for (op, nbytes), (ours, flat) in together(results, nodes, ranks).items():
        least = least_bytes(op, nbytes, nodes, ranks)
        print(f"{op}, {nbytes:,}: {ours / least:.3f} of the minimum, flat gloo {flat / least:.3f}")
        if (op, nbytes) != ("all_to_all", _MUCH):  # whose every byte is for one rank
            assert ours < flat, (op, nbytes, ours, flat)
        # What barriers send was taken off, and differs by some hundred bytes.
        assert 0.99 * least <= ours <= 1.1 * least, (op, nbytes, ours, least)


def test_calls_take_what_those_of_one_machine_take() -> None:
    with Cluster(2, 2, timeout=60) as cluster:
        cluster.start(_arguments)
        results = cluster.results(limit=90)
    assert results == {rank: "taken" for rank in range(4)}


def _arguments(world: Any) -> str:
    """Values of ReduceOp, complex numbers, views, numbers of numpy, more than two dimensions."""
    size, rank, x = world.size, world.rank, torch.arange(8.0)
    for op, factor in ((dist.ReduceOp.SUM, size), (dist.ReduceOp.AVG, 1)):
        for given in (x, torch.complex(x, x + 1)):
            total = given * factor
            assert torch.equal(world.all_reduce(given, op), total)
            assert torch.equal(world.reduce_scatter(given, op), total.chunk(size)[rank])
            kept = world.reduce(given, np.int64(1), op, out="none" if rank != 1 else None)
            assert kept is None if rank != 1 else torch.equal(kept, total)
    assert world.all_reduce(torch.tensor(1j)).item() == 4j
    mine = torch.full((2, 3), float(rank))
    assert (world.broadcast(mine, torch.tensor(2), mine.view(6)) == 2).all()
    splits = [np.int8(2)] * size
    assert torch.equal(world.all_to_all(x, None, splits, splits), x.chunk(size)[rank].repeat(size))
    a, b = torch.ones(4, 3, 2), torch.ones(2, 5)
    assert world.all_gather_matmul(a, torch.ones(8, 5)).shape == (4, 3, 5)
    assert world.all_gather_matmul(a, b, shard="m").shape == (16, 3, 5)
    assert torch.equal(world.matmul_reduce_scatter(a, b), torch.full((1, 3, 5), 8.0))
    assert torch.equal(world.matmul_all_reduce(a, b), torch.full((4, 3, 5), 8.0))
    return "taken"
