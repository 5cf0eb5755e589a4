"""Torch's operators on process groups, for the ranks of a simulated world.

torch.ops.symm_mem and the functional collectives (torch.ops._c10d_functional) have kernels for CUDA
alone, or find their group in C++. While ranks run they have CPU kernels by the collectives of
`groups`. Those on symmetric memory begin with a barrier, and end with one if they write that of
other ranks, as their kernels on a GPU do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from . import stream_kernels as kernels
from . import symmetric
from .patches import current

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
}  # fmt: skip


def _group(name: Any) -> Any:
    return current().group_named(name) if isinstance(name, str) else name


def _reduced(x: Tensor, reduce_op: str, group_name: Any) -> Tensor:
    if reduce_op.lower() not in _OPERATIONS:
        known = ", ".join(_OPERATIONS)
        raise ValueError(f"reduce_op={reduce_op!r}: expected one of {known}")
    result = x.clone()
    dist.all_reduce(result, _OPERATIONS[reduce_op.lower()], group=_group(group_name))
    return result


def _gathered(x: Tensor, dim: int, group_name: Any) -> Tensor:
    group = _group(group_name)
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def _share(total: Tensor, dim: int, group_name: Any) -> Tensor:
    """Return this rank's part."""
    group = _group(group_name)
    return total.chunk(group.size(), dim)[group.rank()].contiguous()


def _into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the form that writes its result to the last argument."""

    def call(*given: Any, **named: Any) -> Tensor:
        *rest, out = (*given, *named.values())
        result: Tensor = out.copy_(kernel(*rest).view(out.shape))
        return result

    return call


# torch.ops.symm_mem


def _check_symmetric(x: Tensor, what: str) -> None:
    if symmetric.find(current(), x) is None:
        raise RuntimeError(
            f"{what}: a tensor of shape {tuple(x.shape)} is not symmetric: allocate it with "
            "torch.distributed._symmetric_memory.empty"
        )


def _one_shot(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    _check_symmetric(input, "one_shot_all_reduce")
    dist.barrier(_group(group_name))  # what peers wrote here before their call
    return _reduced(input, reduce_op, group_name)


def _one_shot_copy(buffer: Tensor, local: Tensor, reduce_op: str, group_name: str) -> Tensor:
    _check_symmetric(buffer, "one_shot_all_reduce_copy")
    buffer.view(-1)[: local.numel()].copy_(local.reshape(-1))
    return _reduced(local, reduce_op, group_name)


def _two_shot(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    input.copy_(_one_shot(input, reduce_op, group_name))
    dist.barrier(_group(group_name))  # each rank has stored its part to all
    return input


def _reduce_to_root(
    input: Tensor, reduce_op: str, root: int, group_name: str, out: Tensor
) -> Tensor:
    total = _one_shot(input, reduce_op, group_name)
    return out.copy_(total) if _group(group_name).rank() == root else out


def _reduce_scatter_out(
    input: Tensor, group_name: str, split_last_dim: bool, output: Tensor
) -> Tensor:
    total = _one_shot(input, "sum", group_name)
    part = _share(total if split_last_dim else total.view(-1), -1, group_name)
    return output.copy_(part.view(output.shape))


def _all_gather_out(input: Tensor, group_name: str, out: Tensor) -> Tensor:
    _check_symmetric(out, "multimem_all_gather_out")
    out.view(-1).copy_(_gathered(input.reshape(-1), 0, group_name))
    dist.barrier(_group(group_name))  # each rank has stored its part to all
    return out


def _low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    return _gathered(tensor, 0, group_name)


def _low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return _share(_reduced(tensor, reduce_op, group_name), 0, group_name)


def _all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    whole = _gathered(A, gather_dim, group_name)
    return (whole if return_A else None), [whole @ B for B in Bs]


def _matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    return _share(_reduced(A @ B, reduce_op, group_name), scatter_dim, group_name)


def _remote_tensors(x: Tensor, group_name: str) -> list[Tensor]:
    handle: Any = symm_mem.rendezvous(x, _group(group_name))
    return [handle.get_remote_tensor(r, x.shape, x.dtype) for r in range(handle.world_size)]


def _set_words(input: Tensor, offset: int, val: int, count: int) -> Tensor:
    input.view(torch.int32)[offset : offset + count].fill_(val)
    return input


def _write_value(input: Tensor, offset: int, val: int) -> Tensor:
    """Write a word in stream order: a signal, and no write of the host's."""
    current().hold(input)
    with torch._C.DisableTorchFunction():
        address = input.data_ptr() + 4 * offset
    kernels.write_value[(1,)](address, val)
    return input


