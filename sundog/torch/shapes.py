"""Fake kernels of the ops of library.py, which return tensors of the results' shapes.

When a graph is traced, they raise the kernel's own errors for what it would refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import gpu_limits
from ..collectives._given import has_views
from ..collectives._quantized import wire_of
from ..collectives._reduce import check
from ..collectives._unequal import check_splits, check_sums
from ..fused import all_reduce_rms_norm as rms_norm
from ..fused import moe_dispatch as moe
from ..fused._scaled import FP8
from .names import find_world


def on_device(op: str, arguments: str, shape: Callable[..., Any]) -> Callable[..., Any]:
    """Return the fake kernel, which raises for any tensor that is not on this rank's device.

    torch also runs it in place of a real kernel if one of the tensors is on meta, and would return
    unwritten memory.
    """
    names = [each.split()[-1] for each in arguments.split(", ")]

    def fake(*given: Any) -> Any:
        device = find_world(given[-1]).device
        for name, x in zip(names, given, strict=False):
            if isinstance(x, Tensor) and x.device.type != device.type:
                raise ValueError(
                    f"{op}: {name} is on {x.device}, but this rank is on {device}; move it"
                )
        return shape(*given)

    return fake


def _size(world: str) -> int:
    return find_world(world).size


def _check_reduction(name: str, op: str, x: Tensor) -> None:
    if not has_views(x, op):
        check(name, op, x.dtype)


def same(x: Tensor, src: int, algo: str, world: str) -> Tensor:
    return x.new_empty(x.shape)  # contiguous, whatever x is


def reduced(x: Tensor, op: str, algo: str, world: str) -> Tensor:
    _check_reduction("all_reduce", op, x)
    return x.new_empty(x.shape)  # contiguous, whatever x is


def reduced_to_one(x: Tensor, dst: int, op: str, algo: str, world: str) -> Tensor:
    _check_reduction("reduce", op, x)
    return x.new_empty(x.shape)  # contiguous, whatever x is


def whole(x: Tensor, dst: int, algo: str, world: str) -> Tensor:
    return x.new_empty(whole_shape(x, _size(world)))


def whole_shape(x: Tensor, size: int) -> tuple[int, ...]:
    return (size * x.shape[0], *x.shape[1:]) if x.dim() else (size,)


def gathered(x: Tensor, splits: list[int] | None, algo: str, world: str) -> Tensor:
    if splits is None:
        return x.new_empty(whole_shape(x, _size(world)))
    rows = x.shape[0] if x.dim() else 1
    if len(splits) != _size(world) or rows not in splits:  # at any place, since ranks share a graph
        check_splits(find_world(world), list(splits), rows)
    return x.new_empty((sum(splits), *x.shape[1:]))


def scattered(x: Tensor, op: str, algo: str, world: str) -> Tensor:
    _check_reduction("reduce_scatter", op, x)
    return _slice("reduce_scatter", x, _size(world))


def part(x: Tensor, src: int, algo: str, world: str) -> Tensor:
    return _slice("scatter", x, _size(world))


def _slice(op: str, x: Tensor, size: int) -> Tensor:
    length = x.shape[0] if x.dim() else 1
    if length % size:
        raise ValueError(
            f"{op}: x of shape {tuple(x.shape)} does not split into {size} equal slices"
        )
    return x.new_empty((length // size, *x.shape[1:]))


def exchanged(
    x: Tensor, in_splits: list[int] | None, out_splits: list[int] | None, algo: str, world: str
) -> Tensor:
    if in_splits is not None and all(isinstance(n, int) for n in in_splits):
        rows = x.shape[0] if x.dim() else 1
        check_sums("in_splits", list(in_splits), rows, "x")
    return x.new_empty((x.shape[0] if out_splits is None else sum(out_splits), *x.shape[1:]))


def all_gathered_product(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None,
    out_dtype: torch.dtype | None, shard: str, algo: str, world: str,
) -> Tensor:  # fmt: skip
    size = _size(world)
    _check_matrix("all_gather_matmul", a)
    rows, inner = (size, 1) if shard == "m" else (1, size)
    return _product("all_gather_matmul", a, b, a.shape[0] * rows, a.shape[1] * inner, out_dtype)


def _check_matrix(op: str, a: Tensor) -> None:
    if a.dim() != 2:
        raise ValueError(f"{op}: a of shape {tuple(a.shape)}: expected two dimensions")


def by_product(op: str) -> Callable[..., Tensor]:
    def shape(
        a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None,
        out_dtype: torch.dtype | None, algo: str, world: str,
    ) -> Tensor:  # fmt: skip
        size = _size(world)
        slices = size if op == "matmul_reduce_scatter" else 1
        copies = size if op == "matmul_all_gather" else 1
        _check_matrix(op, a)
        if a.shape[0] % slices:
            raise ValueError(
                f"{op}: the {a.shape[0]} rows of a do not split into {slices} equal slices"
            )
        return _product(op, a, b, a.shape[0] * copies // slices, a.shape[1], out_dtype)

    return shape


def normed(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None, gemma: bool,
    quant: str, scale: Tensor | None, both: bool, fp8: torch.dtype | None, algo: str, world: str,
) -> list[Tensor]:  # fmt: skip
    """Return what all_reduce_rms_norm does: normed, quantised, scales, residual, if they exist."""
    name = "all_reduce_rms_norm"
    if x.dim() < 1:
        raise ValueError(f"{name}: x is a scalar, expected rows, [..., hidden]")
    size, hidden = _size(world), x.shape[-1]
    kind = fp8 or gpu_limits.here().fp8
    problem = rms_norm.Problem(
        x.numel() // max(hidden, 1), hidden, x.dtype, size, eps, bias is not None, gemma, quant,
        scale is not None, both, kind,
    )  # fmt: skip
    refused = rms_norm.unfit(problem)
    if refused is not None:
        raise ValueError(f"{name}: {refused}")
    rms_norm.check_shapes(problem, x, residual, weight, bias, scale)
    found = [x.new_empty(x.shape)] if both or not quant else []  # contiguous, whatever x is
    if quant:
        found.append(x.new_empty(x.shape, dtype=kind))
        if scale is None:
            found.append(x.new_empty((*x.shape[:-1], problem.groups), dtype=torch.float32))
    return [*found, x.new_empty(x.shape)]


def _product(
    op: str, a: Tensor, b: Tensor, rows: int, inner: int, dtype: torch.dtype | None
) -> Tensor:
    if b.dim() != 2 or b.shape[0] != inner:
        raise ValueError(
            f"{op}: b has shape {tuple(b.shape)}, expected {inner} rows and two dimensions"
        )
    return a.new_empty((rows, b.shape[1]), dtype=dtype or a.dtype)


def wire_named(op: str, wire: str) -> torch.dtype:
    """Return the dtype on the wire for "fp8", "int8" or the name of a dtype."""
    return wire_of(op, wire if wire in ("fp8", "int8") else getattr(torch, wire, wire))


def quantized_sum(x: Tensor, op: str, wire: str, algo: str, world: str) -> Tensor:
    wire_named("quantized_all_reduce", wire)
    return x.new_empty(x.shape)


def quantized_whole(x: Tensor, wire: str, algo: str, world: str) -> Tensor:
    size = _size(world)
    wire_named("quantized_all_gather", wire)
    return x.new_empty(whole_shape(x, size))


def all_gathered_scaled(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
    activation: str | None, out_dtype: torch.dtype | None, shard: str, algo: str, world: str,
) -> Tensor:  # fmt: skip
    size = _size(world)
    _check_matrix("scaled_all_gather_matmul", a)
    rows, inner = (size, 1) if shard == "m" else (1, size)
    shape = (a.shape[0] * rows, a.shape[1] * inner)
    return _scaled_product("scaled_all_gather_matmul", a, b, *shape, out_dtype)


def scaled_sum(op: str) -> Callable[..., Tensor]:
    def shape(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: torch.dtype | None,
        algo: str, world: str,
    ) -> Tensor:  # fmt: skip
        size = _size(world)
        slices = size if op == "scaled_matmul_reduce_scatter" else 1
        if a.dim() != 2 or a.shape[0] % slices:
            raise ValueError(
                f"{op}: a of shape {tuple(a.shape)}: expected rows that split into {slices} slices"
            )
        return _scaled_product(op, a, b, a.shape[0] // slices, a.shape[1], out_dtype)

    return shape


def _scaled_product(
    op: str, a: Tensor, b: Tensor, rows: int, inner: int, dtype: torch.dtype | None
) -> Tensor:
    if a.dtype not in FP8 or a.dtype != b.dtype:
        raise ValueError(
            f"{op}: a is of {a.dtype} and b of {b.dtype}; expected the same FP8 type of both"
        )
    return _product(op, a, b, rows, inner, dtype or torch.bfloat16)


def dispatched(
    x: Tensor, ids: Tensor, experts: int, max_tokens: int, capacity: int, algo: str, world: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, counts, and the slots that moe_combine needs."""
    size = _size(world)
    problem = moe.Problem(
        max_tokens or x.shape[0], x.shape[1], x.dtype, size, experts, ids.shape[1], capacity
    )
    refused = moe.unfit(problem)
    if refused is not None:
        raise ValueError(f"moe_dispatch: {refused}")
    counts, tokens = moe.split(problem, x.new_empty(problem.out_bytes, dtype=torch.uint8))
    return tokens, counts.clone(), ids.new_empty(ids.shape, dtype=torch.int32)


def combined(
    y: Tensor, ids: Tensor, slots: Tensor, weights: Tensor, experts: int, max_tokens: int,
    capacity: int, algo: str, world: str,
) -> Tensor:  # fmt: skip
    return y.new_empty((ids.shape[0], y.shape[-1]))
