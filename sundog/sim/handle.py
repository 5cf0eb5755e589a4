"""Values of a running kernel: numpy arrays with a Triton type, made with little overhead.

Triton's own classes work out the same shapes and types for every value anew, which took most of
the time of a simulation. These are the same to `triton.language`, but remember.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from .numerics import np_dtype

__all__ = ["Block", "Handle", "Tile", "block", "constant", "scalar", "tile"]


class Handle(TensorHandle):
    """An array and the Triton type of its elements. A scalar is an array of one element."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data = data
        self.dtype = dtype

    def set_attr(self, key: str, value: Any) -> None:
        """Hints (`tl.multiple_of`) are for compilers."""


class Block(tl.block_type):
    """A block type that is made once; `sizes` are its plain ints."""

    def __init__(self, element: tl.dtype, sizes: tuple[int, ...]) -> None:
        super().__init__(element, list(sizes))
        self.sizes = sizes
        self.tile_shape = tl.core.tuple([tl.constexpr(n) for n in sizes])
        self.tile_numel = tl.constexpr(int(np.prod(sizes)))

    def with_element_ty(self, scalar_ty: tl.dtype) -> Block:
        return block(scalar_ty, self.sizes)


_blocks: dict[tuple[str, tuple[int, ...]], Block] = {}  # by element name and sizes


def block(element: tl.dtype, sizes: tuple[int, ...]) -> Block:
    key = (element.name, sizes)
    found = _blocks.get(key)
    if found is None:
        found = _blocks[key] = Block(element, sizes)
    return found


_SCALAR_SHAPE = tl.core.tuple([])
_SCALAR_NUMEL = tl.constexpr(1)


class Tile(tl.tensor):
    """A `tl.tensor` that does not work out what its type already knows."""

    def __init__(self, handle: Any, type: tl.dtype) -> None:
        self.handle = handle
        if not isinstance(type, Block) and type.is_block():
            type = block(type.element_ty, tuple(int(n) for n in type.shape))
        self.type = type
        if isinstance(type, Block):
            self.dtype = type.element_ty
            self.shape = type.tile_shape
            self.numel = type.tile_numel
        else:
            self.dtype = type.scalar
            self.shape = _SCALAR_SHAPE
            self.numel = _SCALAR_NUMEL


def tile(data: np.ndarray, dtype: tl.dtype) -> Tile:
    """An array as a value; one without axes is a scalar."""
    if data.ndim == 0:
        return Tile(Handle(data.reshape(1), dtype), dtype)
    return Tile(Handle(data, dtype), block(dtype, data.shape))


def scalar(value: Any, dtype: tl.dtype) -> Tile:
    """A Python number as a value, wrapped around if it is out of range."""
    return Tile(constant(value, dtype), dtype)


def constant(value: Any, dtype: tl.dtype) -> Handle:
    return Handle(np.array([value]).astype(np_dtype(dtype)), dtype)
