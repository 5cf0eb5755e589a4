"""torch's symm_mem ops by sundog, which Inductor's micro-pipeline pass, vLLM's async TP and
torchtitan call, also on a CPU.

    patched = sundog.torch.enable()        # registers kernels for CPU tensors; says what it patches
    ...
    patched.disable()                      # undoes all of it; also at the end of a `with`

A group's name leads to a world: the world of that name (on `sim`), else one over the process group
of that name, which is opened when the first op needs it: on `shm` for CPU tensors, on `symm` for
CUDA tensors. torch has its own CUDA kernels; `enable(cuda=True)` replaces them by sundog's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from .. import launch
from ..errors import WorldClosed
from ..fused._gemm import DTYPES
from .names import find_world


def world_of_group(name: str, is_cuda: bool) -> Any:
    """Return the open world of a group's name, or open one. All members do so together."""
    try:
        return find_world(name)
    except WorldClosed as error:
        try:
            group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            raise WorldClosed(
                f"there is no process group named {name!r}: it was destroyed, or was never made in "
                f"this process. Pass group.group_name of a group that exists. And {error}"
            ) from None
    own = getattr(group, "world", None)  # of the process group "sundog", which closes it
    if own is not None and own.device.type == ("cuda" if is_cuda else "cpu"):
        return own
    key = "" if group is dist.group.WORLD else name
    world = launch._initialized.get(key)
    if world is None or world._closed:
        world = launch.init("symm" if is_cuda else "shm", group=group)
    return world


def _dim(x: Tensor, dim: int, name: str) -> int:
    """Count a dimension from 0. Refuse one that x does not have, like torch's own kernels."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{name} {dim}: expected one from {-x.ndim} to {x.ndim - 1}")
    return dim % x.ndim


def _rows(x: Tensor, dim: int) -> Tensor:
    """View as a matrix whose rows begin with dimension `dim`."""
    return x.movedim(dim, 0).flatten(0, -2)


def _unrows(rows: Tensor, like: Tensor, dim: int) -> Tensor:
    """Do the reverse, for a matrix with other columns and another number of rows."""
    inner = like.movedim(dim, 0).shape[1:-1]
    return rows.unflatten(0, (-1, *inner)).movedim(0, dim) if inner else rows


def _gathered(world: Any, x: Tensor, dim: int) -> Tensor:
    whole: Tensor = world.all_gather(x.movedim(dim, 0).contiguous())
    return whole.movedim(0, dim)


def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    world, dim = world_of_group(group_name, A.is_cuda), _dim(A, gather_dim, "gather_dim")
    whole = _gathered(world, A, dim) if return_A or A.dtype not in DTYPES else None
    if A.dtype not in DTYPES:
        assert whole is not None
        return whole if return_A else None, [whole @ B for B in Bs]
    if dim == A.ndim - 1:
        products = [world.all_gather_matmul(A.flatten(0, -2), B, shard="k") for B in Bs]
        return whole, [each.view(*A.shape[:-1], each.shape[1]) for each in products]
    products = [world.all_gather_matmul(_rows(A, dim), B, shard="m") for B in Bs]
    return whole, [_unrows(each, A, dim) for each in products]


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    world, dim = world_of_group(group_name, A.is_cuda), _dim(A, scatter_dim, "scatter_dim")
    if A.dtype not in DTYPES or dim == A.ndim - 1 or reduce_op not in ("sum", "avg"):
        return _scattered(world, A @ B, reduce_op, dim)
    rows, columns = _rows(A, dim), B
    if not A.is_cuda:  # partial sums of 16 bits lose digits without saving time
        rows, columns = rows.float(), B.float()
    product = _unrows(world.matmul_reduce_scatter(rows, columns), A, dim)
    return (product / world.size if reduce_op == "avg" else product).to(A.dtype)


def _scattered(world: Any, x: Tensor, reduce_op: str, dim: int) -> Tensor:
    mine: Tensor = world.reduce_scatter(x.movedim(dim, 0).contiguous(), reduce_op)
    return mine.movedim(0, dim)


# For a list of dtypes torch passes its own numbers (c10/core/ScalarType.h).
_CODES: dict[Any, torch.dtype] = {
    5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn,
}  # fmt: skip


def _scaled_product(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None,
    result_scale: Tensor | None, dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Do as torch._scaled_mm, in float32."""
    product = (a.float() * scales[0]) @ (b.float() * scales[1])
    product = product if bias is None else product + bias
    product = product if result_scale is None else product * result_scale
    return product.to(_CODES.get(dtype, dtype) or a.dtype)


