"""Bad input gets a sentence, the same in eager and in compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sundog
import sundog.torch

Run = Callable[..., list]
HOW = pytest.mark.parametrize("how", ["eager", "compiled"])


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def sentence(how: str, call: Callable[..., Any], *given: Any) -> str:
    """What the call raises, whatever torch wraps it in."""
    called = torch.compile(call, backend="aot_eager", fullgraph=True) if how == "compiled" else call
    with pytest.raises(Exception) as error:  # noqa: PT011 -- torch's class depends on the stage
        called(*given)
    return str(error.value)


@HOW
def test_of_a_call(run: Run, how: str) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(4, 4, device=world.device)
        text = sentence(how, lambda x: world.all_reduce(x), x.to("meta"))
        assert "x is on meta" in text or "x is on the meta device" in text
        text = sentence(how, lambda x: world.all_reduce(x), x.to(torch.float8_e4m3fn))
        assert "all_reduce: no reduction of torch.float8_e4m3fn; convert it to one of" in text
        text = sentence(how, lambda x: world.all_reduce(x, "max"), x.clone().requires_grad_())
        assert "all_reduce has no backward formula for op 'max'" in text
        text = sentence(how, lambda x: world.all_gather(x, splits=[4]), x)
        assert "splits [4]" in text
        text = sentence(how, lambda x: world.all_reduce_rms_norm(x, x[:2], x[0]), x)
        assert "residual is (2, 4) of torch.float32, expected (4, 4)" in text
        weight = x[0].clone().requires_grad_()
        text = sentence(how, lambda x: world.all_reduce_rms_norm(x, x, weight, quant="token"), x)
        assert "with quant= there is no backward formula" in text

    run(main, 2)


@pytest.mark.sim_only
@HOW
def test_of_any_tensor_that_is_elsewhere(run: Run, how: str) -> None:
    """Of the others too: where one is on meta, torch returned memory that nobody wrote."""

    def main(world: sundog.World) -> None:
        x, meta = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, device="meta")
        calls: dict[str, Callable[..., Any]] = {
            "all_gather_matmul: b": lambda x, y: world.all_gather_matmul(x, y, shard="m"),
            "matmul_all_reduce: bias": lambda x, y: world.matmul_all_reduce(x, x, y[0]),
            "all_reduce_rms_norm: weight": lambda x, y: world.all_reduce_rms_norm(x, x, y[0]),
            "moe_dispatch: ids": lambda x, y: world.moe_dispatch(x, y.int(), y, experts=2),
        }
        for name, call in calls.items():
            assert f"{name} is on meta, but this rank is on cpu" in sentence(how, call, x, meta)

    run(main, 2)


@HOW
def test_of_arguments_that_torch_would_name_in_its_own_words(run: Run, how: str) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(4, 4, device=world.device)
        calls: dict[str, Callable[..., Any]] = {
            " is a NoneType, expected a tensor": lambda x: world.all_reduce(None),
            "b is a NoneType, expected a tensor": lambda x: world.matmul_all_reduce(x, None),
            "rank '0' is outside this world of 2 ranks": lambda x: world.broadcast(x, "0"),
            "rank None is outside this world of 2 ranks": lambda x: world.gather(x, None),
            "all_gather: splits 4 must be 2 numbers": lambda x: world.all_gather(x, splits=4),
            "out has 4 elements of torch.float32": lambda x: world.all_reduce(x, out=x[0].clone()),
            "of torch.float64": lambda x: world.all_reduce(x, out=x.double()),
            "a of shape (4,): expected": lambda x: world.all_gather_matmul(x[0], x),
            "x is a scalar, expected rows": lambda x: world.all_reduce_rms_norm(x.sum(), x, x),
            "capacity -1 must be 0 or more": lambda x: world.moe_dispatch(
                x,
                torch.zeros(4, 1, dtype=torch.int32, device=x.device),
                x[:, :1],
                experts=2,
                capacity=-1,
            ),
        }
        for expected, call in calls.items():
            assert expected in sentence(how, call, x)

    run(main, 2)


@HOW
@pytest.mark.parametrize("has_grad", [False, True])
def test_of_arguments_that_a_schema_has_no_type_for(run: Run, how: str, has_grad: bool) -> None:
    """Some had torch's own words where the op of torch was called, or another sentence."""

    def main(world: sundog.World) -> None:
        x = torch.ones(4, 4, device=world.device, requires_grad=has_grad)
        y = torch.ones(8, 4, device=world.device)
        calls: dict[str, Callable[..., Any]] = {
            "all_gather: splits [4] must be 2 numbers from 0 on": lambda x: world.all_gather(
                x, splits=[4]
            ),
            "all_gather: splits [4, 'a'] must be 2 numbers from 0 on": lambda x: world.all_gather(
                x, splits=[4, "a"]
            ),
            f"x has 4 rows, but splits [3, 3] says 3 for rank {world.rank}": (
                lambda x: world.all_gather(x, splits=[3, 3])
            ),
            "all_to_all: in_splits [4, 'a'] must be 2 numbers, 0 or more": (
                lambda x: world.all_to_all(x, in_splits=[4, "a"], out_splits=[4, 4])
            ),
            "all_to_all: in_splits [4, 4] add up to 8, but x has 4 rows": (
                lambda x: world.all_to_all(x, in_splits=[4, 4], out_splits=[4, 4])
            ),
            "give in_splits and out_splits": lambda x: world.all_to_all(x, in_splits=[2, 2]),
            "all_gather_matmul: activation 3: expected None or 'silu'": (
                lambda x: world.all_gather_matmul(x, y, activation=3)
            ),
            "matmul_all_reduce: activation 'relu': expected None or 'silu'": (
                lambda x: world.matmul_all_reduce(x, y[:4], activation="relu")
            ),
            "all_reduce_rms_norm: eps 'small': expected a number": (
                lambda x: world.all_reduce_rms_norm(x, y[:4], y[0], "small")
            ),
            "all_reduce_rms_norm: eps None: expected a number": (
                lambda x: world.all_reduce_rms_norm(x, y[:4], y[0], eps=None)
            ),
            "all_reduce_rms_norm: quant 'row': expected 'tensor', 'token' or 'group'": (
                lambda x: world.all_reduce_rms_norm(x, y[:4], y[0], quant="row")
            ),
            ": expected 'tensor', 'token' or 'group'": (
                lambda x: world.all_reduce_rms_norm(x, y[:4], y[0], quant=None)
            ),
            "all_reduce_rms_norm: residual is a list, expected a tensor": (
                lambda x: world.all_reduce_rms_norm(x, [1], y[0])
            ),
            "matmul_all_reduce: bias is a int, expected a tensor": (
                lambda x: world.matmul_all_reduce(x, y[:4], 3)
            ),
            "all_gather_matmul: shard 'z': expected 'k' or 'm'": (
                lambda x: world.all_gather_matmul(x, y, shard="z")
            ),
            "moe_dispatch: experts '2' is not a whole number": (
                lambda x: world.moe_dispatch(x, y[:4].int(), y[:4], experts="2")
            ),
        }
        for expected, call in calls.items():
            assert expected in sentence(how, call, x)

    run(main, 2)


