"""`python -m benchmarks gemm`: the matrix product that the fused kernels share, next to torch.mm.

Both use all SMs of one GPU, with normally distributed bfloat16: the power that a product takes, and
so its clock, depends on the data. Outputs are compared before anything is timed. Of matrices whose
rows are not aligned ours has two rows: with aligned copies, as the fused ops make them, and reading
them where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sundog import target
from sundog.fused import _aligned, _gemm
from sundog.fused._fitting import fitting
from sundog.launch import run as run_ranks
from sundog.ops.op import Cost
from sundog.tools.bench import bench_command, limits
from sundog.tools.bench.run import Row
from sundog.tools.timing import Variant, measure
from sundog.world.world import World

from .result_files import machine, write

Shape = tuple[int, int, int]
# M, N, K: what issue trackers and papers use for linear layers; the last three are the small end.
SHAPES: tuple[Shape, ...] = (
    (1024, 3584, 8192), (4096, 3584, 8192), (16384, 3584, 8192), (4096, 4096, 4096),
    (4096, 11008, 4096), (4096, 14336, 4096), (16, 3584, 8192), (64, 3584, 8192),
    (256, 3584, 8192),
)  # fmt: skip
# No multiple of 8 elements: N, K or both, from many rows to few; a vocabulary is the last one's N.
UNALIGNED: tuple[Shape, ...] = (
    (1024, 1543, 2056), (1024, 1544, 2057), (4096, 4099, 4097), (2048, 3457, 5120),
    (8192, 3583, 8191), (256, 3585, 8192), (16, 3585, 8192), (512, 50257, 4096),
)  # fmt: skip
_TOLERANCE = 0.02  # of the largest element, in bfloat16
_ITEM = 2  # bytes


def main(samples: int, json_file: str, unaligned: bool = False) -> int:
    """Return the exit status: 1 if a result was wrong."""
    rows, rates = bench_gemm(UNALIGNED if unaligned else SHAPES, samples)
    bench_command.print_rows(rows, 1)
    if json_file:
        content = {"kind": "op", "op": "gemm", "world": 1, "backend": "virtual"}
        content |= {"machine": machine(), "rates": rates.as_json()}
        write(json_file, content | {"rows": [bench_command.row_json(row) for row in rows]})
    return 1 if any(row.wrong for row in rows) else 0


def bench_gemm(shapes: tuple[Shape, ...], samples: int) -> tuple[list[Row], limits.Rates]:
    """Return the rows of each shape: ours with the config of its rule, and torch.mm."""

    def on_rank(world: World) -> tuple[list[Row], limits.Rates]:
        rates = limits.measure_rates(world.device)
        return [row for each in shapes for row in _rows(world, each, samples, rates)], rates

    found: tuple[list[Row], limits.Rates] = run_ranks(on_rank, 1, "virtual", heap_size=1 << 28)[0]
    return found


def _rows(world: World, shape: Shape, samples: int, rates: limits.Rates) -> list[Row]:
    m, n, k = shape
    cost = Cost(2 * m * n * k, (m * k + k * n) * _ITEM, m * n * _ITEM, 0)
    config = _gemm.Tiles(**fitting(m, m, n, k, torch.bfloat16, world.num_sms))
    name = f"Problem(m={m}, n={n}, k={k}, dtype=torch.bfloat16)"
    blank = Row("", name, "", cost, limits.seconds(cost, 1, rates))
    sets = _sets(world, shape, cost)
    rooms = _aligned.Rooms(world, config, world.num_sms)
    calls = {"gemm": [_ours(each, config, world.num_sms, rooms) for each in sets]}
    if any(x is not y for x, y in zip(rooms.wide(*sets[0][:2]), sets[0], strict=False)):
        calls["gemm in place"] = [_ours(each, config, world.num_sms) for each in sets]
    mine = dataclasses.replace(blank, config=str(config), programs=world.num_sms)
    rows = [dataclasses.replace(mine, variant=name) for name in calls]
    rows.append(dataclasses.replace(blank, variant="torch.mm"))
    theirs = [_theirs(each) for each in sets]
    for number, ours in enumerate(calls.values()):
        if (wrong := _wrong(sets, ours, theirs)) > _TOLERANCE:
            text = f"off by {wrong:.3f} of the largest"
            return [dataclasses.replace(rows[number], wrong=text), rows[-1]]
    calls["torch.mm"] = theirs
    times = measure(world, [Variant(name, each) for name, each in calls.items()], samples)
    return [dataclasses.replace(row, times=t) for row, t in zip(rows, times, strict=True)]


def _sets(world: World, shape: Shape, cost: Cost) -> list[tuple[torch.Tensor, ...]]:
    """Make A, B and an output, as often as it takes for one set to leave the L2 cache."""
    m, n, k = shape
    l2 = target.of(world.device).l2_bytes
    count = min(max(-(-3 * l2 // cost.hbm_bytes), 2), 8)
    options: Any = dict(dtype=torch.bfloat16, device=world.device)
    return [
        (torch.randn(m, k, **options), torch.randn(k, n, **options), torch.empty(m, n, **options))
        for _ in range(count)
    ]


def _ours(
    tensors: tuple[torch.Tensor, ...],
    config: _gemm.Tiles,
    programs: int,
    rooms: _aligned.Rooms | None = None,
) -> Callable[[], Any]:
    a, b, out = tensors

    def launch() -> None:
        x, y = (a, b) if rooms is None else rooms.wide(a, b)
        _gemm.matmul(x, y, out, None, None, config, programs)

    return launch


def _theirs(tensors: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    a, b, out = tensors
    return lambda: torch.mm(a, b, out=out)


def _wrong(
    sets: list[tuple[torch.Tensor, ...]],
    ours: list[Callable[[], Any]],
    theirs: list[Callable[[], Any]],
) -> float:
    """Return the largest difference of the two, over the largest element."""
    worst = 0.0
    for (_, _, out), one, other in zip(sets, ours, theirs, strict=True):
        other()
        want = out.clone()
        out.fill_(float("nan"))
        one()
        difference = ((out - want).abs().max() / want.abs().max()).item()
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst
