"""The GEMM main loop that all fused kernels share, and a persistent GEMM made of it.

    out = activation(A @ B + bias), accumulated in float32

A and B are views by strides, so one kernel serves NN, NT, TN and TT without copies. The host passes
an operand as a tensor descriptor where the target has TMA and the tensor is aligned for it, else as
pointers (`operand`); so too the output (`target`). float32 is multiplied without tf32.

There is one plain loop over K, so that Triton pipelines it. Waits stand outside of it: Triton does
not pipeline a loop with their CTA barrier (docs/memory_model.md), and a short loop would mostly
fill and drain. Where everything comes by descriptors, the loops over tiles and over K are one
(`flatten`), so that the next tile is loaded while this one is written; but not where there is no
room for both (`room_beside`), as for 128 x 256 in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .. import gpu_limits
from ..device import tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = (None, "silu")
# How an operand is passed: as a view, or as a descriptor of the matrix or of its transpose.
VIEW, ROWS, COLUMNS = "view", "rows", "columns"
ALIGNED = 16  # bytes: TMA wants the base, and every stride but the last, at multiples of it


@dataclass(frozen=True)
class Tiles:
    """The fields of every config of a fused op."""

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    group_m: int = 8  # row tiles whose columns are processed together, for the L2 cache
    descriptors: bool = True  # where the target has TMA and the tensors are aligned for it
    num_warps: int = 8
    num_stages: int = 3


@dataclass(frozen=True)
class Grid(Tiles):
    """Tiles, and the number of programs that take them in turn."""

    programs: int = 132


def unfit(problem: Any) -> str | None:
    """Return why no config of any op takes this problem, or None."""
    for dtype in (problem.dtype, problem.out_dtype or problem.dtype):
        if dtype not in DTYPES:
            return f"{dtype}: expected one of float16, bfloat16 and float32"
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r}: expected None or 'silu'"
    return None


def valid_grid(config: Grid, dtype: torch.dtype) -> str | None:
    """Return why this config can't be used, or None."""
    if config.programs < 1:
        return f"programs {config.programs}: at least one must do the work"
    return valid(config, dtype)


def valid(config: Tiles, dtype: torch.dtype) -> str | None:
    """Return why these tiles can't be used, or None."""
    for name in ("tile_m", "tile_n", "tile_k"):
        size = getattr(config, name)
        if size < 16 or size & (size - 1):
            return f"{name} {size} is not a power of two of at least 16"
    if config.tile_m * config.tile_n > tl.TRITON_MAX_TENSOR_NUMEL:
        return (
            f"a tile of {config.tile_m}x{config.tile_n} has more than the "
            f"{tl.TRITON_MAX_TENSOR_NUMEL:,} elements that Triton takes"
        )
    if config.group_m < 1 or config.num_stages < 1:
        return f"group_m {config.group_m} and num_stages {config.num_stages} must be at least 1"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps {config.num_warps}: expected 1, 2, 4, 8 or 16"
    here = gpu_limits.here()
    shared = shared_bytes(config, dtype.itemsize)
    if shared > here.shared:
        return (
            f"{config.num_stages} stages of tiles {config.tile_m}x{config.tile_k} and "
            f"{config.tile_k}x{config.tile_n} of {dtype} take {shared:,} bytes of shared memory, "
            f"and a program of {here.arch} has at most {here.shared:,}"
        )
    return here.refuse_warps(config.num_warps)


_BARRIERS = 1 << 10  # bytes of shared memory, at most, for what else a kernel keeps there


def shared_bytes(config: Tiles, itemsize: int) -> int:
    """Count the bytes of shared memory for the blocks of A and B that are in flight.

    AMD's compiler keeps one stage in registers.
    """
    stages = max(config.num_stages - 1, 1) if gpu_limits.here().is_amd else config.num_stages
    return stages * config.tile_k * (config.tile_m + config.tile_n) * itemsize


_TRIED_BY_AMD = tuple(
    (*tile, tile_k, num_warps, num_stages)
    for *tile, num_warps in (
        (64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 8), (128, 256, 8),
        (256, 128, 8),
    )
    for tile_k, num_stages in ((64, 2), (32, 2), (32, 3), (64, 3))
)  # fmt: skip


