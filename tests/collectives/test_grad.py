"""Gradients that would be lost are refused. tests/inside_torch has those with a formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import sundog
from sundog.collectives import all_gather_push

Run = Callable[..., list]
Call = Callable[[sundog.World, torch.Tensor], Any]

# Each takes a 2 x 2 tensor as its input, whichever of its tensors that is, with an output.
INPUTS: dict[str, Call] = {
    "all_gather": lambda world, x: world.all_gather(x, x.new_empty(4, 2)),
    "all_reduce": lambda world, x: world.all_reduce(x, out=x.new_empty(2, 2)),
    "all_to_all": lambda world, x: world.all_to_all(x, x.new_empty(2, 2)),
    "broadcast": lambda world, x: world.broadcast(x, out=x.new_empty(2, 2)),
    "reduce": lambda world, x: world.reduce(x, 0, out=x.new_empty(2, 2)),
    "reduce_scatter": lambda world, x: world.reduce_scatter(x, out=x.new_empty(1, 2)),
    "all_gather_matmul": lambda world, x: world.all_gather_matmul(
        x, x.detach(), shard="m", out=x.new_empty(4, 2)
    ),
    "matmul_all_reduce": lambda world, x: world.matmul_all_reduce(
        x.detach(), x, out=x.new_empty(2, 2)
    ),
    "matmul_reduce_scatter": lambda world, x: world.matmul_reduce_scatter(
        x.detach(), x.detach(), x.view(-1)[:2], out=x.new_empty(1, 2)
    ),
}
OUTPUTS: dict[str, Call] = {
    "all_gather": lambda world, x: world.all_gather(x.detach()[:1].clone(), x),
    "all_reduce": lambda world, x: world.all_reduce(x.detach().clone(), out=x),
    "broadcast": lambda world, x: world.broadcast(x.detach().clone(), out=x),
    "matmul_all_reduce": lambda world, x: world.matmul_all_reduce(
        x.detach().clone(), x.detach().clone(), out=x
    ),
}


def _parameter(world: sundog.World) -> torch.Tensor:
    return torch.ones((2, 2), device=world.device, requires_grad=True)


@pytest.mark.parametrize(
    ("op", "call"),
    [*INPUTS.items(), *OUTPUTS.items()],
    ids=[*INPUTS, *(f"out of {o}" for o in OUTPUTS)],
)
def test_a_gradient_that_would_be_lost_is_refused(run: Run, op: str, call: Call) -> None:
    """With the two ways out, both of which work; the second time too, when the call is known."""

    def main(world: sundog.World) -> None:
        x = _parameter(world)
        for _ in range(3):
            with pytest.raises(ValueError, match=f"{op} has no backward formula") as error:
                call(world, x)
            assert "`with torch.no_grad():`" in str(error.value)
            assert ".detach()" in str(error.value)
            with torch.no_grad():
                call(world, x)
            call(world, x.detach())

    run(main, 2)


def test_so_it_is_for_a_plan(run: Run) -> None:
    def main(world: sundog.World) -> list[float]:
        x, out = world.full((2,), world.rank), world.zeros((4,))
        problem = all_gather_push.Problem(2, torch.float32, world.size)
        plan = all_gather_push.plan(world, problem, all_gather_push.default(problem, 8))
        with pytest.raises(ValueError, match="argument 0 requires grad"):
            plan(x.detach().requires_grad_(), out)
        plan(x, out)
        return out.tolist()

    assert run(main, 2) == [[0, 0, 1, 1]] * 2


def test_an_op_inside_a_function_transform_is_refused(run: Run) -> None:
    def main(world: sundog.World) -> None:
        with pytest.raises(ValueError, match=r"torch\.func\.grad, vmap or another transform"):
            torch.func.grad(lambda x: world.all_reduce(x).sum())(torch.ones(3))
        with pytest.raises(ValueError, match=r"torch\.func\.grad, vmap or another transform"):
            torch.func.vmap(lambda x: world.all_reduce(x))(torch.ones(2, 3))

    run(main, 2)


@pytest.mark.sim_only
@pytest.mark.parametrize("op", ["all_reduce", "matmul_all_reduce"])
def test_a_tangent_is_refused(op: str) -> None:
    """Forward mode: the result had none. One rank, because torch has one level for all threads."""

    def main(world: sundog.World) -> None:
        x = torch.ones(2, 2)
        more = (torch.ones(2, 2),) * (op != "all_reduce")
        for _ in range(3):  # the third call is the repetition of a call
            getattr(world, op)(x, *more)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones(2, 2))
            with pytest.raises(ValueError, match=f"{op}: . has a tangent of forward-mode"):
                getattr(world, op)(dual, *more)
            getattr(world, op)(x, *more)

    sundog.run(main, 1, "sim")


def test_send_and_recv(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = _parameter(world)
        with pytest.raises(ValueError, match="send has no backward formula"):
            world.send(x, 1 - world.rank)
        with pytest.raises(ValueError, match="recv has no backward formula"):
            world.recv(x, 1 - world.rank)
        with torch.no_grad():
            if world.rank == 0:
                world.send(x * 5, 1)
            else:
                world.recv(x, 0)
                assert x.tolist() == [[5, 5], [5, 5]]

    run(main, 2)
