"""Experts' tokens, and ops that send 8 bits, in torch: gradients, one graph, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sundog

Run = Callable[..., list]
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(call, backend="aot_eager", fullgraph=True)
    return made


EXPERTS = 6


def factor(expert: Any) -> Any:
    """What an expert multiplies its tokens by, here."""
    return 1.0 + expert


def layer(world: sundog.World, x: Tensor, ids: Tensor, weights: Tensor, room: int) -> Tensor:
    """A mixture of experts, each of which has one number."""
    sizes: dict[str, int] = {"experts": EXPERTS, "capacity": room, "max_tokens": 8}
    tokens, _, handle = world.moe_dispatch(x, ids, weights, **sizes)
    local = tokens.shape[0]
    experts = torch.arange(local, device=x.device) + world.rank * local
    return world.moe_combine((tokens * factor(experts).view(-1, 1, 1)).contiguous(), handle)


def dense(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same on one rank. -1 is no expert."""
    factors = torch.where(ids >= 0, factor(ids), 0.0) * weights
    return (factors.unsqueeze(-1) * x.unsqueeze(1)).sum(1)


def routed(world: sundog.World, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randint(-3, 4, (tokens, 5), generator=generator).float()
    ids = torch.randint(-1, EXPERTS, (tokens, 3), generator=generator, dtype=torch.int32)
    ids[:1] = 2  # one expert three times
    weights = torch.randint(1, 4, (tokens, 3), generator=generator).float()
    return x.to(world.device), ids.to(world.device), weights.to(world.device)


@pytest.mark.parametrize(("size", "room", "least"), [(2, 0, 0), (3, 12, 4)])
def test_gradients_of_experts(run: Run, size: int, room: int, least: int) -> None:
    """First and second order, of tokens and weights: whole numbers, so equal to the bit.

    Rank 0 has `least` tokens. A rank without any takes part.
    """

    def main(world: sundog.World) -> None:
        x, ids, weights = routed(world, 4 if world.rank else least)
        found = []
        for call in (lambda x, w: layer(world, x, ids, w, room), lambda x, w: dense(x, ids, w)):
            given = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            out = call(*given)
            first = torch.autograd.grad((out * out).sum(), given, create_graph=True)
            second = torch.autograd.grad(sum((each * each).sum() for each in first), given)
            found.append([out, *first, *second])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
        weights.requires_grad_()  # alone: of a frozen model, whose router is trained
        layer(world, x, ids, weights, room).sum().backward()
        assert weights.grad is not None

    run(main, size)


@pytest.mark.sim_only
@pytest.mark.parametrize("where", ["sim", "shm"])
def test_experts_are_one_graph(where: str) -> None:
    """With a number of tokens that changes; the handle leaves the graph, and comes in again."""

    def main(world: sundog.World) -> None:
        fn = compiled(lambda x, ids, w: layer(world, x, ids, w, 0))
        for tokens in (4, 7, 5):
            x, ids, weights = routed(world, tokens)
            x.requires_grad_()
            out = fn(x, ids, weights)
            assert torch.equal(out, dense(x, ids, weights))
            (given,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(given, torch.autograd.grad(dense(x, ids, weights).sum(), x)[0])
        x, ids, weights = routed(world, 4)
        send = compiled(lambda x: world.moe_dispatch(x, ids, weights, experts=EXPERTS))
        tokens, _, handle = send(x)
        combine = compiled(lambda y, handle: world.moe_combine(y, handle))
        assert torch.equal(combine(tokens, handle), world.moe_combine(tokens, handle))

    sundog.run(main, 2, where)


def bytes_sent(world: sundog.World) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Calls of all ops that send 8 bits, and tensors for them."""
    x = torch.arange(48.0, device=world.device).view(6, 8) + world.rank
    a, one = x.to(FP8), torch.ones(1, device=world.device)
    b, wide = (torch.ones(4, n, device=world.device).to(FP8).T for n in (8, 8 * world.size))
    return {
        "quantized_all_reduce": (lambda x: world.quantized_all_reduce(x), (x,)),
        "quantized_all_gather": (lambda x: world.quantized_all_gather(x, wire=torch.int8), (x,)),
        "scaled_all_gather_matmul": (
            lambda a, b: world.scaled_all_gather_matmul(a, b, one, one),
            (a, wide),
        ),
        "scaled_matmul_reduce_scatter": (
            lambda a, b: world.scaled_matmul_reduce_scatter(a, b, one, one),
            (a, b),
        ),
        "scaled_matmul_all_reduce": (
            lambda a, b: world.scaled_matmul_all_reduce(a, b, one, one, torch.float32),
            (a, b),
        ),
    }


def test_ops_of_bytes_are_one_graph_and_refuse_gradients(run: Run) -> None:
    """The bits of eager code; and a sentence where a gradient would be lost, in both."""

    def main(world: sundog.World) -> None:
        for name, (call, given) in bytes_sent(world).items():
            one_graph = compiled(call)
            assert torch.equal(one_graph(*given), call(*given)), name
            asked = given[0].clone().requires_grad_()
            for each in (call, one_graph):
                with pytest.raises(Exception, match=f"{name} has no backward formula"):
                    each(asked, *given[1:])

    run(main, 2)


def test_bad_input_is_named_when_it_is_traced(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x, ids, weights = routed(world, 4)

        def refused(call: Callable[..., Any], *given: Any) -> str:
            with pytest.raises(Exception) as error:  # noqa: PT011 -- torch's class varies
                compiled(call)(*given)
            return str(error.value)

        text = refused(lambda x: world.moe_dispatch(x, ids, weights, experts=5), x)
        assert "5 experts do not divide among 2 ranks" in text
        text = refused(lambda x: world.moe_dispatch(x, ids, weights[:2], experts=6), x)
        assert "topk_weights (2, 3); expected [tokens, hidden]" in text
        text = refused(lambda x: world.moe_combine(x, 3), x)
        assert "expected moe_dispatch's" in text
        text = refused(lambda x: world.quantized_all_reduce(x, wire="fp4"), x)
        assert "wire 'fp4': expected 'int8', 'fp8'" in text
        text = refused(lambda x: world.scaled_matmul_all_reduce(x, x.T, x[0], x[0]), x)
        assert "a is of torch.float32 and b of torch.float32; expected the same FP8" in text
        scales = torch.ones(4, 1, device=x.device, requires_grad=True)
        for call in (
            lambda: world.moe_dispatch(x, ids, weights, experts=6, scales=scales),
            compiled(lambda: world.moe_dispatch(x, ids, weights, experts=6, scales=scales)),
        ):
            with pytest.raises(Exception, match="with scales moe_dispatch has no backward formula"):
                call()

    run(main, 2)
