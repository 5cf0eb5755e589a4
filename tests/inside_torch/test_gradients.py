"""Backward formulas: gradcheck of every op, to second order, and what has no formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sundog
from sundog.fused.moe_dispatch import slots_of
from sundog.torch import ops
from sundog.torch.library import TABLE

Run = Callable[..., list]
SIZE = 2


class Copy(torch.autograd.Function):
    """From a value that all ranks have to each rank's part of the work: gradients add up."""

    @staticmethod
    def forward(ctx: Any, world: sundog.World, x: Tensor) -> Tensor:
        ctx.world = world
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, Sum.apply(ctx.world, grad)


class Sum(torch.autograd.Function):
    """The reverse: a sum that all ranks have."""

    @staticmethod
    def forward(ctx: Any, world: sundog.World, x: Tensor) -> Tensor:
        ctx.world = world
        return torch.stack(world.exchange(x.detach())).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, Copy.apply(ctx.world, grad)


def everywhere(world: sundog.World, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function of all ranks' inputs, stacked, to all ranks' outputs: what gradcheck can check.

    Every rank calls it with the same numbers, and takes its own part of them.
    """

    def whole(*stacked: Tensor) -> Tensor:
        out = fn(*[Copy.apply(world, x)[world.rank] for x in stacked])
        mine = [out if rank == world.rank else torch.zeros_like(out) for rank in range(world.size)]
        return Sum.apply(world, torch.stack(mine))

    return whole


Call = Callable[[sundog.World, Tensor], Tensor]
COLLECTIVES: dict[str, Call] = {
    "all_reduce sum": lambda world, x: world.all_reduce(x),
    "all_reduce avg": lambda world, x: world.all_reduce(x, "avg"),
    "all_gather": lambda world, x: world.all_gather(x),
    "all_gather splits": lambda world, x: world.all_gather(x[: 1 + world.rank], splits=[1, 2]),
    "reduce_scatter sum": lambda world, x: world.reduce_scatter(x),
    "reduce_scatter avg": lambda world, x: world.reduce_scatter(x, "avg"),
    "all_to_all": lambda world, x: world.all_to_all(x),
    "all_to_all splits": lambda world, x: world.all_to_all(
        x[: 1 + world.rank], in_splits=[1, world.rank], out_splits=[[1, 1], [0, 1]][world.rank]
    ).sum(0),
    "broadcast": lambda world, x: world.broadcast(x, 1),
    "reduce": lambda world, x: world.reduce(x, 1),
    "reduce avg": lambda world, x: world.reduce(x, 0, "avg"),
    "gather": lambda world, x: world.gather(x, 1),
    "scatter": lambda world, x: world.scatter(x, 1),
}


@pytest.mark.sim_only
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_of_collectives(run: Run, name: str) -> None:
    """In float64, first and second order. The square makes the second order more than zero."""

    def main(world: sundog.World) -> None:
        torch.manual_seed(0)
        x = torch.randn(SIZE, 2, 2, dtype=torch.float64, requires_grad=True)
        fn = everywhere(world, lambda mine: COLLECTIVES[name](world, mine * mine))
        assert torch.autograd.gradcheck(fn, (x,), fast_mode=True)
        assert torch.autograd.gradgradcheck(fn, (x,), fast_mode=True)

    run(main, SIZE)


# An op, the same from collectives and torch's product, and shapes of a, b and bias on a rank.
Fused = tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]
MATRICES: dict[str, Fused] = {
    "all_gather_matmul m": (
        lambda world, *t: world.all_gather_matmul(*t, shard="m"),
        lambda world, a, b, bias: world.all_gather(a) @ b + bias,
        [(2, 3), (3, 2), (2,)],
    ),
    "all_gather_matmul k": (
        lambda world, *t: world.all_gather_matmul(*t, shard="k"),
        lambda world, a, b, bias: world.all_gather(a.t().contiguous()).t() @ b + bias,
        [(2, 2), (4, 3), (3,)],
    ),
    "matmul_reduce_scatter": (
        lambda world, *t: world.matmul_reduce_scatter(*t),
        lambda world, a, b, bias: world.reduce_scatter(a @ b) + bias,
        [(4, 3), (3, 2), (2,)],
    ),
    "matmul_all_reduce": (
        lambda world, *t: world.matmul_all_reduce(*t),
        lambda world, a, b, bias: world.all_reduce(a @ b) + bias,
        [(3, 2), (2, 4), (4,)],
    ),
    "matmul_all_gather": (
        lambda world, *t: world.matmul_all_gather(*t),
        lambda world, a, b, bias: world.all_gather(a @ b + bias),
        [(3, 2), (2, 4), (4,)],
    ),
}


@pytest.mark.parametrize("name", MATRICES)
def test_gradients_of_fused_ops(run: Run, name: str) -> None:
    """They take no float64. Of whole numbers, first and second order are exact to the bit."""
    fused, composed, shapes = MATRICES[name]

    def main(world: sundog.World) -> None:
        torch.manual_seed(world.rank)
        made = [torch.randint(-2, 3, shape).float().to(world.device) for shape in shapes]
        if name == "matmul_all_reduce":  # its bias is the same on all ranks
            made[2] = torch.ones_like(made[2])
        found = []
        for call in (fused, composed):
            given = [tensor.clone().requires_grad_() for tensor in made]
            out = call(world, *given)
            first = torch.autograd.grad((out * out).sum(), given, create_graph=True)
            second = torch.autograd.grad(sum((g * g).sum() for g in first), given)
            found.append([out, *first, *second])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)

    run(main, SIZE)


@pytest.mark.sim_only
@pytest.mark.filterwarnings("ignore:Input #.*is not a double precision")
def test_a_fused_op_passes_gradcheck(run: Run) -> None:
    """In float32: a difference quotient of whole numbers is exact for a product."""

    def main(world: sundog.World) -> None:
        torch.manual_seed(0)
        a, b = (
            torch.randint(-2, 3, (SIZE, 1, 2)).float(),
            torch.randint(-2, 3, (SIZE, 2, 1)).float(),
        )
        fn = everywhere(world, lambda a, b: world.all_gather_matmul(a, b, shard="m"))
        given = (a.requires_grad_(), b.requires_grad_())
        assert torch.autograd.gradcheck(fn, given, eps=1.0, atol=0.0, rtol=0.0)

    run(main, SIZE)


@pytest.mark.parametrize("name", [name for name in MATRICES if name != "matmul_all_reduce"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_with_an_activation(run: Run, name: str, dtype: torch.dtype) -> None:
    """The same as of the product alone, then torch's silu; within rounding."""
    shapes = MATRICES[name][2]

    def main(world: sundog.World) -> None:
        torch.manual_seed(world.rank)
        made = [torch.randn(shape, dtype=dtype, device=world.device) for shape in shapes]
        kwargs = {"shard": name[-1]} if name.startswith("all_gather") else {}
        op = getattr(world, name.split()[0])
        grads = []
        for is_fused in (True, False):
            given = [tensor.clone().requires_grad_() for tensor in made]
            if is_fused:
                out = op(*given, activation="silu", **kwargs)
            else:
                out = torch.nn.functional.silu(op(*given, **kwargs))
            out.float().square().sum().backward()
            grads.append([tensor.grad for tensor in given])
        tolerance = {} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.5}
        for fused, plain in zip(*grads, strict=True):
            torch.testing.assert_close(fused, plain, **tolerance)

    run(main, SIZE)


