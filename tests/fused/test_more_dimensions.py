"""Fused products of [batch, seq, k]: the same bits as of its rows, in the shape of a."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import sundog

Run = Callable[..., list]
# What the first dimension of the result is, over that of a, on two ranks.
OPS: dict[str, tuple[str, dict[str, Any], float]] = {
    "all_gather_matmul, k": ("all_gather_matmul", {"shard": "k"}, 1),
    "all_gather_matmul, m": ("all_gather_matmul", {"shard": "m"}, 2),
    "matmul_all_gather": ("matmul_all_gather", {}, 2),
    "matmul_all_reduce": ("matmul_all_reduce", {}, 1),
    "matmul_reduce_scatter": ("matmul_reduce_scatter", {}, 0.5),
}


@pytest.mark.parametrize("name", OPS)
def test_batches_are_views_of_rows(run: Run, name: str) -> None:
    op, more, times = OPS[name]

    def main(world: sundog.World) -> None:
        torch.manual_seed(world.rank)
        a = world.empty((2, 3, 8)).copy_(torch.randn(2, 3, 8))
        b = torch.randn(16 if more.get("shard") == "k" else 8, 5).to(world.device)
        function = getattr(world, op)
        flat = function(a.view(6, 8), b, **more)
        out = function(a, b, **more)
        assert out.shape == (int(2 * times), 3, 5)
        assert torch.equal(out.view(-1, 5), flat)
        room = torch.empty_like(out)
        assert function(a, b, out=room, **more) is room
        assert torch.equal(room, out)

    run(main, 2)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_batches_have_the_gradients_of_rows(run: Run, name: str, is_compiled: bool) -> None:
    op, more, times = OPS[name]

    def main(world: sundog.World) -> None:
        torch.manual_seed(world.rank)
        given = torch.randn(3, 2, 8).transpose(0, 1)  # no view of rows
        b = torch.randn(16 if more.get("shard") == "k" else 8, 5).to(world.device)

        def call(x: torch.Tensor, **room: Any) -> torch.Tensor:
            return getattr(world, op)(x, b, **room, **more)

        called = torch.compile(call, backend="aot_eager", fullgraph=True) if is_compiled else call
        a, rows = (x.to(world.device).requires_grad_() for x in (given, given.reshape(6, 8)))
        out, flat = called(a), call(rows)
        assert out.shape == (int(2 * times), 3, 5)
        assert torch.equal(out.view(-1, 5), flat)
        weight = torch.randn(flat.shape).to(world.device)
        out.backward(weight.view(out.shape))
        flat.backward(weight)
        assert torch.equal(a.grad.reshape(6, 8), rows.grad)
        room = torch.empty_like(out.detach())
        if is_compiled:
            with torch.no_grad():
                into = torch.compile(partial(call, out=room), backend="aot_eager")
                assert torch.equal(into(given.to(world.device)), out)

    run(main, 2)


@pytest.mark.parametrize("name", OPS)
def test_any_size_may_be_zero(run: Run, name: str) -> None:
    op, more, times = OPS[name]

    def main(world: sundog.World) -> None:
        for batch, seq, k, n in ((0, 3, 8, 5), (4, 0, 8, 5), (4, 3, 0, 5), (4, 3, 8, 0)):
            a = torch.ones(batch, seq, k, device=world.device)
            b = torch.ones(2 * k if more.get("shard") == "k" else k, n, device=world.device)
            out = getattr(world, op)(a, b, **more)
            assert out.shape == (int(batch * times), seq, n)
            assert not out.any() or k

    run(main, 2)


def test_what_is_no_view_of_rows_and_what_does_not_split(run: Run) -> None:
    def main(world: sundog.World) -> None:
        a, b = torch.zeros(3, 2, 8, device=world.device), torch.zeros(8, 5, device=world.device)
        out = torch.zeros(3, 2, 5, device=world.device).transpose(0, 1)
        with pytest.raises(
            ValueError, match=r"out of shape \(2, 3, 5\) and strides .* no row view"
        ):
            world.matmul_all_reduce(a.transpose(0, 1), b, out=out)
        with pytest.raises(ValueError, match="first dimension of a, 3, does not split into 2"):
            world.matmul_reduce_scatter(a, b)
        with pytest.raises(ValueError, match="first dimension of a, 3, does not split into 2"):
            world.matmul_reduce_scatter(a.requires_grad_(), b)

    run(main, 2)
