"""What fused ops are compared with gives their answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import sundog
import sundog.torch
from sundog.ops.load import changed, find
from sundog.tools._subject import expected, room
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
    if not ("nccl" in name or "gloo" in name or "symm_mem" in name)  # they need processes
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


@pytest.mark.sim_only
def test_torch_s_fused_ops_give_the_same_result(tmp_path: Path) -> None:
    """On processes of a CPU, where `enable` gives torch's ops a kernel."""

    def main(world: sundog.World) -> list[int]:
        meeting = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", meeting, rank=world.rank, world_size=world.size)
        with sundog.torch.enable():
            wrong = [
                each
                for op in ("all_gather_matmul", "matmul_reduce_scatter")
                for each in far(world, op)
            ]
        dist.destroy_process_group()
        return wrong

    def far(world: sundog.World, op: str) -> list[int]:
        module, baseline = find(op), BASELINES[op][f"symm_mem.fused_{op}"]
        problem = changed(module.cases(2)[0], dict(m=6, n=5, k=8, dtype=torch.float32))
        problem = changed(problem, {"shard": "m"}) if op == "all_gather_matmul" else problem
        given = module.inputs(world, problem, 3)
        wanted = expected(world, module, problem, given)
        out = room(world, module, problem, given)
        world.barrier()
        baseline.make(world, problem, given, out)()
        right = baseline.wrong(problem, out.cpu(), wanted)
        return [right, baseline.wrong(problem, out.cpu() + 9, wanted)]

    for first, bad, second, also_bad in sundog.run(main, 2, "shm"):
        assert first == second == 0
        assert bad
        assert also_bad
