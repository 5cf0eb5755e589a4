"""Reduce: the result on one rank, nothing on the others; against an exact oracle and gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sundog
from sundog import testing
from sundog.collectives.reduce import Config
from sundog.errors import RankMismatch
from sundog.ops.load import find
from sundog.tools._subject import exercise

from .gloo import gloo
from .reducing import exact, oracle, random

Run = Callable[..., list]
SMALL = Config(block=64, programs=2)  # several tiles and programs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_only_dst_gets_the_result(run: Run, size: int) -> None:
    cases = [
        (0, torch.float32, "sum"),
        (1, torch.int64, "prod"),
        (131, torch.bfloat16, "avg"),
        (200, torch.float16, "min"),
    ]

    def main(world: sundog.World) -> list[torch.Tensor | None]:
        found = []
        for number, (numel, dtype, op) in enumerate(cases):
            x = exact(100 * number + world.rank, numel, dtype).to(world.device)
            x = world.as_symmetric(x) if number % 2 else x
            out = world.reduce(x, number % size, op, config=SMALL)
            found.append(None if out is None else out.cpu())
        return found

    results = run(main, size)
    for number, (numel, dtype, op) in enumerate(cases):
        want = oracle(op, [exact(100 * number + rank, numel, dtype) for rank in range(size)])
        for rank, result in enumerate(results):
            if rank == number % size:
                assert torch.equal(result[number], want), (numel, dtype, op)
            else:
                assert result[number] is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
def test_out_and_handle(run: Run, symmetric: bool, async_op: bool) -> None:
    """Only dst has an out, on the heap or not: the others plan the same."""

    def main(world: sundog.World) -> Any:
        outs = world.zeros((2, 15)) if symmetric else torch.zeros((2, 15), device=world.device)
        out = outs if world.rank == 1 else None
        for _ in range(2):
            x = exact(world.rank, 30, torch.float32).to(world.device)
            got = world.reduce(x, 1, out=out, async_op=async_op)
            got = got.wait() if async_op else got
            assert got is out
        return outs.cpu()

    want = oracle("sum", [exact(rank, 30, torch.float32) for rank in range(3)]).view(2, 15)
    for rank, out in enumerate(run(main, 3)):
        assert torch.equal(out, want if rank == 1 else torch.zeros(2, 15))


def test_gloo_gives_the_same(run: Run) -> None:
    def theirs(group: Any) -> torch.Tensor:
        part = random(group.rank, 517, torch.int32)
        dist.reduce(part, 2, dist.ReduceOp.SUM)
        return part

    def ours(world: sundog.World) -> Any:
        out = world.reduce(random(world.rank, 517, torch.int32).to(world.device), 2)
        return None if out is None else out.cpu()

    assert torch.equal(run(ours, 3)[2], gloo(theirs, 3)[2])


def test_in_a_group(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        group = world.group([2, 0], heap_size=1 << 18)
        if group is None:
            return None
        out = group.reduce(exact(world.rank, 90, torch.int32).to(world.device), 1)
        return None if out is None else out.cpu()

    results = run(main, 3)
    want = oracle("sum", [exact(rank, 90, torch.int32) for rank in (2, 0)])
    assert torch.equal(results[0], want)  # rank 1 of the group
    assert results[1:] == [None, None]


@pytest.mark.sim_only
def test_the_checker_finds_nothing() -> None:
    testing.check(exercise(find("reduce"), 2), 2, schedules=3)


BAD = [
    ({"dst": 2}, r"rank 2 is outside this world of 2 ranks \(0 to 1\)"),
    ({"dst": -1}, "rank -1 is outside this world"),
    ({"op": "and"}, "op 'and' is not known"),
    ({"x": torch.zeros(4, dtype=torch.complex64), "op": "max"}, "no reduction of torch.complex64"),
    ({"x": None}, "x is a NoneType, expected a tensor"),
    ({"config": Config(block=3)}, "block 3 is not a power of two"),
    ({"config": Config(block=1 << 21)}, "block 2097152 is not a power of two from 1 to 1048576"),
    ({"config": Config(num_warps=3)}, "num_warps 3 is not a power of two"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input(run: Run, change: dict[str, Any], text: str) -> None:
    def main(world: sundog.World) -> None:
        given = {"x": torch.zeros(4), "dst": 0, **change}
        given = {k: v.to(world.device) if torch.is_tensor(v) else v for k, v in given.items()}
        with pytest.raises(ValueError, match=text):
            world.reduce(**given)

    run(main, 2)


def test_ranks_that_name_different_destinations(run: Run) -> None:
    def main(world: sundog.World) -> str:
        with pytest.raises(RankMismatch) as error:
            world.reduce(torch.zeros(4, device=world.device), world.rank)
        return str(error.value)

    for text in run(main, 2):
        assert "dst=0" in text
        assert "dst=1" in text
