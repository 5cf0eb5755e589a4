"""Reduce-scatter: against an exact oracle and against gloo; bad input."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sundog
from sundog import testing
from sundog.collectives.reduce_scatter import Config, Problem, plan
from sundog.errors import RankMismatch
from sundog.ops.load import find
from sundog.tools._subject import exercise

from .gloo import gloo
from .reducing import exact, oracle, random

Run = Callable[..., list]
module = find("reduce_scatter")
SMALL = Config(block=64, programs=2)  # several tiles and programs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_rank_gets_its_slice(run: Run, size: int, symmetric: bool) -> None:
    cases = [
        (0, torch.float32, "sum"),
        (1, torch.int64, "prod"),
        (37, torch.float16, "avg"),
        (131, torch.bfloat16, "sum"),
        (200, torch.uint8, "max"),
        (193, torch.float64, "min"),
        (72, torch.bool, "sum"),
    ]

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for number, (numel, dtype, op) in enumerate(cases):
            x = exact(100 * number + world.rank, size * numel, dtype).to(world.device)
            x = world.as_symmetric(x) if symmetric else x
            found.append(world.reduce_scatter(x, op, config=SMALL).cpu())
        return found

    results = run(main, size)
    for number, (numel, dtype, op) in enumerate(cases):
        parts = [exact(100 * number + rank, size * numel, dtype) for rank in range(size)]
        slices = oracle(op, parts).view(size, numel)
        for rank, result in enumerate(results):
            assert torch.equal(result[number], slices[rank]), (rank, numel, dtype, op)


def test_gloo_gives_the_same(run: Run) -> None:
    size, numel = 3, 517

    def theirs(group: Any) -> list[torch.Tensor]:
        found = []
        for dtype in (torch.int32, torch.float32):
            found.append(torch.empty(numel, dtype=dtype))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a newer name is on its way
                dist.reduce_scatter_tensor(found[-1], random(group.rank, size * numel, dtype))
        return found

    def ours(world: sundog.World) -> list[torch.Tensor]:
        parts = [random(world.rank, size * numel, d) for d in (torch.int32, torch.float32)]
        return [world.reduce_scatter(part.to(world.device)).cpu() for part in parts]

    for mine, torchs in zip(run(ours, size), gloo(theirs, size), strict=True):
        assert torch.equal(mine[0], torchs[0])
        torch.testing.assert_close(mine[1], torchs[1], rtol=1e-6, atol=1e-5)


def test_shapes_out_and_handle(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        x = exact(world.rank, 48, torch.float32).to(world.device).view(6, 8)
        plain = world.reduce_scatter(x)
        out = world.empty((4, 6))
        assert world.reduce_scatter(x, out=out) is out
        later = world.reduce_scatter(x, async_op=True).wait()
        return [each.cpu() for each in (plain, out, later)]

    want = oracle("sum", [exact(rank, 48, torch.float32) for rank in range(2)]).view(2, 24)
    for rank, (plain, out, later) in enumerate(run(main, 2)):
        assert torch.equal(plain, want[rank].view(3, 8))
        assert torch.equal(out, want[rank].view(4, 6))
        assert torch.equal(later, plain)


def test_in_a_group(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        group = world.group([2, 0], heap_size=1 << 18)
        if group is None:
            return None
        return group.reduce_scatter(exact(world.rank, 90, torch.int32).to(world.device)).cpu()

    results = run(main, 3)
    want = oracle("sum", [exact(rank, 90, torch.int32) for rank in (2, 0)]).view(2, 45)
    assert torch.equal(results[2], want[0])
    assert torch.equal(results[0], want[1])


@pytest.mark.sim_only
@pytest.mark.parametrize(
    ("numel", "dtype", "aligned"),
    [
        (8, torch.bfloat16, True),
        (12, torch.bfloat16, False),
        (12, torch.float32, True),
        (3, torch.int8, False),
    ],
)
def test_slices_are_called_aligned_only_where_they_are(
    monkeypatch: pytest.MonkeyPatch, numel: int, dtype: torch.dtype, aligned: bool
) -> None:
    """A wrong hint would crash on a GPU and is nothing to the simulator: look at the hint."""
    told = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **constants: told.append(constants["ALIGNED"])

    def main(world: sundog.World) -> None:
        problem = Problem(numel, dtype, 1)
        plan(world, problem, SMALL)(
            torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
        )

    monkeypatch.setattr(module, "_direct_kernel", Recorder())
    sundog.run(main, 1, backend="sim")
    assert told == [aligned]


@pytest.mark.sim_only
def test_the_checker_finds_nothing() -> None:
    testing.check(exercise(find("reduce_scatter"), 2), 2, schedules=3)


BAD = [
    ({"x": torch.zeros(5)}, r"x of shape \(5,\) does not split into 2 equal slices; pad it to 6"),
    ({"x": torch.zeros(3, 2)}, r"x of shape \(3, 2\) does not split into 2"),
    ({"op": "and"}, "op 'and' is not known"),
    ({"x": torch.zeros(4, dtype=torch.complex64), "op": "max"}, "no reduction of torch.complex64"),
    ({"x": torch.zeros(8), "out": torch.zeros(2, 2).t()}, "out of shape.*not contiguous"),
    ({"out": torch.zeros(4)}, "out has 4 elements of torch.float32, expected 2"),
    ({"config": Config(block=3)}, "block 3 is not a power of two"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input(run: Run, change: dict[str, Any], text: str) -> None:
    def main(world: sundog.World) -> None:
        given = {"x": torch.zeros(4), **change}
        given = {k: v.to(world.device) if torch.is_tensor(v) else v for k, v in given.items()}
        with pytest.raises(ValueError, match=text):
            world.reduce_scatter(**given)

    run(main, 2)


def test_ranks_with_different_shapes_are_named(run: Run) -> None:
    def main(world: sundog.World) -> str:
        with pytest.raises(RankMismatch) as error:
            world.reduce_scatter(torch.zeros(4 + 2 * world.rank, device=world.device))
        return str(error.value)

    for text in run(main, 2):
        assert "rank 0: Problem(numel=2" in text
        assert "rank 1: Problem(numel=3" in text