@pytest.mark.parametrize("gemma", [False, True], ids=["weight", "1 + weight"])
def test_gradients_of_all_reduce_rms_norm(run: Run, gemma: bool) -> None:
    """First and second order, against the same from all_reduce and torch's own operators."""

    def composed(world: sundog.World, x: Tensor, residual: Tensor, *rest: Tensor) -> Any:
        weight, bias = rest
        rows = world.all_reduce(x) + bias + residual
        unit = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
        return unit * (weight + gemma), rows

    def fused(world: sundog.World, x: Tensor, residual: Tensor, *rest: Tensor) -> Any:
        weight, bias = rest
        return world.all_reduce_rms_norm(x, residual, weight, 1e-5, bias=bias, gemma=gemma)

    def main(world: sundog.World) -> None:
        torch.manual_seed(world.rank)
        x = torch.randn(2, 3, 8, device=world.device)
        torch.manual_seed(7)  # the rest is the same on all ranks
        same = [torch.randn(shape, device=world.device) for shape in ((2, 3, 8), (8,), (8,))]
        found = []
        for call in (fused, composed):
            given = [each.clone().requires_grad_() for each in (x, *same)]
            out = call(world, *given)
            loss = (out[0] * out[0].cos()).sum() + (out[1] ** 3).sum() * 0.1
            first = torch.autograd.grad(loss, given, create_graph=True)
            second = torch.autograd.grad(sum((g * g).sum() for g in first), given)
            found.append([*out, *first, *second])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        parameter = same[1].requires_grad_()
        with pytest.raises(ValueError, match="with quant= there is no backward formula"):
            world.all_reduce_rms_norm(x, same[0], parameter, quant="token")

    run(main, SIZE)


