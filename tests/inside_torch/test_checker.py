"""The checker sees what the host of an op does, also where the op is one of torch's."""

from __future__ import annotations

import pytest
import torch
from support.scripts import python

import sundog
from sundog.testing import check
from sundog.torch.library import ops

pytestmark = pytest.mark.sim_only
ROWS = torch.arange(8.0).view(4, 2)


def by_the_op(world: sundog.World) -> None:
    ops.all_reduce(ROWS, "sum", "auto", world.name)
    ops.all_gather.default(ROWS, None, "auto", world.name)


def with_a_backward(world: sundog.World) -> None:
    x = ROWS.clone().requires_grad_()
    world.reduce_scatter(x).square().sum().backward()
    assert x.grad.shape == x.shape


def compiled(world: sundog.World) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def squared(x):
        return world.all_reduce(x).square().sum()

    x = ROWS.clone().requires_grad_()
    squared(x).backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())  # two ranks, of a sum that both have


@pytest.mark.parametrize("program", [by_the_op, with_a_backward, compiled])
def test_the_checker_finds_nothing_in_a_right_program(program):
    check(program, world_size=2, schedules=2)


def test_a_write_that_races_with_an_op_of_torch_is_found():
    def program(world):
        x = world.zeros(4)
        world.peer(x, 1 - world.rank).fill_(1.0)  # no barrier before the op reads it
        ops.all_reduce(x, "sum", "auto", world.name)

    with pytest.raises(AssertionError, match="race"):
        check(program, world_size=2, schedules=8)


def test_a_capture_of_an_op_of_torch_replays_its_launches(run):
    def program(world):
        x = torch.full((4,), float(world.rank + 1))
        ops.all_reduce(x, "sum", "auto", world.name)  # makes the plan
        with world.capture() as graph:
            total = ops.all_reduce(x, "sum", "auto", world.name)
        x.mul_(10)
        graph.replay()
        world.synchronize()
        return total.tolist()

    assert run(program, 2) == [[30.0] * 4] * 2


def test_an_early_stance_holds_once_the_compiler_is_imported():
    program = (
        "import sys, torch\n"
        "from sundog.machine.torch_state import set_compiler_stance, uncompiled\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "set_compiler_stance(uncompiled())\n"
        "import torch._dynamo.eval_frame as compiler\n"
        "print(compiler._stance.stance)\n"
        "set_compiler_stance(None)\n"
        "print(compiler._stance.stance)\n"
    )
    done = python(["-c", program])
    assert done.stdout.split() == ["force_eager", "default"], done.stderr
