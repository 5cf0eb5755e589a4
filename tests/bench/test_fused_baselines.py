"""What fused ops are compared with gives their answers."""

from __future__ import annotations

import pytest
import torch

import sundog
from sundog.bench.baselines import BASELINES
from sundog.exercise import expected
from sundog.op import find

OP = "all_gather_matmul"


@pytest.mark.sim_only
@pytest.mark.parametrize("name", BASELINES[OP])
def test_baseline_gives_the_answer(name: str) -> None:
    module, baseline = find(OP), BASELINES[OP][name]
    problem = module.Problem(24, 16, 32, torch.float32, 2)

    def main(world: sundog.World) -> bool:
        given = module.inputs(world, problem, 0)
        wanted = expected(world, module, problem, given)
        out = world.empty(wanted.shape, wanted.dtype, "out").fill_(float("nan"))
        world.barrier()
        assert baseline.usable(world, problem)
        baseline.make(world, problem, given, out)()
        world.barrier()
        return torch.equal(out, wanted)

    assert sundog.run(main, 2, "sim") == [True, True]
