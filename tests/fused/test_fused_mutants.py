"""The checker finds nothing in the fused kernels, and objects to every mutant of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import sundog
from sundog.checker.mutants import Mutant
from sundog.fused import _matmul_reduce, matmul_reduce_scatter
from sundog.fused import all_gather_matmul_barrier as gather_barrier
from sundog.fused import all_gather_matmul_copy_engine as copy_engine
from sundog.fused import all_gather_matmul_direct as direct
from sundog.fused import all_gather_matmul_hbm_buffer as hbm_buffer
from sundog.fused import matmul_all_reduce_one_shot as one_shot
from sundog.fused import matmul_all_reduce_two_shot as two_shot
from sundog.tools._subject import expected
from sundog.tools.check.mutation import find_mutants, mutate
from sundog.tools.check.schedules import check

pytestmark = pytest.mark.sim_only

F16 = torch.float16
SMALL = dict(tile_m=16, tile_n=16, tile_k=16, num_warps=4)
# Two rows of tiles for one fetcher. Aligned for descriptors, of B too.
GATHERED = hbm_buffer.Problem(24, 16, 32, F16, 2, "k")
# Rows of several runs, so that workers come before some of them; and of all ranks, as along K.
ROWS = (hbm_buffer.Problem(96, 16, 32, F16, 2, "m"), GATHERED)
REDUCED = _matmul_reduce.Problem(32, 16, 16, F16, 2)
PLAIN = _matmul_reduce.Config(**SMALL, programs=2)
CASES: dict[str, tuple[ModuleType, Any, Any]] = {
    "all_gather_matmul.barrier": (
        gather_barrier, GATHERED, gather_barrier.Config(**SMALL, programs=2),
    ),
    "all_gather_matmul.hbm_buffer": (
        hbm_buffer, GATHERED, hbm_buffer.Config(**SMALL, fetchers=1, programs=2),
    ),
    "all_gather_matmul.direct": (direct, GATHERED, direct.Config(**SMALL, programs=2)),
    "all_gather_matmul.copy_engine": (
        copy_engine, ROWS, copy_engine.Config(**SMALL, run=1, programs=2),
    ),
    "matmul_reduce_scatter": (matmul_reduce_scatter, REDUCED, PLAIN),
    "matmul_all_reduce.one_shot": (one_shot, REDUCED, PLAIN),
    "matmul_all_reduce.two_shot": (two_shot, REDUCED, PLAIN),
}  # fmt: skip


def again(op: ModuleType, problems: Any, config: Any) -> Callable[[sundog.World], None]:
    """Two calls with the same tensors and other data, nothing between them but the stream."""

    def one(world: sundog.World, problem: Any) -> None:
        plan = op.plan(world, problem, config)
        first, second = (op.inputs(world, problem, seed) for seed in range(2))
        wanted = [expected(world, op, problem, each) for each in (first, second)]
        outs = [world.empty(want.shape, want.dtype, "out") for want in wanted]
        world.barrier()
        plan(*first, outs[0])
        for old, new in zip(first, second, strict=True):
            old.copy_(new)
        plan(*first, outs[1])
        first[0].zero_()
        for out, want in zip(outs, wanted, strict=True):
            assert torch.equal(out, want)

    def main(world: sundog.World) -> None:
        for problem in problems if isinstance(problems, tuple) else (problems,):
            one(world, problem)

    return main


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_every_mutant_is_killed(name: str) -> None:
    """Of sundog/device for two of them: together they call all of it that the others do."""
    function = again(*CASES[name])
    made, report = find_mutants(function, 2)
    assert report.findings == [], report
    found = [mutant for mutant in made if isinstance(mutant, Mutant)]  # not of `again`
    if name not in ("all_gather_matmul.hbm_buffer", "matmul_reduce_scatter"):
        found = [mutant for mutant in found if "fused" in mutant.where]
    assert len(found) > 1
    survived = [o for o in mutate(function, 2, found, schedules=20) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)


@pytest.mark.parametrize(
    ("shard", "size", "change"),
    [
        ("k", 3, dict(k_per_flag=1, layout="m_contiguous")),
        ("m", 2, dict(descriptors=False, fetchers=1, first_fetchers=3, fetch_stages=2)),
    ],
)
def test_hbm_buffer_is_clean(shard: str, size: int, change: dict[str, Any]) -> None:
    """Ragged, so that the zeros at the end of a staged tile are written before they are read."""
    op, _, config = CASES["all_gather_matmul.hbm_buffer"]
    m, k = (34, 19 * size) if shard == "k" else (18 * size, 19)
    problem = hbm_buffer.Problem(m, 20, k, F16, size, shard)
    report = check(again(op, problem, replace(config, programs=3, **change)), size, schedules=2)
    assert report.findings == [], report