def fused_all_gather_scaled_matmul(
    A: Tensor, Bs: list[Tensor], A_scale: Tensor, B_scales: list[Tensor], gather_dim: int,
    group_name: str, biases: list[Tensor | None], result_scales: list[Tensor | None],
    out_dtypes: list[torch.dtype | None], use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    world, dim = world_of_group(group_name, A.is_cuda), _dim(A, gather_dim, "gather_dim")
    whole = _gathered(world, A.view(torch.uint8), dim).view(A.dtype)
    is_part = A_scale.numel() > 1 and A_scale.shape[:-1] == A.shape[:-1]
    scale = _gathered(world, A_scale, dim) if is_part else A_scale
    return whole, [
        _scaled_product(whole, B, (scale, b_scale), bias, result_scale, dtype)
        for B, b_scale, bias, result_scale, dtype in zip(
            Bs, B_scales, biases, result_scales, out_dtypes, strict=True
        )
    ]


def fused_scaled_matmul_reduce_scatter(
    A: Tensor, B: Tensor, A_scale: Tensor, B_scale: Tensor, reduce_op: str, orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int, group_name: str, output_shape: list[int] | None,
    bias: Tensor | None = None, result_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    world = world_of_group(group_name, A.is_cuda)
    product = _scaled_product(A, B, (A_scale, B_scale), bias, result_scale, out_dtype)
    if output_shape is not None:
        product = product.view(*output_shape[:-1], B.shape[1])
    return _scattered(world, product, reduce_op, _dim(product, orig_scatter_dim, "scatter_dim"))


def one_shot_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    world = world_of_group(group_name, input.is_cuda)
    result: Tensor = world.all_reduce(input.contiguous(), reduce_op, algo="one_shot")
    return result


def one_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    return out.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    world = world_of_group(group_name, input.is_cuda)
    return input.copy_(world.all_reduce(input.contiguous(), reduce_op, algo="two_shot"))


def multimem_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """Do as two_shot, since simulated memory has no multicast. Not for CUDA tensors."""
    return two_shot_all_reduce_(input, reduce_op, group_name)


def _low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    return _gathered(world_of_group(group_name, tensor.is_cuda), tensor, 0)


def _low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return _scattered(world_of_group(group_name, tensor.is_cuda), tensor, reduce_op, 0)


def all_to_all_vdev(
    input: Tensor, out: Tensor, in_splits: Tensor, out_splits_offsets: Tensor, group_name: str
) -> None:
    """Exchange unequal parts. The host reads the splits; on a GPU it waits for them."""
    world = world_of_group(group_name, input.is_cuda)
    received = world.all_to_all(in_splits.contiguous())
    sent, expected = in_splits.tolist(), received.tolist()
    rows = input[: sum(sent)].contiguous()
    out[: sum(expected)].copy_(world.all_to_all(rows, in_splits=sent, out_splits=expected))
    out_splits_offsets[0].copy_(received)
    out_splits_offsets[1].copy_(received.cumsum(0) - received)


_CPU_ONLY = (multimem_all_reduce_,)
KERNELS: tuple[Callable[..., Any], ...] = (
    fused_all_gather_matmul, fused_matmul_reduce_scatter, fused_all_gather_scaled_matmul,
    fused_scaled_matmul_reduce_scatter, one_shot_all_reduce, one_shot_all_reduce_out,
    two_shot_all_reduce_, multimem_all_reduce_, _low_contention_all_gather,
    _low_contention_reduce_scatter, all_to_all_vdev,
)  # fmt: skip


def _mm_dtype(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply: torch has a kernel only for CUDA tensors, and models with fused ops call it."""
    return a.to(out_dtype) @ b.to(out_dtype)


_alive: list[Enabled] = []  # until `disable`: torch drops the kernels of a library that is gone


class Enabled:
    """What `enable` did. `patched` describes it; `disable` undoes it."""

    def __init__(self, devices: tuple[str, ...], explain: bool) -> None:
        self._had_nccl: Callable[[], bool] = (
            _alive[0]._had_nccl if _alive else dist.is_nccl_available
        )
        self._has_mm: bool = (
            _alive[0]._has_mm
            if _alive
            else torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "CPU")
        )
        _alive.append(self)
        self.patched: list[str] = []
        self._library: Any = torch.library.Library("symm_mem", "IMPL")
        for device in devices:
            for kernel in KERNELS:
                if device == "CPU" or kernel not in _CPU_ONLY:
                    self._register(kernel, device, explain)
        self._aten: Any = torch.library.Library("aten", "IMPL")
        if not self._has_mm:
            self._aten.impl("mm.dtype", _mm_dtype, "CPU", allow_override=True)
            self.patched.append("torch.mm(..., out_dtype=...) has a CPU kernel")
        if not dist.is_nccl_available():
            dist.is_nccl_available = lambda: True  # or the micro-pipeline pass never fuses
            self.patched.append("torch.distributed.is_nccl_available returns True")

    def _register(self, kernel: Callable[..., Any], device: str, explain: bool) -> None:
        called = _explained(kernel, device) if explain else kernel
        self._library.impl(kernel.__name__, torch.no_grad()(called), device, allow_override=True)
        self.patched.append(f"torch.ops.symm_mem.{kernel.__name__} has sundog's {device} kernel")

    def disable(self) -> None:
        """Undo everything. Worlds that ops have opened stay open until their process ends."""
        if self not in _alive:
            return
        _alive.remove(self)
        self._library._destroy()
        self._aten._destroy()
        if not _alive:  # others still use it
            dist.is_nccl_available = self._had_nccl
        self.patched.clear()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: object) -> None:
        self.disable()


def _explained(kernel: Callable[..., Any], device: str) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def explained(*args: Any, **kwargs: Any) -> Any:
        shapes = [tuple(a.shape) for a in args if isinstance(a, Tensor)]
        print(f"symm_mem.{kernel.__name__} of {shapes}: sundog's {device} kernel", file=sys.stderr)
        return kernel(*args, **kwargs)

    return explained


def enable(cuda: bool = False, explain: bool = False) -> Enabled:
    """Register sundog's kernels for torch's symm_mem ops: for CPU tensors, with `cuda` for CUDA's.

    Where torch was built without NCCL, it also makes torch.distributed.is_nccl_available true, as
    Inductor's micro-pipeline pass requires. With `explain` each call says which kernel ran. The
    pass uses a group only after torch's enable_symm_mem_for_group(group.group_name).
    """
    assert symmetric.lib is not None  # importing it defines the ops
    return Enabled(("CPU", "CUDA") if cuda else ("CPU",), explain)