_SYMMETRIC: dict[str, Callable[..., Any]] = {
    "one_shot_all_reduce": _one_shot, "one_shot_all_reduce_out": _into(_one_shot),
    "one_shot_all_reduce_copy": _one_shot_copy,
    "one_shot_all_reduce_copy_out": _into(_one_shot_copy),
    "two_shot_all_reduce_": _two_shot, "two_shot_all_reduce_out": _into(_one_shot),
    "multimem_all_reduce_": _two_shot, "multimem_one_shot_all_reduce": _one_shot,
    "multimem_one_shot_all_reduce_out": _into(_one_shot),
    "multimem_one_shot_reduce_out": _reduce_to_root, "reduce_scatter_out": _reduce_scatter_out,
    "multimem_all_gather_out": _all_gather_out,
    "_low_contention_all_gather": _low_contention_all_gather,
    "_low_contention_reduce_scatter": _low_contention_reduce_scatter,
    "fused_all_gather_matmul": _all_gather_matmul,
    "fused_matmul_reduce_scatter": _matmul_reduce_scatter, "get_remote_tensors": _remote_tensors,
    "memset32_": _set_words, "stream_write_value32_": _write_value,
}  # fmt: skip


# torch.ops._c10d_functional


def _reduced_in_place(x: Tensor, reduce_op: str, group_name: Any) -> Tensor:
    return x.copy_(_reduced(x, reduce_op, group_name))


def _all_gather(x: Tensor, group_size: int, group_name: Any) -> Tensor:
    return _gathered(x, 0, group_name)


def _reduce_scatter(x: Tensor, reduce_op: str, group_size: int, group_name: Any) -> Tensor:
    return _share(_reduced(x, reduce_op, group_name), 0, group_name)


def _broadcast_in_place(x: Tensor, src: int, group_name: Any) -> Tensor:
    dist.broadcast(x, group=_group(group_name), group_src=src)
    return x


def _broadcast(x: Tensor, src: int, group_name: Any) -> Tensor:
    return _broadcast_in_place(x.clone(), src, group_name)


def _all_to_all(
    x: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: Any
) -> Tensor:
    out = x.new_empty(sum(output_split_sizes), *x.shape[1:])
    dist.all_to_all_single(
        out, x.contiguous(), output_split_sizes, input_split_sizes, _group(group_name)
    )
    return out


def _each(kernel: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    """Return the coalesced form: the same for each tensor of a list."""
    return lambda tensors, *rest: [kernel(x, *rest) for x in tensors]


_FUNCTIONAL: dict[str, Callable[..., Any]] = {
    "all_reduce": _reduced, "all_reduce_": _reduced_in_place,
    "all_reduce_coalesced": _each(_reduced), "all_reduce_coalesced_": _each(_reduced_in_place),
    "all_gather_into_tensor": _all_gather, "all_gather_into_tensor_out": _into(_all_gather),
    "all_gather_into_tensor_coalesced": _each(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _into(_reduce_scatter),
    "reduce_scatter_tensor_coalesced": _each(_reduce_scatter),
    "broadcast": _broadcast, "broadcast_": _broadcast_in_place, "all_to_all_single": _all_to_all,
    "wait_tensor": lambda tensor: tensor,
}  # fmt: skip


def register() -> list[Any]:
    """Register the kernels. Destroying the returned libraries takes them back."""
    libraries = []
    for name, theirs in (("symm_mem", _SYMMETRIC), ("_c10d_functional", _FUNCTIONAL)):
        library: Any = torch.library.Library(name, "IMPL")
        for operator, kernel in theirs.items():
            if hasattr(getattr(torch.ops, name), operator):  # torch 2.11 lacks some
                library.impl(operator, torch.no_grad()(kernel), "CPU", allow_override=True)
        libraries.append(library)
    return libraries
