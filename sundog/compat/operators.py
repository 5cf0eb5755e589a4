"""CPU kernels for torch.ops.symm_mem.* while ranks run, by collectives of the group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from . import stream_kernels as kernels
from .patches import current

__all__ = ["register", "write_value"]


def _group(name: str) -> Any:
    return current().group_named(name)


def one_shot_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    result = input.clone()
    operator = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}[reduce_op]
    dist.all_reduce(result, operator, group=_group(group_name))
    return result


def one_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    return out.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return input.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def multimem_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return two_shot_all_reduce_(input, reduce_op, group_name)


def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    whole = _gathered(A, gather_dim, group_name)
    return (whole if return_A else None), [whole @ B for B in Bs]


def _gathered(x: Tensor, dim: int, group_name: str) -> Tensor:
    group = _group(group_name)
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    total = one_shot_all_reduce(A @ B, reduce_op, group_name)
    group = _group(group_name)
    return total.chunk(group.size(), scatter_dim)[group.rank()].contiguous()


def get_remote_tensors(x: Tensor, group_name: str) -> list[Tensor]:
    handle: Any = symm_mem.rendezvous(x, _group(group_name))
    return [handle.get_remote_tensor(r, x.shape, x.dtype) for r in range(handle.world_size)]


# torch.distributed._functional_collectives: c10d resolves their groups in C++, by name


def all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return one_shot_all_reduce(input, reduce_op, group_name)


def all_gather_into_tensor(input: Tensor, group_size: int, group_name: str) -> Tensor:
    return _gathered(input, 0, group_name)


def reduce_scatter_tensor(
    input: Tensor, reduce_op: str, group_size: int, group_name: str
) -> Tensor:
    total = one_shot_all_reduce(input, reduce_op, group_name)
    return total.chunk(group_size)[_group(group_name).rank()].clone()


def wait_tensor(tensor: Tensor) -> Tensor:
    return tensor


_FUNCTIONAL = (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, wait_tensor)
_KERNELS = (
    one_shot_all_reduce, one_shot_all_reduce_out, two_shot_all_reduce_, multimem_all_reduce_,
    fused_all_gather_matmul, fused_matmul_reduce_scatter, get_remote_tensors,
)  # fmt: skip


def write_value(rank: Any, input: Tensor, offset: int, val: int) -> Tensor:
    """Stand for torch.ops.symm_mem.stream_write_value32_: a signal, and no write of the host's."""
    rank.hold(input)
    with torch._C.DisableTorchFunction():
        address = input.data_ptr() + 4 * offset
    kernels.write_value[(1,)](address, val)
    return input


def register() -> list[Any]:
    """Register the kernels. Destroying the returned libraries takes them back."""
    libraries = []
    for name, theirs in (("symm_mem", _KERNELS), ("_c10d_functional", _FUNCTIONAL)):
        library: Any = torch.library.Library(name, "IMPL")
        for kernel in theirs:
            library.impl(kernel.__name__, torch.no_grad()(kernel), "CPU", allow_override=True)
        libraries.append(library)
    return libraries