def tried(*nvidia: tuple[int, int, int, int]) -> list[dict[str, Any]]:
    """List what a tuner may try on a target: (tile_m, tile_n, num_warps, num_stages), or AMD's.

    Only those that fit are used: AMD's have fewer stages, since a workgroup has less shared memory.
    """
    here = gpu_limits.here()
    names = ("tile_m", "tile_n", "tile_k", "num_warps", "num_stages", "descriptors")
    if here.is_amd:
        return [dict(zip(names, (*each, False), strict=True)) for each in _TRIED_BY_AMD]
    return [
        dict(zip(names, (*each[:2], 64, *each[2:], here.has_tma), strict=True)) for each in nvidia
    ]


class Shape(NamedTuple):
    """The constants that a kernel is compiled for, as one argument."""

    tile_m: tl.constexpr
    tile_n: tl.constexpr
    tile_k: tl.constexpr
    group_m: tl.constexpr
    a_kind: tl.constexpr  # VIEW, ROWS or COLUMNS
    b_kind: tl.constexpr
    activation: tl.constexpr
    flat: tl.constexpr  # the loops over tiles and over K are one


Kind = TypeVar("Kind")


def constants(kind: type[Kind], **values: Any) -> Kind:
    """Return a named tuple of constants, as a kernel takes it."""
    return kind(**{name: tl.constexpr(value) for name, value in values.items()})


def shape_of(
    config: Tiles, a_kind: str, b_kind: str, activation: str | None, flat: bool = False
) -> Shape:
    return constants(
        Shape, tile_m=config.tile_m, tile_n=config.tile_n, tile_k=config.tile_k,
        group_m=config.group_m, a_kind=a_kind, b_kind=b_kind, activation=activation,
        flat=flat and VIEW not in (a_kind, b_kind),
    )  # fmt: skip


def room_beside(config: Tiles, itemsize: int, out_itemsize: int) -> bool:
    """Return whether a tile can be stored by pointers beside the next tile's inputs.

    It passes through shared memory, so that a thread gets contiguous elements: in one piece, but
    wide tiles of 16 bits in halves (seen with Triton 3.6 to 3.9).
    """
    is_halved = out_itemsize == 2 and config.tile_n >= 256 and config.tile_m <= 128
    pieces = 2 if is_halved and config.num_warps <= 8 else 1
    piece = config.tile_m * config.tile_n * out_itemsize // pieces
    return shared_bytes(config, itemsize) + piece + _BARRIERS <= gpu_limits.here().shared


def kind_of(tensor: torch.Tensor, descriptors: bool) -> str:
    """Return how a kernel takes a matrix: VIEW, ROWS or COLUMNS."""
    if descriptors and _describable(tensor):
        return ROWS
    return COLUMNS if descriptors and _describable(tensor.T) else VIEW


def operand(tensor: torch.Tensor, block: tuple[int, int], descriptors: bool) -> tuple[Any, str]:
    """Return a matrix as a kernel takes it, and how."""
    kind = kind_of(tensor, descriptors)
    if kind == VIEW:
        return tiles.view(tensor), kind
    matrix, sizes = (tensor, block) if kind == ROWS else (tensor.T, block[::-1])
    shape, strides = list(matrix.shape), list(matrix.stride())
    return TensorDescriptor(matrix, shape, strides, list(sizes)), kind


def target(out: torch.Tensor, config: Tiles, itemsize: int, beside: bool = True) -> Any:
    """Describe the output. Return None where its tiles do not fit the shared memory.

    `beside`: the inputs of the next tile are there at the same time.
    """
    inputs, tile = shared_bytes(config, itemsize), config.tile_m * config.tile_n * out.itemsize
    fits = (inputs + tile if beside else max(inputs, tile)) + _BARRIERS <= gpu_limits.here().shared
    made, kind = operand(out, (config.tile_m, config.tile_n), config.descriptors and fits)
    return made if kind == ROWS else None


