"""torch.compile with fullgraph=True: forward, backward, dynamic shapes; and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import sundog
from sundog.backends._gpu import SynchronizeFirst

Run = Callable[..., list]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(world: sundog.World, x: Tensor, w: Tensor) -> Tensor:
    """Every op that keeps its result on all ranks, in one function."""
    y = world.all_reduce(x @ w, "avg")
    z = world.reduce_scatter(torch.relu(y) * 2)
    z = world.all_to_all(world.all_gather(z)).sin()
    z = world.broadcast(z, 1) + world.scatter(z.repeat(2, 1), 0)
    gathered = world.all_gather_matmul(z, w, w[0], "silu", shard="m")
    scattered = world.matmul_reduce_scatter(gathered, w)
    normed, residual = world.all_reduce_rms_norm(z, z.cos(), w[1])
    rows = z.shape[0]
    scattered = scattered + world.all_gather(normed, splits=[rows, rows])[rows:]
    scattered = scattered + world.matmul_all_gather(residual, w)[:rows]
    return scattered.sum() + world.matmul_all_reduce(z, w).cos().sum()


def gradients(world: sundog.World, fn: Callable[..., Tensor], rows: int) -> list[Tensor]:
    x = torch.arange(rows * 4.0, device=world.device).view(rows, 4).add(world.rank).div(9)
    w = torch.eye(4, device=world.device) + 0.25
    x.requires_grad_()
    w.requires_grad_()
    loss = fn(world, x, w)
    loss.backward()
    return [loss.detach(), x.grad, w.grad]


def same(compiled: list[Tensor], eager: list[Tensor]) -> None:
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sim_only  # Dynamo asks a forked process for CUDA, which its parent has used on a GPU
@pytest.mark.parametrize("where", ["sim", "shm"])
def test_forward_and_backward_are_one_graph(where: str) -> None:
    """On sim all ranks share one compiled function; a new number of rows makes it dynamic, once."""

    def main(world: sundog.World) -> int:
        for rows in (4, 8, 12):
            same(gradients(world, compiled, rows), gradients(world, block, rows))
        return counter.frame_count

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    assert sundog.run(main, 2, where)[0] <= 2


def test_inductor(run: Run) -> None:
    def main(world: sundog.World) -> None:
        fn = torch.compile(lambda x: world.all_reduce(x.sin()).cos().sum(), fullgraph=True)
        grads = []
        for call in (fn, lambda x: world.all_reduce(x.sin()).cos().sum()):
            x = torch.arange(8.0, device=world.device).add(world.rank).requires_grad_()
            call(x).backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)

    run(main, 2)


@pytest.mark.sim_only
def test_the_mode_of_virtual_ranks_is_traced() -> None:
    """It takes locks after every call of torch, and Dynamo knows none."""
    lock, calls = threading.RLock(), []

    def after() -> None:
        with lock:
            calls.append(1)

    fn = torch.compile(lambda x: (x.sin() + 1).sum(), backend="aot_eager", fullgraph=True)
    with SynchronizeFirst(lambda: None, after=after):
        x = torch.ones(4)
        before = len(calls)
        assert fn(x).tolist() == pytest.approx(4 * (torch.ones(()).sin().item() + 1))
        assert len(calls) > before  # eager code is still seen
    with SynchronizeFirst(lambda: calls.append(2)):
        fn(torch.ones(4)).item()
    assert calls[-1] == 2


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_without_grad(run: Run, compiler: str) -> None:
    """Results for one rank alone, and outputs that the caller gives.

    The other ranks' graphs keep the op, though nothing there uses its result.
    """

    def main(world: sundog.World) -> Any:
        @torch.compile(backend=compiler, fullgraph=True)
        def fn(x: Tensor, out: Tensor) -> Any:
            total = world.reduce(x, 0)
            whole = world.gather(x + 1, 1)
            return total, whole, world.all_reduce(x, out=out)

        x = torch.full((2,), world.rank + 1.0, device=world.device)
        out = torch.zeros(2, device=world.device)
        total, whole, result = fn(x, out)
        assert result is out
        return [None if t is None else t.tolist() for t in (total, whole, out)]

    assert run(main, 2) == [[[3, 3], None, [3, 3]], [None, [2, 2, 3, 3], [3, 3]]]


@pytest.mark.sim_only
@pytest.mark.parametrize("how", ["make_fx", "export", "export strict", "fake"])
def test_what_records_sees_the_op(how: str) -> None:
    """They saw what the host does for it: the recorded function returned zeros."""

    def main(world: sundog.World) -> None:
        x = torch.arange(6.0).view(3, 2)
        if how == "fake":
            with FakeTensorMode():
                found = world.all_gather(torch.ones(3, 2))
            assert found.shape == (6, 2)
            return

        class Model(torch.nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return world.matmul_all_reduce(world.all_reduce(x).sin(), x.t())

        if how == "make_fx":
            recorded: Any = make_fx(Model())(x)
        else:
            recorded = torch.export.export(Model(), (x,), strict="strict" in how).module()
        assert torch.equal(recorded(x + 1), Model()(x + 1))

    sundog.run(main, 2, "shm")


def refused(call: Callable[..., Any], *arguments: Any) -> str:
    """What a compiled call raises, whatever torch wraps it in."""
    with pytest.raises(Exception) as error:  # noqa: PT011 -- torch's class depends on the stage
        torch.compile(call, backend="aot_eager", fullgraph=True)(*arguments)
    return str(error.value)


@pytest.mark.sim_only
def test_splits_may_be_numbers_of_a_tensor() -> None:
    """They are unknown while the function is traced: no check may ask for their sign."""

    def main(world: sundog.World) -> None:
        def exchange(x: Tensor, splits: Tensor) -> Tensor:
            sent = splits.tolist()
            return world.all_to_all(x, in_splits=sent, out_splits=sent)

        x, splits = torch.arange(4.0) + 4 * world.rank, torch.tensor([2, 2])
        compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, splits), exchange(x, splits))

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        sundog.run(main, 2, "sim")


@pytest.mark.sim_only
@pytest.mark.parametrize("has_grad", [False, True])
def test_jit_trace_records_the_op(has_grad: bool) -> None:
    """It watched what the host does for a collective, and the kernel read wrong sizes."""

    def main(world: sundog.World) -> None:
        ids = torch.zeros(4, 1, dtype=torch.int32)
        weight, hidden = torch.ones(4), torch.ones(8, 4)

        def call(x: Tensor) -> Tensor:
            normed, _ = world.all_reduce_rms_norm(world.all_reduce(x), x, weight)
            product = world.all_gather_matmul(normed, hidden)
            tokens, _, handle = world.moe_dispatch(product, ids, weight.view(4, 1), experts=2)
            return world.moe_combine(tokens, handle)

        traced = torch.jit.trace(call, torch.ones(4, 4, requires_grad=has_grad))
        assert "sundog::all_reduce_rms_norm" in str(traced.graph)
        found = torch.randn(4, 4, requires_grad=has_grad)
        expected = found.detach().clone().requires_grad_(has_grad)
        out, whole = traced(found), call(expected)
        assert torch.equal(out, whole)
        if has_grad:
            out.square().sum().backward()
            whole.square().sum().backward()
            assert torch.equal(found.grad, expected.grad)

    sundog.run(main, 2, "sim")


def test_bad_input_is_named_when_it_is_traced(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.ones(3, 4, device=world.device)
        text = refused(lambda x: world.reduce_scatter(x), x)
        assert "reduce_scatter: x of shape (3, 4) does not split into 2 equal slices" in text
        text = refused(lambda x: world.all_reduce(x, "max"), x.clone().requires_grad_())
        assert "all_reduce has no backward formula for op 'max'" in text
        text = refused(lambda x: world.all_reduce(x, async_op=True), x)
        assert "where all_reduce is differentiated or compiled" in text
        pairs = x.to(torch.complex64)
        summed = torch.compile(lambda x: world.all_reduce(x), fullgraph=True, backend="aot_eager")
        assert torch.equal(summed(pairs), 2 * pairs)  # as eager code does
        text = refused(lambda x: world.all_reduce(x, "max"), pairs)
        assert "all_reduce: no reduction of torch.complex64" in text
        text = refused(lambda x: world.matmul_all_reduce(x, x), x)
        assert "b has shape (3, 4), expected 4 rows" in text
        text = refused(lambda x: world.all_reduce(x), x.to("meta"))
        assert "x is on meta" in text

    run(main, 2)


def test_a_world_that_was_closed_is_named(run: Run) -> None:
    """Whether the function was compiled before the close or is compiled after it."""

    def main(world: sundog.World) -> None:
        def fn(x: Tensor) -> Tensor:
            return group.all_reduce(x)

        x = torch.ones(4, device=world.device)
        compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
        with world.scope():
            group = world.group([0, 1])
            compiled(x)
        for late in (compiled, torch.compile(fn, backend="aot_eager", fullgraph=True)):
            with pytest.raises(Exception, match="the group ended with the scope"):
                late(x)

    run(main, 2)
