"""Collectives over machines that are namespaces, against gloo's over the same ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from sundog.collectives._reduce import reference
from sundog.nodes.pipeline import NodesConfig
from tests.support.namespaces import Cluster, sent_bytes

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


_NUMEL, _FEW = 6 * 16_000, 6 * 200


def test_the_network_carries_no_byte_twice() -> None:
    """By the interfaces' counters: at most 1.1 times the minimum, and less than flat gloo."""
    nbytes, nodes, ranks = _NUMEL * 4, 3, 2
    with Cluster(nodes, ranks, timeout=60) as cluster:
        cluster.start(_count_bytes)
        results = cluster.results(limit=90)
    assert all(isinstance(each, dict) for each in results.values()), results
    counted = [results[node * ranks] for node in range(nodes)]  # the first rank of each machine
    least = {  # of all machines together
        "all_reduce": nodes * 2 * (nodes - 1) / nodes * nbytes,
        "reduce_scatter": nodes * (nodes - 1) / nodes * nbytes,
        "all_gather": nodes * (nodes - 1) * ranks * nbytes,
        "all_to_all": nodes * ranks * (nodes - 1) / nodes * nbytes,
        "all_to_all, small": ranks * (nodes - 1) * 4 * _FEW,
        "broadcast": (nodes - 1) * nbytes,
    }
    for op, minimum in least.items():
        # Of three calls that with the fewest: on a busy machine TCP sends some bytes again.
        ours, flat = (
            min(map(sum, zip(*(each[op][side] for each in counted), strict=True)))
            for side in (0, 1)
        )
        print(f"{op}: {ours:,} bytes, {ours / minimum:.3f} of the minimum, flat gloo {flat:,}")
        if op == "all_to_all, small":  # fewer and larger messages: fewer headers
            assert ours < flat, (ours, flat)
            continue
        # What barriers send was taken off, and differs by some hundred bytes.
        assert 0.99 * minimum <= ours <= 1.1 * minimum, (op, ours, minimum)
        if op != "all_to_all":  # each byte is for one rank: of a large one both send about as much
            assert ours < flat, (op, ours, flat)


def _count_bytes(world: Any) -> dict[str, tuple[list[int], list[int]]]:
    x = torch.randint(-9, 10, (_NUMEL,)).float()
    many = [torch.empty_like(x) for _ in range(world.size)]
    one, same, few = torch.empty(_NUMEL // world.size), torch.empty_like(x), x[:_FEW].clone()
    two_shots = NodesConfig(one_shot=False)
    calls = {
        "all_reduce": (
            lambda: world.all_reduce(x, config=two_shots),
            lambda: dist.all_reduce(same.copy_(x)),
        ),
        "reduce_scatter": (
            lambda: world.reduce_scatter(x),
            lambda: dist.reduce_scatter(one, list(x.chunk(world.size))),
        ),
        "all_gather": (lambda: world.all_gather(x), lambda: dist.all_gather(many, x)),
        "all_to_all": (lambda: world.all_to_all(x), lambda: dist.all_to_all_single(same, x)),
        "all_to_all, small": (
            lambda: world.all_to_all(few),
            lambda: dist.all_to_all_single(same[:_FEW], few),
        ),
        "broadcast": (lambda: world.broadcast(x, 1), lambda: dist.broadcast(same, 1)),
    }
    return {op: (_sent_by(world, a), _sent_by(world, b)) for op, (a, b) in calls.items()}


def _sent_by(world: Any, call: Any) -> list[int]:
    """Bytes that this machine sent for each of three calls, after one that makes plans."""
    call()
    idle = min(_counted(world, lambda: None) for _ in range(2))
    return [_counted(world, call) - idle for _ in range(3)]


def _counted(world: Any, call: Any) -> int:
    world.barrier()
    before = sent_bytes()
    world.barrier()  # all ranks of this machine have read the counter
    call()
    world.barrier()
    after = sent_bytes()
    world.barrier()
    return after - before