def test_a_result_that_one_rank_gets_is_differentiated_on_all(run: Run) -> None:
    """The others get zeros, so that they can take part in the backward; without grad, None."""

    def main(world: sundog.World) -> Any:
        x = torch.full((2, 3), float(world.rank), device=world.device)
        assert (world.reduce(x, 1) is None) == (world.rank != 1)
        assert (world.gather(x, 1) is None) == (world.rank != 1)
        x.requires_grad_()
        total, whole = world.reduce(x, 1), world.gather(x, 1)
        if world.rank != 1:
            assert not total.any()
            assert not whole.any()
        assert total.shape == (2, 3)
        assert whole.shape == (6, 3)
        (2 * total.sum() + 3 * whole.sum()).backward()
        return x.grad.unique().tolist()

    assert run(main, 3) == [[5.0]] * 3


def test_a_backward_on_another_stream(run: Run) -> None:
    """What is pending there is watched, and the watching ended while an op was under way."""

    def main(world: sundog.World) -> list[float]:
        with world.stream(1):
            x = torch.ones(3, device=world.device, requires_grad=True)
            for _ in range(2):
                world.all_reduce(world.all_reduce(x) * 2).sum().backward()
            assert world.all_reduce(x.detach() * 3).tolist() == [6.0] * 3
        world.synchronize()
        assert x.grad is not None
        return x.grad.tolist()

    assert run(main, 2) == [[16.0] * 3] * 2


