"""A tensor- and sequence-parallel training run equals the one-rank model's and gloo's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.jobs import job
from torch import Tensor, nn

import sundog
from sundog.torch.modules import ColumnParallelLinear, RowParallelLinear

Run = Callable[..., list]
TOKENS, WIDTH, HIDDEN, RANKS = 8, 4, 8, 4
STEPS = int(os.environ.get("SUNDOG_TEST_STEPS", "4"))  # 50 were seen to agree, in a minute each


class Gloo:
    """The two fused ops of a world, by torch's collectives."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD

    def all_gather_matmul(self, a: Tensor, b: Tensor, bias: Tensor, shard: str) -> Tensor:
        return functional.all_gather_tensor_autograd(a, 0, self.group) @ b + bias

    def matmul_reduce_scatter(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None
        return functional.reduce_scatter_tensor_autograd(a @ b, "sum", 0, self.group)


def whole_model() -> nn.Sequential:
    """Weights are quarters of whole numbers, so that sums do not round."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape) / 4)
    return model


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    whole = torch.randint(-3, 4, (2, TOKENS, WIDTH)).float()
    return whole[0], whole[1]


def split_model(world: Any, device: Any = "cpu", dtype: Any = torch.float32) -> nn.Sequential:
    whole = whole_model().to(device, dtype)
    up = ColumnParallelLinear(WIDTH, HIDDEN, world, device=device, dtype=dtype)
    down = RowParallelLinear(HIDDEN, WIDTH, world, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        up.weight.copy_(whole[0].weight.chunk(world.size)[world.rank])
        up.bias.copy_(whole[0].bias.chunk(world.size)[world.rank])
        down.weight.copy_(whole[2].weight.chunk(world.size, 1)[world.rank])
    return nn.Sequential(up, nn.ReLU(), down)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, how: str = "") -> Any:
    """The first gradients, and the weights after all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward = torch.compile(model, backend=how, fullgraph=True) if how else model
    first = []
    for step in range(steps):
        optimizer.zero_grad()
        (forward(x) - y).float().square().sum().backward()
        if step == 0:
            first = [parameter.grad.clone().cpu() for parameter in model.parameters()]
        optimizer.step()
    return first, [parameter.detach().cpu() for parameter in model.parameters()]


def train_split(
    world: Any, steps: int, how: str = "", device: Any = "cpu", dtype: Any = torch.float32
) -> Any:
    x, y = (part.chunk(world.size)[world.rank].to(device, dtype) for part in data())
    return train(split_model(world, device, dtype), x, y, steps, how)


def joined(parts: list[list[Tensor]]) -> list[Tensor]:
    """The whole model's tensors, from the ranks' parts."""
    weights, biases, downs = zip(*parts, strict=True)
    return [torch.cat(weights), torch.cat(biases), torch.cat(downs, 1)]


def compare(results: list[Any], steps: int) -> None:
    first, last = train(whole_model(), *data(), steps)
    for found, expected in zip(joined([each[0] for each in results]), first, strict=True):
        assert torch.equal(found, expected)  # no rounding yet
    for found, expected in zip(joined([each[1] for each in results]), last, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def compare_bfloat16(results: list[Any], steps: int) -> None:
    """AdamW moves a weight by its rate at most, and bfloat16 rounds every one of those moves."""
    bfloat16 = torch.bfloat16
    x, y = (part.to(bfloat16) for part in data())
    first, last = train(whole_model().to(bfloat16), x, y, steps)
    for found, expected in zip(joined([each[0] for each in results]), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.5)
    start = [parameter.detach() for parameter in whole_model().parameters()]
    for found, expected, begin in zip(
        joined([each[1] for each in results]), last, start, strict=True
    ):
        assert (expected - begin).abs().max() > 0.02  # it learned
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_training(run: Run, how: str, dtype: str) -> None:
    """On the chosen backend. Compiled with Inductor on a GPU; elsewhere its C++ takes too long."""
    torch._dynamo.reset()

    def main(world: sundog.World) -> Any:
        compiler = "inductor" if world.device.type == "cuda" else "aot_eager"
        chosen = compiler if how == "compiled" else ""
        return train_split(world, STEPS, chosen, world.device, getattr(torch, dtype))

    results = run(main, RANKS)
    {"float32": compare, "bfloat16": compare_bfloat16}[dtype](results, STEPS)


@pytest.mark.sim_only
def test_training_of_a_compiled_model_in_processes() -> None:
    torch._dynamo.reset()
    compare(sundog.run(lambda world: train_split(world, STEPS, "aot_eager"), RANKS, "shm"), STEPS)


@pytest.mark.sim_only
def test_training_on_gloo() -> None:
    """The same model by torch's own collectives, with the same tolerance."""
    compare(job(lambda rank: train_split(Gloo(), 50), RANKS), 50)
