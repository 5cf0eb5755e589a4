"""Every collective and fused op as an op of torch: torch.ops.sundog.all_reduce and so on.

`TABLE` has a row per op: its schema, the shape of its result (the fake kernel), what the backward
needs, and the backward formula. A world travels by name, as groups do in torch's functional
collectives. A formula treats the sum of all ranks' losses as the loss, so the backward of an
all-reduce is an all-reduce; formulas call ops of this table, so they can be differentiated again.
The backward of a fused op is the fused op that mirrors it.

Kernels are registered by Library.impl and not by torch.library.custom_op, which costs more on the
host at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives._reduce import check
from ..ops.load import functions
from .names import find_world

__all__ = ["TABLE", "TorchOp", "ops"]

ops = torch.ops.sundog


class TorchOp(NamedTuple):
    """A row of the table."""

    arguments: str  # of the schema; `algo` and `world` follow
    shape: Callable[..., Tensor]  # the fake kernel
    save: Callable[..., None]  # keeps what the backward needs: save(ctx, inputs, output)
    backward: Callable[..., Any]  # gradients of the arguments, from ctx and that of the result


# fake kernels: a tensor of the result's shape, or the sentence that the kernel would raise


def _checked(op: str, x: Tensor, world: str, name: str = "x") -> int:
    """Return the number of ranks; raise for a tensor that the kernel would not take."""
    found = find_world(world)
    if x.device.type != found.device.type:
        raise ValueError(
            f"{op}: {name} is on {x.device}, but this rank is on {found.device}; move it"
        )
    if name == "x" and not x.is_contiguous():
        raise ValueError(
            f"{op}: x of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous; pass "
            "x.contiguous()"
        )
    return found.size


def _same(x: Tensor, src: int, algo: str, world: str) -> Tensor:
    _checked("broadcast", x, world)
    return torch.empty_like(x)


def _reduced(x: Tensor, op: str, algo: str, world: str) -> Tensor:
    _checked("all_reduce", x, world)
    check("all_reduce", op, x.dtype)
    return torch.empty_like(x)


def _reduced_to_one(x: Tensor, dst: int, op: str, algo: str, world: str) -> Tensor:
    _checked("reduce", x, world)
    check("reduce", op, x.dtype)
    return torch.empty_like(x)


def _whole(op: str) -> Callable[..., Tensor]:
    def shape(x: Tensor, *rest: Any) -> Tensor:
        return x.new_empty(_whole_shape(x, _checked(op, x, rest[-1])))

    return shape


def _whole_shape(x: Tensor, size: int) -> tuple[int, ...]:
    return (size * x.shape[0], *x.shape[1:]) if x.dim() else (size,)


def _scattered(x: Tensor, op: str, algo: str, world: str) -> Tensor:
    check("reduce_scatter", op, x.dtype)
    return _slice("reduce_scatter", x, _checked("reduce_scatter", x, world))


def _part(x: Tensor, src: int, algo: str, world: str) -> Tensor:
    return _slice("scatter", x, _checked("scatter", x, world))


def _slice(op: str, x: Tensor, size: int) -> Tensor:
    length = x.shape[0] if x.dim() else 1
    if length % size:
        raise ValueError(
            f"{op}: x of shape {tuple(x.shape)} does not split into {size} equal slices"
        )
    return x.new_empty((length // size, *x.shape[1:]))


def _exchanged(
    x: Tensor, in_splits: list[int] | None, out_splits: list[int] | None, algo: str, world: str
) -> Tensor:
    _checked("all_to_all", x, world)
    return x.new_empty((x.shape[0] if out_splits is None else sum(out_splits), *x.shape[1:]))


def _all_gather_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None,
    out_dtype: torch.dtype | None, shard: str, algo: str, world: str,
) -> Tensor:  # fmt: skip
    size = _checked("all_gather_matmul", a, world, "a")
    rows, inner = (size, 1) if shard == "m" else (1, size)
    return _product("all_gather_matmul", a, b, a.shape[0] * rows, a.shape[1] * inner, out_dtype)


def _matmul_reduce(op: str) -> Callable[..., Tensor]:
    def shape(
        a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None,
        out_dtype: torch.dtype | None, algo: str, world: str,
    ) -> Tensor:  # fmt: skip
        slices = _checked(op, a, world, "a") if op == "matmul_reduce_scatter" else 1
        if a.shape[0] % slices:
            raise ValueError(
                f"{op}: the {a.shape[0]} rows of a do not split into {slices} equal slices"
            )
        return _product(op, a, b, a.shape[0] // slices, a.shape[1], out_dtype)

    return shape


def _product(
    op: str, a: Tensor, b: Tensor, rows: int, inner: int, dtype: torch.dtype | None
) -> Tensor:
    if b.dim() != 2 or b.shape[0] != inner:
        raise ValueError(
            f"{op}: b has shape {tuple(b.shape)}, expected {inner} rows and two dimensions"
        )
    return a.new_empty((rows, b.shape[1]), dtype=dtype or a.dtype)


# what a backward needs


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    """Keep the arguments but the tensor, whose shape is enough."""
    x, *ctx.asked = inputs
    ctx.shape = x.shape


def _keep_sum(op: str, place: int) -> Callable[..., None]:
    """Keep the same of a reduction: only sum and avg have a formula."""

    def save(ctx: Any, inputs: tuple, output: Tensor) -> None:
        if inputs[place] not in ("sum", "avg"):
            raise ValueError(
                f"{op}: x requires grad, and {op} has no backward formula for op "
                f"{inputs[place]!r}: the gradient would be lost. Call it inside `with "
                "torch.no_grad():`, or pass x.detach()."
            )
        _keep(ctx, inputs, output)

    return save


def _keep_matrices(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, bias, *ctx.asked = inputs
    ctx.save_for_backward(a, b, bias)


# backward formulas


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple:
    op, algo, world = ctx.asked
    return ops.all_reduce(grad.contiguous(), op, algo, world), None, None, None


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple:
    total = ops.reduce_scatter(grad.contiguous(), "sum", "auto", ctx.asked[-1])
    return total.view(ctx.shape), None, None


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    op, _, world = ctx.asked
    whole = ops.all_gather(grad.contiguous(), "auto", world).view(ctx.shape)
    return whole / find_world(world).size if op == "avg" else whole, None, None, None


def _all_to_all_backward(ctx: Any, grad: Tensor) -> tuple:
    in_splits, out_splits, algo, world = ctx.asked
    back = ops.all_to_all(grad.contiguous(), out_splits, in_splits, algo, world)
    return back.view(ctx.shape), None, None, None, None


def _broadcast_backward(ctx: Any, grad: Tensor) -> tuple:
    src, _, world = ctx.asked
    return ops.reduce(grad.contiguous(), src, "sum", "auto", world), None, None, None


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple:
    dst, op, _, world = ctx.asked
    everywhere = ops.broadcast(grad.contiguous(), dst, "auto", world)
    grad = everywhere / find_world(world).size if op == "avg" else everywhere
    return grad, None, None, None, None


def _gather_backward(ctx: Any, grad: Tensor) -> tuple:
    dst, _, world = ctx.asked
    return ops.scatter(grad.contiguous(), dst, "auto", world).view(ctx.shape), None, None, None


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    src, _, world = ctx.asked
    return ops.gather(grad.contiguous(), src, "auto", world).view(ctx.shape), None, None, None


def _before_activation(
    grad: Tensor, activation: str | None, product: Callable[[], Tensor], dtype: torch.dtype
) -> Tensor:
    """Return the gradient of product plus bias. silu's needs that sum, which is computed again."""
    if activation is not None:
        grad = torch.ops.aten.silu_backward(grad, product().to(grad.dtype))
    return grad.to(dtype).contiguous()