def test_what_has_no_formula_says_so(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(4, device=world.device, requires_grad=True)
        for name in ("all_reduce", "reduce_scatter"):
            for op in ("max", "min", "prod"):
                with pytest.raises(
                    ValueError, match=f"{name} has no backward formula for op '{op}"
                ):
                    getattr(world, name)(x, op)
                with torch.no_grad():
                    getattr(world, name)(x, op)
        for option in ({"async_op": True}, {"config": 3}, {"explain": True}):
            with pytest.raises(ValueError, match="where all_reduce is differentiated or compiled"):
                world.all_reduce(x, **option)
        with pytest.raises(ValueError, match="with out= scatter has no backward formula"):
            world.scatter(None, 1 - world.rank, out=x)

    run(main, SIZE)


def test_bad_input_with_grad_is_refused_as_without(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(4, 4, device=world.device, requires_grad=True)
        with pytest.raises(
            ValueError, match=r"reduce_scatter: x of shape .* does not split into 2"
        ):
            world.reduce_scatter(x[:3])
        with pytest.raises(ValueError, match=r"no reduction of torch\.float8_e4m3fn"):
            world.all_reduce(x.to(torch.float8_e4m3fn))
        with pytest.raises(ValueError, match=r"b has shape .* expected 4 rows"):
            world.matmul_all_reduce(x, x[:3])
        if world.device.type == "cpu":
            with pytest.raises(ValueError, match="on the meta device"):
                world.all_reduce(x.detach().to("meta"))

    run(main, SIZE)


def test_a_complex_sum_has_a_gradient(run: Run) -> None:
    """Every rank's loss depends on every rank's x: the gradients of all losses are added."""

    def main(world: sundog.World) -> None:
        x = torch.ones(3, dtype=torch.complex64, device=world.device, requires_grad=True)
        total = world.all_reduce(x)
        torch.view_as_real(total).sum().backward()
        assert torch.equal(total.detach(), torch.full_like(x, SIZE))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full_like(x, complex(SIZE, SIZE)))

    run(main, SIZE)


_FAKE = ("test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.long
def test_opcheck_accepts_every_op(run: Run) -> None:
    """Schema, fake kernel, autograd registration and AOTAutograd, also with symbolic shapes."""

    def main(world: sundog.World) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=world.device, requires_grad=True)

        x, a, b, bias = normal(4, 2), normal(4, 4), normal(4, 4), normal(4)
        name, end = world.name, ("auto", world.name)
        matrices = (a, b, bias, "silu", None)
        norm = (normal(3, 4), normal(3, 4), normal(4), 1e-6, bias, True, "", None, False, None)
        # Every slot has a token: what is in the others may differ from call to call.
        ids = torch.tensor([[0, 1], [2, 3], [3, 2], [1, 0]], dtype=torch.int32, device=x.device)
        slots, weights = slots_of(ids), normal(4, 2)
        samples = {
            "all_reduce": (x, "sum"), "all_gather": (x, None), "reduce_scatter": (x, "avg"),
            "all_to_all": (x, None, None), "broadcast": (x, 1), "reduce": (x, 0, "sum"),
            "gather": (x, 0), "scatter": (x, 1),
            "all_gather_matmul": (*matrices, "m"), "matmul_reduce_scatter": matrices,
            "matmul_all_reduce": matrices, "matmul_all_gather": matrices,
            "all_reduce_rms_norm": norm,
            "moe_dispatch": (x, ids, 4, 4, 2),
            "moe_combine": (normal(2, 4, 2), ids, slots, weights, 4, 4, 2),
        }  # fmt: skip
        one, wide, tall = (torch.ones(shape, device=x.device) for shape in ((1,), (4, 8), (8, 8)))
        fp8 = (wide.to(torch.float8_e4m3fn), tall.to(torch.float8_e4m3fn).T, one, one)
        rounded = {  # these have no formula, and so no gradient to check
            "quantized_all_reduce": (x.detach(), "sum", "fp8"),
            "quantized_all_gather": (x.detach(), "int8"),
            "scaled_all_gather_matmul": (*fp8, None, None, None, "m"),
            "scaled_matmul_reduce_scatter": (*fp8, None),
            "scaled_matmul_all_reduce": (*fp8, torch.float32),
        }
        assert {*samples, *rounded} == set(TABLE)
        for op, arguments in (samples | rounded).items():
            checks: Any = ("test_schema", "test_autograd_registration", *_FAKE)
            if op.startswith("scaled"):  # torch compares inputs by products, which FP8 has not
                checks = _FAKE
            torch.library.opcheck(getattr(ops, op).default, (*arguments, *end), test_utils=checks)
        torch.library.opcheck(ops.all_gather.default, (x, [4, 4], *end))
        with torch.no_grad():  # FP8 has no formula
            quantised = (*[each.detach() for each in norm[:3]], 1e-6, None, False, "token", None)
            across = x.detach().new_ones(4, 3).t()  # its results are contiguous
            for rows, both in ((quantised[0], True), (quantised[0], False), (across, False)):
                given = (rows, *quantised[1:], both, None, *end)
                torch.library.opcheck(ops.all_reduce_rms_norm.default, given)
        assert name == "world"

    run(main, SIZE)


def test_a_call_without_grad_does_not_meet_the_op(run: Run, monkeypatch: Any) -> None:
    """It costs what it did: no dispatcher of torch's in between."""
    from sundog.torch import calls

    def main(world: sundog.World) -> None:
        x = torch.ones(4, device=world.device)
        parameter = torch.ones(4, device=world.device, requires_grad=True)
        world.all_reduce(x)
        with torch.no_grad():
            world.all_reduce(parameter)
        with pytest.raises(AttributeError, match="all_reduce"):
            world.all_reduce(parameter)

    monkeypatch.setattr(calls, "ops", object())
    run(main, SIZE)
