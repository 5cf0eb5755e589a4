"""Tiles of matrices: a view says where a matrix is, row and column where a tile begins in it.

    @triton.jit
    def kernel(x, out, peer, ctx, ROWS: tl.constexpr, COLS: tl.constexpr):
        row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
        tile = tiles.gather(x, row, col, peer, ctx, ROWS, COLS, HINT=(1, 8))
        tiles.store(out, row, col, tile)

    kernel[grid](tiles.view(x), tiles.view(out), peer, world.ctx, 64, 64)

A view is a named tuple, which Triton takes as one argument. Strides are arbitrary, so a transposed
matrix is a view too. Elements outside the matrix read as zero and are not written. Offsets have 64
bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl

from .context import DELTAS, PER_PEER, SIZE
from .memory import moved, translate

if TYPE_CHECKING:
    import torch

_NO_HINT = tl.constexpr((1, 1))


class View(NamedTuple):
    """A matrix in memory. Strides are in elements."""

    ptr: torch.Tensor
    rows: int
    cols: int
    row_stride: int
    col_stride: int


def view(tensor: torch.Tensor) -> View:
    """Make a kernel argument of a tensor with two dimensions. Called on the host."""
    if tensor.dim() != 2:
        raise ValueError(f"a view has two dimensions, and the tensor has shape {tensor.shape}")
    return View(tensor, *tensor.shape, *tensor.stride())


@triton.jit
def hinted(matrix, HINT: tl.constexpr):
    """Return the same view with a promise about alignment, which makes accesses wide.

    HINT (1, 8): elements of a row are adjacent in memory, and rows begin and end at multiples of 8;
    (8, 1): the same for columns. The promise is arithmetic that changes nothing, because Triton's
    own hints (multiple_of) are lost between functions, and on AMD with every pointer.
    """
    DOWN: tl.constexpr = HINT[0]
    ACROSS: tl.constexpr = HINT[1]
    return View(
        matrix.ptr, matrix.rows // DOWN * DOWN, matrix.cols // ACROSS * ACROSS,
        matrix.row_stride // ACROSS * ACROSS, matrix.col_stride // DOWN * DOWN,
    )  # fmt: skip


@triton.jit
def at(matrix, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return pointers to the elements of a tile."""
    one = tl.full((), 1, tl.int64)
    first = one * row * matrix.row_stride + one * col * matrix.col_stride
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None] * matrix.row_stride
    cols = tl.arange(0, COLS).to(tl.int64)[None, :] * matrix.col_stride
    # The scalar first: in a loop over tiles the rest does not change.
    return (matrix.ptr + first) + (rows + cols)


@triton.jit
def inside(matrix, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return which elements of a tile are in the matrix."""
    rows = row + tl.arange(0, ROWS) < matrix.rows
    cols = col + tl.arange(0, COLS) < matrix.cols
    return rows[:, None] & cols[None, :]


@triton.jit
def part(matrix, row, rows):
    """Return the view of `rows` rows, starting at `row`."""
    ptr = matrix.ptr + tl.full((), 1, tl.int64) * row * matrix.row_stride
    return View(ptr, rows, matrix.cols, matrix.row_stride, matrix.col_stride)


@triton.jit
def load(matrix, row, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Load a tile; zero outside the matrix."""
    mask = inside(matrix, row, col, ROWS, COLS)
    return tl.load(at(matrix, row, col, ROWS, COLS), mask=mask, other=0.0)


@triton.jit
def store(matrix, row, col, tile):
    """Store a tile, converted to the matrix's type; elements outside the matrix are dropped."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    value = tile.to(matrix.ptr.dtype.element_ty)
    mask = inside(matrix, row, col, ROWS, COLS)
    # Not `at`: Triton 3.6 would keep the offsets of a whole tile across a loop, and spill them.
    one = tl.full((), 1, tl.int64)
    rows = (one * row + tl.arange(0, ROWS)) * matrix.row_stride
    cols = (one * col + tl.arange(0, COLS)) * matrix.col_stride
    tl.store(matrix.ptr + rows[:, None] + cols[None, :], value, mask=mask)


@triton.jit
def of_peer(matrix, peer, ctx):
    """Return the view of the same matrix in the peer's heap."""
    ptr = translate(matrix.ptr, peer, ctx)
    return View(ptr, matrix.rows, matrix.cols, matrix.row_stride, matrix.col_stride)


@triton.jit
def distances(ctx, LANES: tl.constexpr):
    """Load the distances to all ranks' heaps, for `of_rank`: once, before a loop."""
    lane = tl.arange(0, triton.next_power_of_2(LANES))
    is_rank = lane < tl.load(ctx + SIZE).to(tl.int32)
    return tl.load(ctx + DELTAS + PER_PEER * lane, mask=is_rank, other=0)


@triton.jit
def of_rank(matrix, peer, away):
    """Do as `of_peer` without a load: Triton does not pipeline addresses that need one."""
    distance = tl.sum(tl.where(tl.arange(0, away.shape[0]) == peer, away, 0), 0)
    ptr = moved(matrix.ptr, distance)
    return View(ptr, matrix.rows, matrix.cols, matrix.row_stride, matrix.col_stride)


@triton.jit
def store_product(matrix, row, col, tile):
    """Do as `store`, in two halves: AMD's compiler stores an accumulator 8 bytes at a time."""
    ROWS: tl.constexpr = tile.shape[0]
    HALF: tl.constexpr = tile.shape[1] // 2
    left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, HALF)), (0, 2, 1)))
    store(matrix, row, col, left)
    store(matrix, row, col + HALF, right)


@triton.jit
def gather(
    matrix, row, col, peer, ctx,
    ROWS: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr = _NO_HINT,
):  # fmt: skip
    """Load a tile of the peer's matrix. Orders nothing: wait first. HINT: see `hinted`."""
    return load(of_peer(hinted(matrix, HINT), peer, ctx), row, col, ROWS, COLS)


@triton.jit
def scatter(matrix, row, col, tile, peer, ctx, HINT: tl.constexpr = _NO_HINT):
    """Store a tile of the peer's matrix. Orders nothing: signal afterwards. See `hinted`."""
    store(of_peer(hinted(matrix, HINT), peer, ctx), row, col, tile)