def _all_gather_matmul_backward(ctx: Any, grad: Tensor) -> tuple:
    """A @ b where A is sharded: what gathered A now scatters its gradient, and the reverse."""
    a, b, bias = ctx.saved_tensors
    activation, _, shard, _, world = ctx.asked
    grad = _before_activation(
        grad, activation,
        lambda: ops.all_gather_matmul(a, b, bias, None, grad.dtype, shard, "auto", world), a.dtype,
    )  # fmt: skip
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


def _matmul_reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple:
    a, b, bias = ctx.saved_tensors
    activation, _, _, world = ctx.asked
    grad = _before_activation(
        grad, activation,
        lambda: ops.matmul_reduce_scatter(a, b, bias, None, grad.dtype, "auto", world), a.dtype,
    )  # fmt: skip
    of_a = of_b = of_bias = None
    if ctx.needs_input_grad[0]:
        of_a = ops.all_gather_matmul(grad, b.t(), None, None, None, "m", "auto", world)
    if ctx.needs_input_grad[1]:
        of_b = ops.all_gather_matmul(grad.t(), a, None, None, None, "k", "auto", world).t()
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum(0)
    return of_a, of_b, of_bias, *[None] * 4


def _matmul_all_reduce_backward(ctx: Any, grad: Tensor) -> tuple:
    a, b, bias = ctx.saved_tensors
    activation, _, _, world = ctx.asked
    grad = _before_activation(
        grad, activation,
        lambda: ops.matmul_all_reduce(a, b, bias, None, grad.dtype, "auto", world), a.dtype,
    )  # fmt: skip
    of_bias = grad.sum(0) if ctx.needs_input_grad[2] else None  # every rank adds its own
    total = ops.all_reduce(grad, "sum", "auto", world)
    of_a = total @ b.t() if ctx.needs_input_grad[0] else None
    of_b = a.t() @ total if ctx.needs_input_grad[1] else None
    return of_a, of_b, of_bias, *[None] * 4


