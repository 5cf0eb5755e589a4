"""What fused ops are compared with gives their answers."""

from __future__ import annotations

import pytest
import torch

import sundog
from sundog.ops.load import find
from sundog.tools._subject import expected
from sundog.tools.baselines import BASELINES

CASES = [
    (op, name)
    for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    for name in BASELINES[op]
]


@pytest.mark.sim_only
@pytest.mark.parametrize(("op", "name"), CASES)
def test_baseline_gives_the_answer(op: str, name: str) -> None:
    module, baseline = find(op), BASELINES[op][name]
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
