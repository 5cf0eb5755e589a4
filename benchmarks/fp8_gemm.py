"""`python -m benchmarks gemm --fp8`: the FP8 product of the ops scaled_*, next to torch._scaled_mm.

Both use all SMs of one GPU, with normally distributed numbers rounded to float8_e4m3fn, and add
alike: all products with few digits (`fast`), or 128 at a time (`exact`). Outputs are compared
before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sundog import target
from sundog.fused import _scaled
from sundog.launch import run as run_ranks
from sundog.ops.op import Cost
from sundog.tools.bench import bench_command, limits
from sundog.tools.bench.run import Row
from sundog.tools.timing import Variant, measure
from sundog.world.world import World

from .gemm import SHAPES, Shape
from .result_files import machine, write

_CASES = (("tensor", True), ("row", True), ("row", False))  # scaling, fast_accum
# Tiles for few rows, of which a sweep times all: A's rows, B's columns, K, warps, stages.
_SMALL = (
    (16, 32, 128, 2, 8), (16, 32, 256, 2, 5), (16, 32, 256, 4, 5), (16, 64, 128, 4, 5),
    (16, 16, 256, 2, 6), (16, 16, 512, 2, 4), (64, 32, 256, 4, 5), (64, 64, 128, 4, 5),
    (64, 64, 256, 4, 4), (64, 128, 256, 4, 3), (128, 64, 128, 4, 5), (128, 64, 256, 4, 3),
)  # fmt: skip
_FP8 = torch.float8_e4m3fn
_TOLERANCE = 0.02  # of the largest element, in bfloat16


def main(samples: int, json_file: str, sweep: bool = False) -> int:
    """Return the exit status: 1 if a result was wrong. `sweep`: more tiles for few rows."""

    def on_rank(world: World) -> tuple[list[Row], limits.Rates]:
        rates = limits.measure_rates(world.device)
        return [
            row
            for shape in SHAPES
            for scaling, fast in _CASES
            for row in _rows(world, shape, scaling, fast, samples, rates, sweep)
        ], rates

    found: tuple[list[Row], limits.Rates] = run_ranks(on_rank, 1, "virtual", heap_size=1 << 28)[0]
    rows, rates = found
    bench_command.print_rows(rows, 1)
    if json_file:
        content = {"kind": "op", "op": "fp8_gemm", "world": 1, "backend": "virtual"}
        content |= {"machine": machine(), "rates": rates.as_json()}
        write(json_file, content | {"rows": [bench_command.row_json(row) for row in rows]})
    return 1 if any(row.wrong for row in rows) else 0


def _rows(
    world: World, shape: Shape, scaling: str, fast: bool, samples: int, rates: limits.Rates,
    sweep: bool,
) -> list[Row]:  # fmt: skip
    m, n, k = shape
    problem = _scaled.Problem(m, n, k, _FP8, 1, scaling=scaling)
    cost = Cost(2 * m * n * k, m * k + k * n, 2 * m * n, 0)
    name = f"Problem(m={m}, n={n}, k={k}, scaling={scaling!r}, fast_accum={fast})"
    blank = Row("", name, "", cost, limits.seconds(cost, 1, rates))
    sets = [_tensors(world, problem) for _ in range(_count(world, cost))]
    theirs = [_theirs(each, fast) for each in sets]
    rows, calls = [], []
    for config in _configs(world, problem, fast, sweep):
        ours = [_ours(each, problem, config) for each in sets]
        wrong = _wrong(sets[0][-1], ours[0], theirs[0])
        row = dataclasses.replace(blank, variant="ours", config=str(config), wrong=wrong)
        rows.append(row)
        if not wrong:
            calls.append(Variant(str(config), ours))
    rows.append(dataclasses.replace(blank, variant="torch._scaled_mm"))
    times = iter(measure(world, [*calls, Variant("torch._scaled_mm", theirs)], samples))
    return [row if row.wrong else dataclasses.replace(row, times=next(times)) for row in rows]


def _configs(world: World, problem: Any, fast: bool, sweep: bool) -> Iterator[Any]:
    first = dataclasses.replace(_scaled.default(problem, world.num_sms), fast_accum=fast)
    yield first
    for m, n, k, num_warps, num_stages in _SMALL if sweep and problem.m <= 256 else []:
        tried = dataclasses.replace(
            first, tile_m=m, tile_n=n, tile_k=k, num_warps=num_warps, num_stages=num_stages
        )
        if _scaled.valid(problem, tried) is None:
            yield tried


def _count(world: World, cost: Cost) -> int:
    """Return how many sets of tensors it takes for one to leave the L2 cache."""
    return min(max(-(-3 * target.of(world.device).l2_bytes // cost.hbm_bytes), 2), 8)


def _tensors(world: World, problem: Any) -> tuple[Any, ...]:
    """Make A, a transposed B, their scales, and an output."""
    m, n, k = problem.m, problem.n, problem.k
    a, b = (torch.randn(s, device=world.device).to(_FP8) for s in ((m, k), (n, k)))
    scales = [
        torch.rand(shape, device=world.device) + 0.5
        for shape in _scaled.scale_shapes(problem.scaling, m, n, k)
    ]
    return a, b.T, *scales, torch.empty(m, n, dtype=torch.bfloat16, device=world.device)


def _ours(tensors: tuple[Any, ...], problem: Any, config: Any) -> Callable[[], Any]:
    a, b, of_a, of_b, out = tensors
    return lambda: _scaled.matmul(a, b, (of_a, of_b), out, None, problem, config)


def _theirs(tensors: tuple[Any, ...], fast: bool) -> Callable[[], Any]:
    a, b, of_a, of_b, out = tensors
    if of_a.numel() == 1:
        of_a, of_b = of_a[0], of_b[0]
    else:
        of_a, of_b = of_a.view(-1, 1), of_b.view(1, -1)
    options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return lambda: torch._scaled_mm(a, b, of_a, of_b, out=out, **options)


def _wrong(out: torch.Tensor, ours: Callable[[], Any], theirs: Callable[[], Any]) -> str:
    """Say how far apart the two are, if that is too far."""
    theirs()
    want = out.clone()
    out.fill_(float("nan"))
    ours()
    difference = ((out - want).abs().max() / want.abs().max()).item()
    return "" if difference <= _TOLERANCE else f"off by {difference:.3f} of the largest"
