"""Backward formulas of the ops of library.py, and of tensors that are the same on all ranks.

A formula treats the sum of all ranks' losses as the loss. It uses ops of torch and of sundog, so it
can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .names import find_world

if TYPE_CHECKING:
    from ..world.world import World

ops = torch.ops.sundog


# what a backward needs


def keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Keep the arguments, and only the shape of the tensor."""
    x, *ctx.asked = inputs
    ctx.shape = x.shape


def keep_sum(op: str, place: int) -> Callable[..., None]:
    """Keep the same for a reduction, of which only sum and avg have a formula."""

    def save(ctx: Any, inputs: tuple, output: Tensor) -> None:
        if inputs[place] not in ("sum", "avg"):
            raise ValueError(
                f"{op}: x requires grad, and {op} has no backward formula for op "
                f"{inputs[place]!r}: the gradient would be lost. Call it inside `with "
                "torch.no_grad():`, or pass x.detach()."
            )
        keep(ctx, inputs, output)

    return save


def keep_matrices(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, bias, *ctx.asked = inputs
    ctx.save_for_backward(a, b, bias)


def no_formula(op: str) -> Callable[..., None]:
    """Refuse an op that rounds to 8 bits: its derivative is zero nearly everywhere."""

    def save(ctx: Any, inputs: tuple, output: Tensor) -> None:
        raise ValueError(
            f"{op}: a tensor requires grad, and {op} has no backward formula: the gradient would "
            "be lost. Call it inside `with torch.no_grad():`, or pass the tensor's .detach()."
        )

    return save


def refused(ctx: Any, *grads: Tensor) -> Any:
    raise AssertionError("no_formula has raised before")


# backward formulas


def all_reduce_backward(ctx: Any, grad: Tensor) -> tuple:
    op, algo, world = ctx.asked
    return ops.all_reduce(grad.contiguous(), op, algo, world), None, None, None


def all_gather_backward(ctx: Any, grad: Tensor) -> tuple:
    """Send each part's gradient to its rank, and add them up there. Parts may be unequal."""
    splits, _, world = ctx.asked
    if splits is None:
        mine = ops.reduce_scatter(grad.contiguous(), "sum", "auto", world)
    else:
        rows, size = (ctx.shape[0] if ctx.shape else 1), len(splits)
        parts = ops.all_to_all(grad.contiguous(), splits, [rows] * size, "auto", world)
        mine = parts.view(size, rows, *parts.shape[1:]).sum(0)
    return mine.view(ctx.shape), None, None, None


def reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    op, _, world = ctx.asked
    whole = ops.all_gather(grad.contiguous(), None, "auto", world).view(ctx.shape)
    return whole / find_world(world).size if op == "avg" else whole, None, None, None


def all_to_all_backward(ctx: Any, grad: Tensor) -> tuple:
    in_splits, out_splits, algo, world = ctx.asked
    back = ops.all_to_all(grad.contiguous(), out_splits, in_splits, algo, world)
    return back.view(ctx.shape), None, None, None, None


def broadcast_backward(ctx: Any, grad: Tensor) -> tuple:
    src, _, world = ctx.asked
    return ops.reduce(grad.contiguous(), src, "sum", "auto", world), None, None, None


def reduce_backward(ctx: Any, grad: Tensor) -> tuple:
    dst, op, _, world = ctx.asked
    everywhere = ops.broadcast(grad.contiguous(), dst, "auto", world)
    grad = everywhere / find_world(world).size if op == "avg" else everywhere
    return grad, None, None, None, None


def gather_backward(ctx: Any, grad: Tensor) -> tuple:
    dst, _, world = ctx.asked
    return ops.scatter(grad.contiguous(), dst, "auto", world).view(ctx.shape), None, None, None


def scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    src, _, world = ctx.asked
    return ops.gather(grad.contiguous(), src, "auto", world).view(ctx.shape), None, None, None


def _before_activation(
    grad: Tensor, activation: str | None, product: Callable[[], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the gradient of product plus bias. For silu this sum is computed again."""
    if activation is not None:
        grad = torch.ops.aten.silu_backward(grad, product().to(grad.dtype))
    return grad.to(dtype).contiguous()


def all_gather_matmul_backward(ctx: Any, grad: Tensor) -> tuple:
    """Differentiate A @ b for a sharded A: scatter what was gathered, and the reverse."""
    a, b, bias = ctx.saved_tensors
    activation, _, shard, _, world = ctx.asked
    grad = _before_activation(
        grad,
        activation,
        lambda: ops.all_gather_matmul(a, b, bias, None, grad.dtype, shard, "auto", world),
        a.dtype,
    )
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        left, right = (grad, b.t()) if shard == "m" else (b, grad.t())
        of_a = ops.matmul_reduce_scatter(left, right, None, None, None, "auto", world)
        of_a = of_a if shard == "m" else of_a.t()
    if ctx.needs_input_grad[1]:
        other = "k" if shard == "m" else "m"
        of_b = ops.all_gather_matmul(a.t(), grad, None, None, None, other, "auto", world)
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    return of_a, of_b, of_bias, *[None] * 5


def matmul_reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    a, b, bias = ctx.saved_tensors
    activation, _, _, world = ctx.asked
    grad = _before_activation(
        grad,
        activation,
        lambda: ops.matmul_reduce_scatter(a, b, bias, None, grad.dtype, "auto", world),
        a.dtype,
    )
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        of_a = ops.all_gather_matmul(grad, b.t(), None, None, None, "m", "auto", world)
    if ctx.needs_input_grad[1]:
        of_b = ops.all_gather_matmul(grad.t(), a, None, None, None, "k", "auto", world).t()
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    return of_a, of_b, of_bias, *[None] * 4


def matmul_all_reduce_backward(ctx: Any, grad: Tensor) -> tuple:
    a, b, bias = ctx.saved_tensors
    activation, _, _, world = ctx.asked
    grad = _before_activation(
        grad,
        activation,
        lambda: ops.matmul_all_reduce(a, b, bias, None, grad.dtype, "auto", world),
        a.dtype,
    )
    of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None  # every rank adds its own
    total = ops.all_reduce(grad, "sum", "auto", world)
    of_a = total @ b.t() if ctx.needs_input_grad[0] else None
    of_b = a.t() @ total if ctx.needs_input_grad[1] else None
    return of_a, of_b, of_bias, *[None] * 4


def matmul_all_gather_backward(ctx: Any, grad: Tensor) -> tuple:
    """Add up the gradients on the rank of each product, since every rank has all products."""
    a, b, bias = ctx.saved_tensors
    activation, _, _, world = ctx.asked
    grad = ops.reduce_scatter(grad.contiguous(), "sum", "auto", world)
    grad = _before_activation(
        grad, activation, lambda: a @ b if bias is None else a @ b + bias, a.dtype
    )
    of_a = grad @ b.t() if ctx.needs_input_grad[0] else None
    of_b = a.t() @ grad if ctx.needs_input_grad[1] else None
    of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
    return of_a, of_b, of_bias, *[None] * 4


def keep_rows(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    """Keep RMSNorm's input: the new residual, which is the last output."""
    _, _, weight, ctx.eps, _, ctx.gemma, quant, *_, ctx.world = inputs
    if quant:
        raise ValueError(
            "all_reduce_rms_norm: a tensor requires grad, and with quant= there is no backward "
            "formula: the gradient would be lost. Call it inside `with torch.no_grad():`."
        )
    ctx.save_for_backward(output[-1], weight)


def all_reduce_rms_norm_backward(ctx: Any, grads: list[Tensor]) -> tuple:
    """Differentiate the norm and the sum of all x. Each rank adds its own residual and bias."""
    rows, weight = ctx.saved_tensors
    normed, residual = grads
    wide = rows.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.eps)
    unit, scaled = wide * inverse, normed.float() * (weight.float() + ctx.gemma)
    grad = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True)) + residual.float()
    grad = grad.to(rows.dtype).contiguous()
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = ops.all_reduce(grad, "sum", "auto", ctx.world)
    if ctx.needs_input_grad[2]:
        of_weight = (normed.float() * unit).flatten(0, -2).sum(0).to(weight.dtype)
    if ctx.needs_input_grad[4]:
        of_bias = grad.flatten(0, -2).sum(0)
    return of_x, grad, of_weight, None, of_bias, *[None] * 7