def test_of_a_nested_tensor_that_requires_grad(run: Run) -> None:
    def main(world: sundog.World) -> None:
        parts = [torch.ones(2, device=world.device), torch.ones(3, device=world.device)]
        with pytest.raises(ValueError, match="x is a nested tensor; pass x"):
            world.all_reduce(torch.nested.nested_tensor(parts, requires_grad=True))

    run(main, 2)


@HOW
def test_of_a_world_that_was_closed(run: Run, how: str) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(4, device=world.device)
        with world.scope():
            group = world.group([0, 1])
        assert "the group ended with the scope" in sentence(how, lambda x: group.all_reduce(x), x)

    run(main, 2)


@pytest.mark.sim_only
@HOW
def test_of_a_group_that_is_gone(how: str) -> None:
    op = torch.ops.symm_mem.one_shot_all_reduce
    with sundog.torch.enable():
        text = sentence(how, lambda x: op(x, "sum", "gone"), torch.ones(4))
    assert "there is no process group named 'gone': it was destroyed, or was never made" in text


@pytest.mark.sim_only
@HOW
def test_of_a_name_whose_world_is_closed(how: str) -> None:
    """What a graph carries is the name of a world."""
    text = sentence(
        how, lambda x: sundog.torch.ops.all_reduce(x, "sum", "auto", "world"), torch.ones(4)
    )
    assert "there is no open world named 'world' on this rank (open: none): it was closed" in text
