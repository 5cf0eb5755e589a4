"""A layer of experts: send tokens to their experts' ranks, multiply there, and return the sums.

Each rank has two experts, each a matrix. You write the kernel between dispatch and combine. This
one multiplies the tokens of every expert and source rank; it reads their counts on the device.

    python examples/moe_layer.py
    torchrun --nproc-per-node 4 examples/moe_layer.py
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

import sundog


@triton.jit
def grouped_kernel(
    x, w, y, counts, slots, hidden, SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Multiply ROWS slots of one source by COLS columns of one expert; nothing, if empty."""
    tiles = tl.cdiv(slots, ROWS)
    source, first = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * ROWS
    expert = tl.program_id(2)
    count = tl.load(counts + expert * SIZE + source)
    if first < count:
        slot, inner = first + tl.arange(0, ROWS), tl.arange(0, COLS)
        col = tl.program_id(1) * COLS + inner
        row = ((expert * SIZE + source) * slots + slot)[:, None] * hidden
        is_token = (slot < count)[:, None]
        total = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, hidden, COLS):
            a = tl.load(x + row + start + inner[None, :], mask=is_token, other=0.0)
            at = (expert * hidden + start + inner[:, None]) * hidden + col[None, :]
            total = tl.dot(a, tl.load(w + at), total)
        tl.store(y + row + col[None, :], total.to(y.dtype.element_ty), mask=is_token)


def grouped(x: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's tokens [experts, ranks * slots, hidden] by its matrix."""
    experts, rows, hidden = x.shape
    size, y = counts.shape[1], torch.empty_like(x)
    slots = rows // size
    grid = (size * triton.cdiv(slots, 16), hidden // 32, experts)
    grouped_kernel[grid](x, w, y, counts, slots, hidden, SIZE=size, ROWS=16, COLS=32)
    return y


def dense(
    x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute the same layer with all experts in one place."""
    products = torch.einsum("th,ehn->etn", x.float(), w.float()).to(x.dtype).float()
    chosen = products[ids, torch.arange(x.shape[0])[:, None]]
    return (weights[..., None] * chosen).sum(1).to(x.dtype)


def main(world: sundog.World, tokens: int = 5, hidden: int = 64, topk: int = 2) -> torch.Tensor:
    experts = 2 * world.size
    torch.manual_seed(7)  # of the experts, on all ranks alike
    w = torch.randint(-2, 3, (experts, hidden, hidden)).to(torch.bfloat16)
    torch.manual_seed(42 + world.rank)
    x = torch.randint(-2, 3, (tokens, hidden)).to(torch.bfloat16)
    ids = torch.rand(tokens, experts).topk(topk).indices
    weights = torch.randint(1, 5, (tokens, topk)).float() / 4
    mine = w[2 * world.rank : 2 * world.rank + 2].to(world.device)
    given = (each.to(world.device) for each in (x, ids, weights))
    sent, counts, handle = world.moe_dispatch(*given, experts=experts)
    out: torch.Tensor = world.moe_combine(grouped(sent, mine, counts), handle)
    assert torch.equal(out.cpu(), dense(x, w, ids, weights)), f"rank {world.rank}: another sum"
    if world.rank == 0:
        print(f"{world.size} ranks sent {tokens} tokens each to {topk} of {experts} experts")
    return out


if __name__ == "__main__":
    if "RANK" in os.environ:
        with sundog.init() as world:
            main(world)
    else:
        sundog.run(main, world_size=8)
