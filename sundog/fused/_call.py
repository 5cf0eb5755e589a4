"""What the fused ops share on the host: they check matrices, and call the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.dispatch import CallOptions, call, packed
from ..ops.op import check_grad, check_plain
from . import _gemm

if TYPE_CHECKING:
    from ..world.world import World

_WIDEST = 16  # bytes of an access


def call_matrices(
    world: World, op: str, problem: Any, a: torch.Tensor, b: torch.Tensor,
    bias: torch.Tensor | None, out: torch.Tensor, options: CallOptions,
) -> torch.Tensor:  # fmt: skip
    """Run an op on matrices that were checked."""
    if out.numel() == 0:
        return out
    tensors = {"a": a, "b": b, "bias": bias, "out": out}
    passed = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    result: torch.Tensor = call(world, op, problem, passed, options, is_flat=False)
    return result


def by_rows(
    world: World, op: str, a: torch.Tensor, out: torch.Tensor | None, explain: bool,
    run: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor], times: int = 1,
    slices: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Run an op on `a`, of [..., k], as rows, by views. `out` has `times / slices` as many rows."""
    first = first_dim(op, a, times, slices)
    room, rows = None if out is None else _rows_of(out), _rows_of(a)
    if out is not None and room is None:
        raise ValueError(
            f"{op}: out of shape {tuple(out.shape)} and strides {out.stride()} has no row view; "
            "pass one that is contiguous"
        )
    if rows is None:
        rows = packed(world, op, a, explain, "a").view(-1, a.shape[-1])
    result = run(rows, room)
    return result.view(first, *a.shape[1:-1], result.shape[-1]) if out is None else out


def first_dim(op: str, a: torch.Tensor, times: int, slices: int) -> int:
    """Return the result's first dimension. Raise ValueError if that of `a` does not divide."""
    if a.shape[0] % slices:
        raise ValueError(
            f"{op}: the first dimension of a, {a.shape[0]}, does not split into {slices} equal "
            "slices; pass a.flatten(0, -2), or pad it"
        )
    return a.shape[0] * times // slices


def _rows_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor as a matrix of rows, or None if its strides allow no such view."""
    try:
        return tensor.view(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    except RuntimeError:
        return None


def check_tensors(world: World, op: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all are tensors on this rank's device. None stands for no tensor."""
    for name, tensor in tensors.items():
        if tensor is None and name in ("bias", "out"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{op}: {name} is a {type(tensor).__name__}, expected a tensor")
        check_plain(op, name, tensor)
        if tensor.device != world.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, but this rank is on {world.device}; move it"
            )
        check_grad(op, tensor, name=name)


def check_matrices(
    op: str, a: torch.Tensor, b: torch.Tensor, k: int, bias: torch.Tensor | None,
    activation: str | None, out: torch.Tensor | None, rows: int, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Raise ValueError if these can't be multiplied. Return the output, of `rows` rows."""
    if b.dim() != 2 or b.shape[0] != k:
        raise ValueError(
            f"{op}: b has shape {tuple(b.shape)}, expected {k} rows and two dimensions"
        )
    shape = rows, b.shape[1]
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or not bias.is_contiguous()):
        raise ValueError(
            f"{op}: bias has shape {tuple(bias.shape)} and strides {bias.stride()}, expected "
            f"({b.shape[1]},), an element per column of b, contiguous"
        )
    check_activation(op, activation)
    named = {"a": a, "b": b, "bias": bias}
    kinds = {name: t.dtype for name, t in named.items() if t is not None}
    if len(set(kinds.values())) > 1 or a.dtype not in _gemm.DTYPES or dtype not in _gemm.DTYPES:
        text = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise ValueError(
            f"{op}: {text}, output {dtype}: expected one of float16, bfloat16 and float32, the "
            "same for all inputs"
        )
    if out is None:
        return torch.empty(shape, dtype=dtype, device=a.device)
    named["out"] = out
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{op}: out is {tuple(out.shape)} of {out.dtype}, expected {shape} of {dtype}"
        )
    _check_memory(op, named)
    return out


def check_activation(op: str, activation: Any) -> None:
    if activation not in _gemm.ACTIVATIONS:
        raise ValueError(f"{op}: activation {activation!r}: expected None or 'silu'")


def check_shard(op: str, shard: Any) -> None:
    if shard not in ("k", "m"):
        raise ValueError(f"{op}: shard {shard!r}: expected 'k' or 'm'")


def _check_memory(op: str, named: dict[str, torch.Tensor | None]) -> None:
    """Refuse an output that shares memory with an input."""
    out = named["out"]
    assert out is not None
    for name, tensor in named.items():
        if tensor is not None and name != "out":
            check_apart(op, name, tensor, out)


def check_apart(op: str, name: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
    """Raise ValueError if the output shares memory with an input."""
    (a, end_a), (b, end_b) = _extent(tensor), _extent(out)
    if a < end_b and b < end_a:
        raise ValueError(f"{op}: out shares memory with {name}; give it memory of its own")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.itemsize if tensor.numel() else begin


def resident(refused: str | None, programs: int, num_sms: int) -> str | None:
    """Return what `valid` says, else why not all programs, which wait, fit at once, or None."""
    if refused is not None or programs <= num_sms:
        return refused
    return (
        f"{programs} programs wait for each other and {num_sms} SMs hold one each: ask for at most "
        f"{num_sms}"
    )


def hint_of(matrix: torch.Tensor) -> tuple[int, int]:
    """Return what the compiler may be promised about a matrix: see `tiles.hinted`."""
    many = _WIDEST // matrix.itemsize
    if matrix.data_ptr() % _WIDEST == 0:
        if matrix.stride(1) == 1 and matrix.stride(0) % many == matrix.shape[1] % many == 0:
            return 1, many
        if matrix.stride(0) == 1 and matrix.stride(1) % many == matrix.shape[0] % many == 0:
            return many, 1
    return 1, 1
