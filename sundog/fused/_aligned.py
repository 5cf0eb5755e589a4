"""Copy matrices whose rows do not begin at multiples of 16 bytes to ones whose rows do.

TMA refuses such a matrix, and a thread may load only one element of it at a time. A copy reads the
matrix once, and the product reads it many times: with copies 8 shapes on an H200 took 0.26 to 0.77
of the time, also the one with 16 rows (docs/measured.md, gemm in place). The copy's rows are padded
with zeros, up to where the next one may begin, so that masks do not make accesses narrow either: a
padded K adds products of zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..device import tiles
from . import _gemm

if TYPE_CHECKING:
    from ..world.world import World

_ROWS, _COLS = 16, 256  # of a tile of the copy
_PER_SM = 8  # programs: some load while others store; none waits, so not all must be resident


@triton.jit
def _align_kernel(x, room, ROWS: tl.constexpr, COLS: tl.constexpr):
    cols = tl.cdiv(room.cols, COLS)
    for tile in range(tl.program_id(0), tl.cdiv(room.rows, ROWS) * cols, tl.num_programs(0)):
        row, col = tile // cols * ROWS, tile % cols * COLS
        tiles.store(room, row, col, tiles.load(x, row, col, ROWS, COLS))


def padded(length: int, itemsize: int, descriptors: bool) -> int:
    """Count a row's elements with its padding, which aligns all rows.

    Without descriptors rows are aligned to 16 elements, as Triton asks of strides at a launch.
    """
    unit = _gemm.ALIGNED // itemsize if descriptors and gpu_limits.here().has_tma else 16
    return triton.cdiv(length, unit) * unit


def room_for(
    world: World, shape: tuple[int, int], dtype: torch.dtype, config: _gemm.Tiles, name: str
) -> torch.Tensor | None:
    """Allocate heap memory for an aligned copy. Return None if a contiguous matrix is aligned."""
    width = padded(shape[1], dtype.itemsize, config.descriptors)
    return None if width == shape[1] else world.empty((shape[0], width), dtype, name)


def aligned(
    matrix: torch.Tensor, room: torch.Tensor | None, config: _gemm.Tiles, programs: int
) -> torch.Tensor:
    """Return the matrix if its rows are aligned or there is no room, else its copy in the room."""
    if room is None or matrix.stride(1) != 1 or _is_wide(matrix, config):
        return matrix
    return _copy(matrix, room, programs)


def dense(matrix: torch.Tensor, room: torch.Tensor, programs: int) -> torch.Tensor:
    """Return the matrix if its rows are laid out like the room's, else its copy in the room."""
    return matrix if matrix.stride() == room.stride() else _copy(matrix, room, programs)


class Rooms:
    """A plan's memory for aligned copies of operands that only this rank reads.

    Strides are not part of a problem, so room is made for the first matrix that needs it. A
    capture, which allocates nothing, reads such a matrix in place.
    """

    def __init__(self, world: World, config: _gemm.Tiles, programs: int) -> None:
        self._world, self._config, self._programs = world, config, programs
        self._made: dict[tuple[int, torch.Size, bool], torch.Tensor] = {}

    def wide(self, *operands: torch.Tensor) -> list[torch.Tensor]:
        """Return each operand, or its aligned copy, which may be longer by zeros."""
        return [self._wide(place, operand) for place, operand in enumerate(operands)]

    def matmul(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None,
    ) -> None:  # fmt: skip
        """Launch a GEMM of the operands, or of their copies, into `out`."""
        x, y = self.wide(a, b)
        _gemm.matmul(x, y, out, bias, activation, self._config, self._programs)

    def _wide(self, place: int, operand: torch.Tensor) -> torch.Tensor:
        by_rows = operand.stride(1) == 1
        matrix = operand if by_rows else operand.T
        if matrix.stride(1) != 1 or matrix.numel() == 0 or _is_wide(matrix, self._config):
            return operand
        key = (place, matrix.shape, by_rows)
        if key not in self._made and self._world.is_capturing:
            return operand
        if key not in self._made:
            width = padded(matrix.shape[1], matrix.itemsize, self._config.descriptors)
            self._made[key] = matrix.new_empty((matrix.shape[0], width))
        copy = _copy(matrix, self._made[key], self._programs)
        return copy if by_rows else copy.T


def _is_wide(matrix: torch.Tensor, config: _gemm.Tiles) -> bool:
    step = matrix.stride(0)
    width = padded(step, matrix.itemsize, config.descriptors)
    return step == width and matrix.data_ptr() % _gemm.ALIGNED == 0


def _copy(matrix: torch.Tensor, room: torch.Tensor, programs: int) -> torch.Tensor:
    count = triton.cdiv(room.shape[0], _ROWS) * triton.cdiv(room.shape[1], _COLS)
    _align_kernel[(max(1, min(count, _PER_SM * programs)),)](
        tiles.view(matrix), tiles.view(room), ROWS=_ROWS, COLS=_COLS, num_warps=4
    )
    return room
