"""An op of torch for plain tensors: straight to its kernel, and only to a launch when repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sundog
from sundog.torch import ops

Run = Callable[..., list]


class Seen(TorchDispatchMode):
    """Notes the ops that go through the dispatcher to a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.sim_only
@pytest.mark.parametrize("has_grad", [False, True])
def test_the_dispatcher_is_asked_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, has_grad: bool
) -> None:
    """torch's own kernels of the Autograd key would ask it again, which takes half of the time."""

    def redispatch(*given: Any) -> None:
        raise AssertionError("the dispatcher is asked again")

    monkeypatch.setattr(torch._ops.OpOverload, "redispatch", redispatch)

    def main(world: sundog.World) -> None:
        x = torch.full((3,), world.rank + 1.0, requires_grad=has_grad)
        weights = torch.full((2, 3), world.rank + 1.0, requires_grad=has_grad)
        result = ops.all_reduce(x, "sum", "auto", world.name)
        product = ops.matmul_all_reduce(x[None], weights.t(), *[None] * 3, "auto", world.name)
        tokens = ops.moe_dispatch(weights, torch.tensor([[0], [1]]), 2, 2, 0, "auto", world.name)[0]
        assert result.tolist() == [3.0] * 3
        assert product.tolist() == [[15.0] * 2]
        if has_grad:
            (result.sum() + product.sum() + 2 * tokens.sum()).backward()
            assert x.grad.tolist() == [2.0 + 4.0 * (world.rank + 1)] * 3
            assert weights.grad.tolist() == [[2.0 * (world.rank + 1) + 2.0] * 3] * 2

    run(main, 2)


def test_a_repeated_op_reads_the_new_data(run: Run) -> None:
    """Same tensors, other data; other operators and shapes at the same place."""

    def main(world: sundog.World) -> None:
        x = torch.zeros(2, 2, device=world.device)

        def reduced(op: str, given: Tensor) -> list:
            result: Tensor = ops.all_reduce(given, op, "auto", world.name)
            return result.flatten().tolist()

        for value in range(4):
            x.fill_(value + world.rank)
            assert reduced("sum", x) == [2.0 * value + 1] * 4
            assert reduced("max", x) == [value + 1.0] * 4
            assert reduced("sum", x[0]) == [2.0 * value + 1] * 2
            x[0, 1] = 7
            assert reduced("sum", x.t()) == [2.0 * value + 1, 2.0 * value + 1, 14, 2.0 * value + 1]

    run(main, 2)


def test_calls_without_out_are_repeated_by_one_key(run: Run) -> None:
    """The method and the op of torch leave the same, but for where their results lie."""
    calls: dict[str, tuple[Callable[..., Tensor], tuple]] = {
        "all_reduce": (lambda world, x: world.all_reduce(x, "max"), ("max",)),
        "all_gather": (lambda world, x: world.all_gather(x), (None,)),
        "reduce_scatter": (lambda world, x: world.reduce_scatter(x), ("sum",)),
        "all_to_all": (lambda world, x: world.all_to_all(x), (None, None)),
    }

    def main(world: sundog.World) -> None:
        for name, (method, asked) in calls.items():
            x = torch.arange(6.0, device=world.device).view(2, 3)
            results = [method(world, x) for _ in range(2)]  # all at another place
            by_method = {*world._plans.repeats}
            results += [getattr(ops, name)(x, *asked, "auto", world.name) for _ in range(2)]
            by_op = {*world._plans.repeats} - by_method
            assert len(by_method) == len(by_op) == 2
            places = {key[3] for key in by_method | by_op}
            assert places == {result.data_ptr() for result in results}
            assert len({(*key[:3], *key[4:]) for key in by_method | by_op}) == 1
            assert all(torch.equal(each, results[0]) for each in results)
            world.free_plans()

    run(main, 2)


def test_a_repeat_ends_with_the_plans(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(4, device=world.device)
        results = []
        for _ in range(3):
            results.append(ops.all_reduce(x, "sum", "auto", world.name).tolist())
            results.append(ops.all_reduce(x, "sum", "auto", world.name).tolist())
            world.free_plans()
            assert not world._plans.repeats
        assert results == [[2.0] * 4] * 6

    run(main, 2)


@pytest.mark.sim_only
def test_a_dispatch_mode_sees_the_op(run: Run) -> None:
    """The short way is for calls that nobody watches."""

    def main(world: sundog.World) -> list[str]:
        x = torch.ones(4, device=world.device)
        for _ in range(2):
            ops.all_reduce(x, "sum", "auto", world.name)
        with Seen() as seen:
            ops.all_reduce(x, "sum", "auto", world.name)
        return seen.names

    assert run(main, 1)[0].count("sundog::all_reduce") == 1


@pytest.mark.sim_only
def test_fake_tensors_and_conjugated_views_take_the_long_way(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.tensor([1 + 2j, 3 - 1j], device=world.device)
        result = ops.all_reduce(x.conj(), "sum", "auto", world.name)
        assert torch.equal(result, x.conj().resolve_conj())
        with torch._subclasses.FakeTensorMode() as mode:
            fake = ops.all_reduce(mode.from_tensor(x), "sum", "auto", world.name)
        assert fake.shape == x.shape
        assert hasattr(fake, "fake_mode")

    run(main, 1)


@pytest.mark.sim_only
@pytest.mark.parametrize("is_repeated", [False, True])
def test_torchs_graphs_keep_their_plans(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
) -> None:
    """torch.cuda.graph gives no notice of its end, so a plan in it stays as long as the world."""
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)

    def main(world: sundog.World) -> None:
        nonlocal capturing
        world.max_plans = 1
        world._streams._has_graphs = True  # as on a GPU
        x, out = torch.ones(4), torch.empty(4)
        world.all_reduce(x, out=out)
        capturing = True
        world.all_reduce(x, out=out if is_repeated else None)
        capturing = False
        (held,) = world._plans
        for length in (5, 6, 7):
            world.all_reduce(torch.ones(length))
        world.free_plans()
        assert list(world._plans) == [held]
        world.close()
        assert not world._streams.kept

    run(main, 1)
