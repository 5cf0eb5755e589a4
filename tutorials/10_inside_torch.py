"""# 10. Inside torch

The ops of a world are ops of torch: they have gradients, and `torch.compile` keeps them in its
graph. This tutorial splits a LLaMA-like MLP over the ranks, trains it eager and compiled, and
compares every step with the whole model on one rank.

You learn

- how to split linear layers with `ColumnParallelLinear` and `RowParallelLinear`;
- that one call, `world.all_reduce(x)`, serves inference, training and compiled code;
- which loss the gradients belong to.

```
python tutorials/10_inside_torch.py
```
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import sundog
from sundog.torch.modules import ColumnParallelLinear, RowParallelLinear

TOKENS, WIDTH, HIDDEN, STEPS = 12, 8, 24, 2  # what 1, 2, 3 and 4 ranks can share

# %%
# ## The whole model
#
# The gated MLP of a LLaMA block: two linear layers side by side, then one back to the width of
# the model.


class MLP(nn.Module):
    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(silu(self.gate(x)) * self.up(x))


def whole_model(device: torch.device) -> MLP:
    torch.manual_seed(0)  # the same weights on every rank
    sizes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return MLP(*[nn.Linear(*size, bias=False) for size in sizes]).to(device)


# %%
# ## Split it
#
# Each rank has some of the hidden features: the matching rows of the weights of `gate` and `up`,
# and the matching columns of `down`. Between the layers every rank has its own part of the tokens.
# So
# `gate` and `up` are an `all_gather_matmul` and `down` is a `matmul_reduce_scatter`: products that
# start while other ranks' tokens are still on their way.


def split_model(whole: MLP, world: sundog.World) -> MLP:
    where = {"bias": False, "device": world.device}
    gate = ColumnParallelLinear(WIDTH, HIDDEN, world, **where)
    up = ColumnParallelLinear(WIDTH, HIDDEN, world, **where)
    down = RowParallelLinear(HIDDEN, WIDTH, world, **where)
    with torch.no_grad():
        for mine, theirs, dim in ((gate, whole.gate, 0), (up, whole.up, 0), (down, whole.down, 1)):
            mine.weight.copy_(theirs.weight.chunk(world.size, dim)[world.rank])
    return MLP(gate, up, down)


# %%
# ## Train it
#
# Gradients are those of the sum of all ranks' losses. So each rank calls `backward` on the loss of
# its own tokens, and its weights get the gradient of the whole loss. Every rank must take part in
# every backward, because gradients travel through the same collectives.
#
# `torch.compile(..., fullgraph=True)` accepts the same model. An op is a node of the graph, which
# finds its world by name.


def train(model: nn.Module, x: Tensor, y: Tensor, compiled: bool = False) -> Tensor:
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (call(x) - y).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


# %%
# ## Compare with torch
#
# `world.all_reduce` of the ranks' losses needs no gradient, so it goes straight to the collective.


def main(world: sundog.World) -> Tensor:
    torch.manual_seed(1)
    x, y = torch.randn(2, TOKENS, WIDTH).to(world.device)
    expected = train(whole_model(world.device), x, y)  # on one rank, by torch alone
    mine = [each.chunk(world.size)[world.rank].contiguous() for each in (x, y)]
    for compiled in (False, True):
        model = split_model(whole_model(world.device), world)
        losses = world.all_reduce(train(model, *mine, compiled))
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    if world.rank == 0:
        print(f"{world.size} ranks: eager and compiled, every loss equal to torch's on one rank")
    return losses


if __name__ == "__main__":
    sundog.run(main, world_size=4)

# %%
# [Inside torch](../torch.md) has the rest: worlds over process groups and meshes, the process
# group `"sundog"`, torch's own `symm_mem` ops on a CPU. `examples/train_llama_block.py` is a whole
# block with attention.
