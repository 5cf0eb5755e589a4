"""GEMM + all-gather: both algorithms against torch in float64, and the same bits from both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import sundog
from sundog.fused import matmul_all_gather as push
from sundog.fused._matmul_reduce import Config
from sundog.ops.load import algorithms
from sundog.tools._subject import expected
from sundog.tools.check.mutation import find_mutants, mutate

Run = Callable[..., list]
ALGOS = tuple(set(algorithms("matmul_all_gather")) - {"cublas"})  # it has no tiles: test_cublas.py
SMALL = Config(tile_m=16, tile_n=16, tile_k=16, num_warps=4, programs=2)


def matrix(seed: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


CASES: list[tuple[int, int, int, torch.dtype, dict[str, Any]]] = [
    (1, 1, 1, torch.float32, {}),
    (17, 21, 19, torch.bfloat16, {"activation": "silu"}),
    (24, 32, 16, torch.float16, {"out_dtype": torch.float32}),
    (5, 40, 33, torch.float32, {"bias": True}),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_algorithm_against_float64(run: Run, size: int) -> None:
    cases = CASES if size < 8 else CASES[1:2]

    def given(rank: int, case: int) -> list[torch.Tensor]:
        m, n, k, dtype, more = cases[case]
        made = [matrix(10 * case + rank, m, k, dtype), matrix(99 + rank, k, n, dtype)]
        return made + ([matrix(77 + rank, 1, n, dtype)[0]] if "bias" in more else [])

    def main(world: sundog.World) -> list[list[torch.Tensor]]:
        found = []
        for case, (*_, more) in enumerate(cases):
            tensors = [each.to(world.device) for each in given(world.rank, case)]
            more = {name: value for name, value in more.items() if name != "bias"}
            outs = [
                world.matmul_all_gather(*tensors, **more, algo=algo, config=SMALL).cpu()
                for algo in ALGOS
            ]
            found.append(outs)
        return found

    for result in run(main, size):
        for case, (m, n, _, dtype, more) in enumerate(cases):
            parts = []
            for rank in range(size):
                a, b, *bias = (each.double() for each in given(rank, case))
                part = a @ b + (bias[0] if bias else 0)
                parts.append(torch.nn.functional.silu(part) if "activation" in more else part)
            kind = more.get("out_dtype", dtype)
            bound = 4 * torch.finfo(kind).eps if kind != torch.float32 else 1e-5
            for out in result[case]:
                assert out.shape == (size * m, n)
                assert out.dtype == kind
                torch.testing.assert_close(out.double(), torch.cat(parts), rtol=bound, atol=bound)
                assert torch.equal(out, result[case][0])


def test_layouts_and_outputs(run: Run) -> None:
    """A and B transposed; into a tensor on the heap, and an ordinary one with other strides."""

    def main(world: sundog.World) -> None:
        a, b = (matrix(n + world.rank, 20, 20, torch.float16).to(world.device) for n in (1, 50))
        for algo in ALGOS:
            wanted = world.matmul_all_gather(a, b, algo=algo, config=SMALL)
            turned = world.matmul_all_gather(
                a.T.contiguous().T, b.T.contiguous().T, algo=algo, config=SMALL
            )
            on_heap = world.empty((40, 20), torch.float16)
            strided = torch.empty(20, 40, dtype=torch.float16, device=world.device).T
            for out in (on_heap, strided):
                assert world.matmul_all_gather(a, b, out=out, algo=algo, config=SMALL) is out
                assert torch.equal(out, wanted)
            assert torch.equal(turned, wanted)

    run(main, 2)


def test_replays_of_a_graph(run: Run) -> None:
    def main(world: sundog.World) -> list[bool]:
        a, b = world.zeros((6, 8)), torch.eye(8, device=world.device)
        world.matmul_all_gather(a, b, config=SMALL, algo="push")
        with world.capture() as graph:
            out = world.matmul_all_gather(a, b, config=SMALL, algo="push")
        found = []
        for seed in range(3):
            a.copy_(matrix(seed + 10 * world.rank, 6, 8, torch.float32))
            graph.replay()
            parts = [matrix(seed + 10 * rank, 6, 8, torch.float32) for rank in range(2)]
            found.append(torch.equal(out.cpu(), torch.cat(parts)))
        graph.free()
        return found

    assert run(main, 2) == [[True] * 3] * 2


A = torch.zeros(4, 4)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"a": torch.zeros(4)}, r"a of shape \(4,\): expected two dimensions"),
    ({"b": torch.zeros(3, 4)}, r"b has shape \(3, 4\), expected 4 rows"),
    ({"bias": torch.zeros(3)}, r"bias has shape \(3,\)"),
    ({"activation": "relu"}, "activation 'relu'"),
    ({"out": torch.zeros(4, 4)}, r"out is \(4, 4\) of torch.float32, expected \(8, 4\)"),
    ({"algo": "pull"}, "there are: auto, push, barrier"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input(run: Run, change: dict[str, Any], text: str) -> None:
    def main(world: sundog.World) -> None:
        given = {"a": A, "b": torch.zeros(4, 4), **change}
        moved = {k: v.to(world.device) if torch.is_tensor(v) else v for k, v in given.items()}
        with pytest.raises(ValueError, match=text):
            world.matmul_all_gather(**moved)

    run(main, 2)


@pytest.mark.sim_only
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_the_checker_finds_nothing_and_kills_every_mutant(size: int) -> None:
    """An output is used again after it was read: a store that comes too early would be a race."""
    problem = push.Problem(20, 16, 16, torch.float16, size)

    def main(world: sundog.World) -> None:
        plan = push.plan(world, problem, replace(SMALL, programs=1))
        given = [push.inputs(world, problem, seed) for seed in range(2)]
        wanted = [expected(world, push, problem, each) for each in given]
        out = world.empty(wanted[0].shape, wanted[0].dtype, "out")
        for each, want in zip(given, wanted, strict=True):
            plan(*each, out)
            assert torch.equal(out, want)

    found, report = find_mutants(main, size)
    assert report.findings == [], report
    mine = [mutant for mutant in found if "fused/matmul_all_gather" in mutant.where]
    assert len(mine) > 1
    survived = [o for o in mutate(main, size, mine, schedules=10) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)
