"""The GEMM main loop that all fused kernels share, and a persistent GEMM made of it.

    out = activation(A @ B + bias), accumulated in float32

A and B are views by strides: NN, NT, TN and TT are one kernel, nothing is copied. An operand comes
as a tensor descriptor, made by the host, where the target has TMA and the tensor is aligned for it,
else as pointers (`operand`). float32 is multiplied as it is, without tf32.

One plain loop over K, so that Triton pipelines it: a loop inside of which something waits is not,
and a short one is mostly filling and draining.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import tiles

__all__ = [
    "Tiles", "accumulate", "emit", "launch_arguments", "matmul", "operand", "swizzle", "valid",
]  # fmt: skip

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = (None, "silu")
# How an operand is given: as a view, or as a descriptor of the matrix or of its transpose.
VIEW, ROWS, COLUMNS = "view", "rows", "columns"
_ALIGNED = 16  # bytes, that TMA asks of the base and of every stride but the last


@dataclass(frozen=True)
class Tiles:
    """What every config of a fused op has."""

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    group_m: int = 8  # row tiles whose columns are taken together, for the L2 cache
    descriptors: bool = True  # where the target has TMA and the tensors are aligned for it
    num_warps: int = 8
    num_stages: int = 3


def valid(config: Tiles, dtype: torch.dtype) -> str | None:
    """None, or why these tiles can't be used."""
    for name in ("tile_m", "tile_n", "tile_k"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            return f"{name} {size} is not a power of two of at least 16"
    if config.group_m < 1 or config.num_stages < 1:
        return f"group_m {config.group_m} and num_stages {config.num_stages} must be at least 1"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps {config.num_warps}: expected 1, 2, 4, 8 or 16"
    shared = config.num_stages * config.tile_k * (config.tile_m + config.tile_n) * dtype.itemsize
    if shared > _SHARED:
        return (
            f"{config.num_stages} stages of tiles {config.tile_m}x{config.tile_k} and "
            f"{config.tile_k}x{config.tile_n} of {dtype} take {shared:,} bytes of shared memory, "
            f"and a program has at most {_SHARED:,}"
        )
    return None


_SHARED = 227 << 10  # of sm_90, the largest; a target with less refuses when it compiles


def operand(tensor: torch.Tensor, block: tuple[int, int], descriptors: bool) -> tuple[Any, str]:
    """A matrix as a kernel takes it, and which way: VIEW, ROWS or COLUMNS."""
    for matrix, sizes, kind in ((tensor, block, ROWS), (tensor.T, block[::-1], COLUMNS)):
        if descriptors and _describable(matrix):
            shape, strides = list(matrix.shape), list(matrix.stride())
            return TensorDescriptor(matrix, shape, strides, list(sizes)), kind
    return tiles.view(tensor), VIEW


def _describable(matrix: torch.Tensor) -> bool:
    step = matrix.stride(0) * matrix.itemsize
    return (
        matrix.device.type != "cuda" or torch.cuda.get_device_capability(matrix.device) >= (9, 0)
    ) and (
        matrix.numel() > 0 and matrix.stride(1) == 1 and step > 0
        and step % _ALIGNED == 0 and matrix.data_ptr() % _ALIGNED == 0
    )  # fmt: skip


@triton.jit
def swizzle(tile, rows, cols, GROUP_M: tl.constexpr):
    """Row and column of a tile's number: GROUP_M rows of tiles are walked column by column."""
    first = tile // (GROUP_M * cols) * GROUP_M
    height = tl.minimum(rows - first, GROUP_M)  # the last group may have fewer
    within = tile % (GROUP_M * cols)
    return first + within % height, within // height


@triton.jit
def block_of(x, row, col, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """A block of an operand, zero outside of it."""
    if KIND == "view":
        return tiles.load(x, row, col, ROWS, COLS)
    elif KIND == "rows":
        return x.load([row, col])
    else:
        return x.load([col, row]).T


@triton.jit
def accumulate(
    acc, a, b, row, col, first, last, K, shift,
    SHARDS: tl.constexpr, A_KIND: tl.constexpr, B_KIND: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """acc + A @ B: A's rows from `row`, B's columns from `col`, blocks `first` to `last` along K.

    B has SHARDS shards of K rows one below the other. A's blocks begin in shard `shift` of B, go on
    to the next, and from the last to the first.
    """
    blocks = tl.cdiv(K, TILE_K)
    for block in tl.range(first, last):
        x = block_of(a, row, block * TILE_K, A_KIND, TILE_M, TILE_K)
        if SHARDS == 1:
            y = block_of(b, block * TILE_K, col, B_KIND, TILE_K, TILE_N)
        else:
            shard = (block // blocks + shift) % SHARDS
            k = block % blocks * TILE_K
            if B_KIND == "view":  # a part, so that what belongs to the next shard reads as zero
                y = tiles.load(tiles.part(b, shard * K, K), k, col, TILE_K, TILE_N)
            else:
                y = block_of(b, shard * K + k, col, B_KIND, TILE_K, TILE_N)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def emit(out, bias, acc, row, col, ACTIVATION: tl.constexpr):
    """Write a tile of the result: bias per column, activation, the output's type."""
    if bias is not None:
        columns = col + tl.arange(0, acc.shape[1])
        acc += tl.load(bias + columns, mask=columns < out.cols, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION == "silu":
        acc = acc * tl.sigmoid(acc)
    tiles.store(out, row, col, acc)


@triton.jit
def _gemm_kernel(
    a, b, out, bias, K,
    ACTIVATION: tl.constexpr, A_KIND: tl.constexpr, B_KIND: tl.constexpr, GROUP_M: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.cdiv(out.rows, TILE_M), tl.cdiv(out.cols, TILE_N)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0)):
        i, j = swizzle(tile, rows, cols, GROUP_M)
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        acc = accumulate(
            acc, a, b, i * TILE_M, j * TILE_N, 0, tl.cdiv(K, TILE_K), K, 0,
            1, A_KIND, B_KIND, TILE_M, TILE_N, TILE_K,
        )  # fmt: skip
        emit(out, bias, acc, i * TILE_M, j * TILE_N, ACTIVATION)


def launch_arguments(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, config: Tiles,
) -> tuple[tuple, dict[str, Any]]:  # fmt: skip
    a_given, a_kind = operand(a, (config.tile_m, config.tile_k), config.descriptors)
    b_given, b_kind = operand(b, (config.tile_k, config.tile_n), config.descriptors)
    return (a_given, b_given, tiles.view(out), bias, a.shape[1]), dict(
        ACTIVATION=activation, A_KIND=a_kind, B_KIND=b_kind, GROUP_M=config.group_m,
        TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, config: Tiles, programs: int,
) -> torch.Tensor:  # fmt: skip
    """Launch a GEMM into `out`. What the tensors must be is the caller's to check."""
    grid = triton.cdiv(out.shape[0], config.tile_m) * triton.cdiv(out.shape[1], config.tile_n)
    if grid > 0:
        args, options = launch_arguments(a, b, out, bias, activation, config)
        _gemm_kernel[(min(grid, programs),)](*args, **options)
    return out
