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
    for op in (
        "all_gather_matmul",
        "matmul_all_gather",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
    )
    for name in BASELINES[op]
    if not ("nccl" in name or "gloo" in name)  # test_nccl.py: they need processes
]


@pytest.mark.sim_only
@pytest.mark.parametrize("name", ["our all-reduce, then torch's norm", "add_, then torch's norm"])
def test_a_norm_by_torch_is_near_and_another_is_not(name: str) -> None:
    """Its bits are others, and a bench takes it all the same; but not with a wrong row."""
    op = find("all_reduce_rms_norm")
    baseline, problem = BASELINES["all_reduce_rms_norm"][name], op.Problem(5, 300, torch.float16, 2)

    def main(world: sundog.World) -> tuple[int, int]:
        given = op.inputs(world, problem, 0)
        wanted = expected(world, op, problem, given)
        out = world.empty(wanted.shape, wanted.dtype, "out").fill_(0x7B)
        world.barrier()
        assert baseline.usable(world, problem)
        baseline.make(world, problem, given, out)()
        world.barrier()
        near = baseline.wrong(problem, out, wanted)
        out[:600] = 0
        return near, baseline.wrong(problem, out, wanted)

    for near, far in sundog.run(main, 2, "sim"):
        assert near == 0
        assert far > 250


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


@pytest.mark.sim_only
@pytest.mark.parametrize("op", ["moe_dispatch", "moe_combine"])
def test_torch_sends_tokens_to_the_same_places(op: str) -> None:
    """Of what is compared, that is: a dispatch may leave anything in slots without a token."""
    module, baseline = find(op), BASELINES[op]["torch index, our all_to_all"]
    problem = module.Problem(7, 24, torch.bfloat16, 2, 4, 3)

    def main(world: sundog.World) -> tuple[int, int]:
        given = module.inputs(world, problem, 0)
        wanted = expected(world, module, problem, given)
        out = world.empty(wanted.shape, wanted.dtype, "out").fill_(0x7B)
        world.barrier()
        baseline.make(world, problem, given, out)()
        world.barrier()
        good = baseline.wrong(problem, out, wanted)
        out.view(-1)[: out.numel() // 2] += 1
        return good, baseline.wrong(problem, out, wanted)

    for good, bad in sundog.run(main, 2, "sim"):
        assert good == 0
        assert bad > 20
