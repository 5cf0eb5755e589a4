"""Train a LLaMA-like block, split over four ranks, and compare it with the whole model.

    python examples/train_llama_block.py                         # four simulated ranks
    STEPS=50 torchrun --nproc-per-node 4 examples/train_llama_block.py
    STEPS=50 COMPILED=1 SUNDOG_BACKEND=virtual python examples/train_llama_block.py

Tensor and sequence parallel: each rank has a part of the tokens between the layers, and a part of
the heads and of the hidden features inside them. The weights of the whole model are split by
styles of torch's parallelize_module; nothing else of the model changes.
"""

from __future__ import annotations

import copy
import os

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

import sundog
from sundog.torch.modules import Colwise, Rowwise, SequenceParallelNorm

WORDS, WIDTH, HEADS, HIDDEN, LENGTH = 16, 48, 24, 24, 24  # what 2, 3, 4 and 8 ranks can share
STEPS = int(os.environ.get("STEPS", "2"))
COMPILED = os.environ.get("COMPILED") == "1"  # the split model, forward and backward


class Block(nn.Module):
    """Attention and a gated MLP, each after a norm, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        heads = (layer(h).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.q, self.k, self.v))
        q, k, v = (each.transpose(0, 1) for each in heads)  # heads first
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(0, 1).flatten(1))
        h = self.norm_2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH), Block()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(self.words(tokens)) @ self.words.weight.t()


def split(model: Model, world: sundog.World) -> Model:
    block = model.block
    for name in ("q", "k", "v", "gate", "up"):
        Colwise(world)._apply(getattr(block, name), None)
    for name in ("o", "down"):
        Rowwise(world)._apply(getattr(block, name), None)
    block.norm_1 = SequenceParallelNorm(block.norm_1, world)
    block.norm_2 = SequenceParallelNorm(block.norm_2, world)
    return model


def train(model: Model, tokens: Tensor, targets: Tensor, world: sundog.World | None) -> Tensor:
    """Return the loss of each step; with a world, of this rank's tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward = torch.compile(model, fullgraph=True) if COMPILED and world is not None else model
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(forward(tokens), targets, reduction="sum")
        loss.backward()
        if world is not None:  # the embedding is whole on every rank, which sees its tokens alone
            model.words.weight.grad = world.all_reduce(model.words.weight.grad)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def main(world: sundog.World) -> list[float]:
    torch.manual_seed(0)
    model, text = Model().to(world.device), torch.randint(0, WORDS, (LENGTH + 1,))
    tokens, targets = text[:-1].to(world.device), text[1:].to(world.device)
    parts = split(copy.deepcopy(model), world)
    mine = [each.chunk(world.size)[world.rank] for each in (tokens, targets)]
    losses = world.all_reduce(train(parts, *mine, world))
    expected = train(model, tokens, targets, None)  # the same on one rank, without a world
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-3)
    if world.rank == 0:
        text = f"loss {losses[0]:.2f} in step 1, {losses[-1]:.2f} in step {STEPS}"
        print(f"{world.size} ranks trained the same model as one: {text}")
    return losses.tolist()


if __name__ == "__main__":
    if "RANK" in os.environ:
        with sundog.init() as world:
            main(world)
    else:
        sundog.run(main, world_size=4)