# tokens of experts


def keep_routes(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    _, ids, ctx.experts, ctx.max_tokens, ctx.capacity, _, ctx.world = inputs
    ctx.save_for_backward(ids, output[2])


def moe_dispatch_backward(ctx: Any, tokens: Tensor, counts: Any, slots: Any) -> tuple:
    """Send the gradient of every copy of a token to the token's rank, and add them up there."""
    ids, slots = ctx.saved_tensors
    ones = torch.ones_like(ids, dtype=torch.float32)
    asked = (ctx.experts, ctx.max_tokens, ctx.capacity, "auto", ctx.world)
    return ops.moe_combine(tokens.contiguous(), ids, slots, ones, *asked), *[None] * 6


def keep_outputs(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *given, ctx.experts, ctx.max_tokens, ctx.capacity, _, ctx.world = inputs
    ctx.save_for_backward(*given)


def moe_combine_backward(ctx: Any, grad: Tensor) -> tuple:
    """Treat a token with k experts as k tokens with one expert each, which have the same slots."""
    y, ids, slots, weights = ctx.saved_tensors
    tokens, topk = ids.shape
    flat, slots = ids.reshape(-1, 1), slots.reshape(-1, 1)
    asked = (ctx.experts, ctx.max_tokens * topk, ctx.capacity, "auto", ctx.world)
    of_y = of_weights = None
    if ctx.needs_input_grad[0]:
        rows = (weights.unsqueeze(-1) * grad.unsqueeze(1)).to(y.dtype).flatten(0, 1)
        sent, counts, _ = ops.moe_dispatch(rows.contiguous(), flat, *asked)
        places = torch.arange(y.shape[1] // counts.shape[1], device=y.device)
        is_filled = (places < counts.unsqueeze(-1)).view(y.shape[0], -1, 1)
        of_y = torch.where(is_filled, sent, torch.zeros_like(sent))
    if ctx.needs_input_grad[3]:
        ones = torch.ones_like(flat, dtype=torch.float32)
        rows = ops.moe_combine(y, flat, slots, ones, *asked).view(tokens, topk, y.shape[-1])
        of_weights = (rows.float() * grad.unsqueeze(1).float()).sum(-1)
    return of_y, None, None, of_weights, *[None] * 5


# what is the same on all ranks: one loss, not one per rank


class _Replicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: str) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Total.apply(grad.contiguous(), ctx.world), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, world: str) -> Tensor:
        ctx.world = world
        return ops.all_reduce(x, "sum", "auto", world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Replicated.apply(grad, ctx.world), None


def replicated(world: World, x: Tensor) -> Tensor:
    """Return x, which is the same on all ranks; its gradient is the sum of all ranks' gradients."""
    result: Tensor = _Replicated.apply(x, world.name)
    return result


def total(world: World, x: Tensor) -> Tensor:
    """Return the sum of all ranks' x, for uses that are the same on all ranks: one loss in all.

    So the gradient of x is that of the sum, where world.all_reduce would add it up over ranks.
    """
    result: Tensor = _Total.apply(x, world.name)
    return result