_MATRICES = "Tensor a, Tensor b, Tensor? bias, str? activation, ScalarType? out_dtype"

TABLE: dict[str, TorchOp] = {
    "all_reduce": TorchOp(
        "Tensor x, str op", _reduced, _keep_sum("all_reduce", 1), _all_reduce_backward
    ),
    "all_gather": TorchOp("Tensor x", _whole("all_gather"), _keep, _all_gather_backward),
    "reduce_scatter": TorchOp(
        "Tensor x, str op", _scattered, _keep_sum("reduce_scatter", 1),
        _reduce_scatter_backward,
    ),
    "all_to_all": TorchOp(
        "Tensor x, SymInt[]? in_splits, SymInt[]? out_splits", _exchanged, _keep,
        _all_to_all_backward,
    ),
    "broadcast": TorchOp("Tensor x, int src", _same, _keep, _broadcast_backward),
    "reduce": TorchOp(
        "Tensor x, int dst, str op", _reduced_to_one, _keep_sum("reduce", 2), _reduce_backward
    ),
    "gather": TorchOp("Tensor x, int dst", _whole("gather"), _keep, _gather_backward),
    "scatter": TorchOp("Tensor x, int src", _part, _keep, _scatter_backward),
    "all_gather_matmul": TorchOp(
        f"{_MATRICES}, str shard", _all_gather_matmul, _keep_matrices, _all_gather_matmul_backward
    ),
    "matmul_reduce_scatter": TorchOp(
        _MATRICES, _matmul_reduce("matmul_reduce_scatter"), _keep_matrices,
        _matmul_reduce_scatter_backward,
    ),
    "matmul_all_reduce": TorchOp(
        _MATRICES, _matmul_reduce("matmul_all_reduce"), _keep_matrices, _matmul_all_reduce_backward
    ),
}  # fmt: skip


# kernels: the functions that a world has


def _kernel(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def kernel(*arguments: Any) -> Tensor:
        *given, algo, name = arguments
        result: Tensor = function(find_world(name), *given, algo=algo)
        return result

    return kernel


def _of_world(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or the one that a world over several machines has for it."""

    def call(world: Any, *given: Any, **options: Any) -> Any:
        spanning = getattr(type(world), "SPANNING", {})
        return spanning.get(name, function)(world, *given, **options)

    return call


def _to_one(function: Callable[..., Any], is_whole: bool) -> Callable[..., Any]:
    """An op whose result one rank gets. The others return zeros: their part in the backward."""

    def on_all(world: Any, x: Tensor, *rest: Any, algo: str) -> Tensor:
        result = function(world, x, *rest, algo=algo)
        if result is not None:
            return result
        return x.new_zeros(_whole_shape(x, world.size) if is_whole else x.shape)

    return on_all


def _rows_first(function: Callable[..., Any]) -> Callable[..., Any]:
    """all_to_all takes `out` before the splits."""
    return lambda world, x, *splits, algo: function(world, x, None, *splits, algo=algo)


def _register(library: torch.library.Library) -> None:
    found = {name: _of_world(name, function) for name, function in functions().items()}
    found["reduce"] = _to_one(found["reduce"], is_whole=False)
    found["gather"] = _to_one(found["gather"], is_whole=True)
    found["all_to_all"] = _rows_first(found["all_to_all"])
    for name, row in TABLE.items():
        library.define(f"{name}({row.arguments}, str algo, str world) -> Tensor")
        for device in ("CPU", "CUDA"):
            library.impl(name, _kernel(found[name]), device)
        torch.library.register_fake(f"sundog::{name}", row.shape, lib=library)
        torch.library.register_autograd(
            f"sundog::{name}", row.backward, setup_context=row.save, lib=library
        )


_library = torch.library.Library("sundog", "DEF")
_register(_library)
