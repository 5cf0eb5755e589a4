"""All-gather + GEMM by the copy engine: corners of its config, graphs, the checker, its mutants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import sundog
from sundog.check import check
from sundog.exercise import expected
from sundog.fused import all_gather_matmul_copy_engine as op
from sundog.fused.all_gather_matmul import Problem
from sundog.mutation import find_mutants, mutate

from . import Run, answers, compare
from .test_fused_mutants import again

F16 = torch.float16
SMALL = op.Config(16, 16, 16, group_m=2, num_warps=4, programs=3)
# Ragged; three rows of tiles.
PROBLEMS = {
    "k": Problem(40, 20, 19 * 3, F16, 3, "k"),
    "m": Problem(40 * 3, 20, 19, torch.bfloat16, 3, "m", has_bias=True),
    "aligned": Problem(40, 16, 64, F16, 2, "k"),
    "alone": Problem(40, 16, 32, F16, 1, "k"),
}
CORNERS = [
    ("k", dict(copies=1, programs=1)),
    ("k", dict(rows=2, copies=2)),  # which do not divide the rows
    ("k", dict(rows=9, copies=5, descriptors=False)),  # more at once than there are
    ("m", dict(rows=2, copies=2)),
    ("aligned", {}),
    ("alone", {}),
]


@pytest.mark.parametrize(("name", "change"), CORNERS)
def test_corners(run: Run, name: str, change: dict[str, Any]) -> None:
    problem = PROBLEMS[name]
    compare(run(answers(op, problem, replace(SMALL, **change)), problem.size))


def test_it_is_captured_with_its_copies(run: Run) -> None:
    """The streams of the copies are forked and joined inside the graph."""
    problem = PROBLEMS["aligned"]

    def main(world: sundog.World) -> list[bool]:
        plan = op.plan(world, problem, SMALL)
        a, b = op.inputs(world, problem, 0)
        out = world.empty((problem.m, problem.n), F16)
        world.barrier()
        plan(a, b, out)
        with world.capture() as graph:
            plan(a, b, out)
        good = []
        for seed in (1, 2):
            for old, new in zip((a, b), op.inputs(world, problem, seed), strict=True):
                old.copy_(new)
            want = expected(world, op, problem, (a, b))
            world.barrier()
            graph.replay()
            good.append(torch.equal(out.cpu(), want))
        return good

    assert run(main, 2) == [[True, True]] * 2


@pytest.mark.sim_only
def test_it_is_clean() -> None:
    """Ragged, and several copies at once. Behind a link: tests/test_link.py."""
    report = check(again(op, PROBLEMS["k"], replace(SMALL, rows=2, copies=2)), 3, schedules=2)
    assert report.findings == [], report


@pytest.mark.sim_only
def test_every_mutant_is_killed() -> None:
    function = again(op, PROBLEMS["aligned"], replace(SMALL, copies=2))
    found, report = find_mutants(function, 2)
    assert report.findings == [], report
    found = [mutant for mutant in found if "copy_engine" in mutant.where]
    assert len(found) > 3
    survived = [o for o in mutate(function, 2, found, schedules=20) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)


def test_a_full_gpu_is_refused(run: Run) -> None:
    """The programs that wait for the peers, and set flags, need a place."""

    def main(world: sundog.World) -> None:
        op.plan(world, PROBLEMS["aligned"], replace(SMALL, programs=world.num_sms))

    with pytest.raises(ValueError, match=r"programs wait for each other and \d+ SMs hold one each"):
        run(main, 2)