def _describable(matrix: torch.Tensor) -> bool:
    """Return whether the target has TMA that takes this matrix."""
    step = matrix.stride(0) * matrix.itemsize
    if not gpu_limits.here().has_tma:
        return False
    aligned = step % ALIGNED == matrix.data_ptr() % ALIGNED == 0
    return matrix.numel() > 0 and matrix.stride(1) == 1 and step > 0 and aligned


@triton.jit
def swizzle(tile, rows, cols, GROUP_M: tl.constexpr):
    """Return row and column of a tile by number: GROUP_M rows of tiles go column by column."""
    first = tile // (GROUP_M * cols) * GROUP_M
    height = tl.minimum(rows - first, GROUP_M)  # the last group may have fewer
    within = tile % (GROUP_M * cols)
    return first + within % height, within // height


@triton.jit
def block_of(x, row, col, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Load a block of an operand, zero outside of it."""
    if KIND == "view":
        return tiles.load(x, row, col, ROWS, COLS)
    elif KIND == "rows":
        return x.load([row, col])
    else:
        return x.load([col, row]).T


@triton.jit
def accumulate(acc, a, b, row, col, first, last, shape):
    """acc + A @ B: A's rows from `row`, B's columns from `col`, blocks `first` to `last` of K."""
    for block in tl.range(first, last):
        x = block_of(a, row, block * shape.tile_k, shape.a_kind, shape.tile_m, shape.tile_k)
        y = block_of(b, block * shape.tile_k, col, shape.b_kind, shape.tile_k, shape.tile_n)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def finish(bias, acc, col, cols, shape):
    """Add the bias per column, and apply the activation."""
    if bias is not None:
        columns = col + tl.arange(0, shape.tile_n)
        acc += tl.load(bias + columns, mask=columns < cols, other=0.0).to(tl.float32)[None, :]
    if shape.activation == "silu":
        acc = acc * tl.sigmoid(acc)
    return acc


@triton.jit
def emit(out, to, bias, acc, row, col, shape):
    """Add the bias per column, apply the activation, convert, and store a tile of the result.

    `to` is the output's descriptor, which takes whole tiles, or None.
    """
    value = finish(bias, acc, col, out.cols, shape)
    if to is None and shape.a_kind == "view":
        tiles.store_product(out, row, col, value)
    elif to is None:
        tiles.store(out, row, col, value)
    else:
        to.store([row, col], value.to(out.ptr.dtype.element_ty))


@triton.jit
def ticket(tickets):
    """Take a number that no other program takes, in this call or an earlier one. Orders nothing."""
    return tl.atomic_add(tickets, tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def _gemm_kernel(a, b, out, to, bias, K, shape):
    rows, cols = tl.cdiv(out.rows, shape.tile_m), tl.cdiv(out.cols, shape.tile_n)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=shape.flat):
        i, j = swizzle(tile, rows, cols, shape.group_m)
        row, col = i * shape.tile_m, j * shape.tile_n
        acc = tl.zeros((shape.tile_m, shape.tile_n), tl.float32)
        acc = accumulate(acc, a, b, row, col, 0, tl.cdiv(K, shape.tile_k), shape)
        emit(out, to, bias, acc, row, col, shape)


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, config: Tiles, programs: int,
) -> torch.Tensor:  # fmt: skip
    """Launch a GEMM into `out`. The caller has checked the tensors."""
    grid = triton.cdiv(out.shape[0], config.tile_m) * triton.cdiv(out.shape[1], config.tile_n)
    if grid > 0:
        _gemm_kernel[(min(grid, programs),)](
            *arguments(a, b, out, bias, activation, config),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


def arguments(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, config: Tiles,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments: `isa` and the tests compile what `matmul` launches."""
    a_given, a_kind = operand(a, (config.tile_m, config.tile_k), config.descriptors)
    b_given, b_kind = operand(b, (config.tile_k, config.tile_n), config.descriptors)
    to = target(out, config, a.itemsize)
    flat = to is not None or room_beside(config, a.itemsize, out.itemsize)
    shape = shape_of(config, a_kind, b_kind, activation, flat)
    return a_given, b_given, tiles.view(out), to, bias, a.shape[1], shape
