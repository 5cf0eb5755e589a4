"""The meaning of Triton's operators while programs are simulated: Triton's own, with short cuts.

What is overridden here gives the same as the base class, faster: the common cases of broadcasting
and casting are those in which nothing has to be done.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

from .handle import Block, Handle, Tile, scalar
from .numerics import is_raw, np_dtype

__all__ = ["Semantic"]


_WHOLE = {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_SAME = frozenset([*_WHOLE, "fp32", "fp64"])  # with itself, and with numbers that fit, it stays


class Semantic(TritonSemantic):
    tensor = Tile

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if isinstance(lhs, tl.tensor) and (name := lhs.dtype.name) in _SAME:
            if isinstance(rhs, tl.tensor):
                if rhs.dtype is lhs.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) is int:
                low, high = _WHOLE.get(name, (-(2**24), 2**24))
                if low <= rhs <= high:
                    return self.broadcast_impl_value(lhs, scalar(rhs, lhs.dtype))
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **options)

    def scalar_constant(self, value: Any, dtype: tl.dtype) -> Any:
        if dtype is None or is_raw(dtype) or dtype.is_ptr():
            return super().scalar_constant(value, dtype)
        return scalar(value or 0, dtype)  # -0.0 becomes 0.0, as in the base class

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        return x if isinstance(x, tl.tensor) else super().to_tensor(x, check_type)

    def cast(self, input: Any, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if source.name in _WHOLE and target.name in _WHOLE:
            data = input.handle.data.astype(np_dtype(target))
            like = input.type
            kind = like.with_element_ty(target) if isinstance(like, Block) else target
            return Tile(Handle(data, target), kind)
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if isinstance(left, Block):
            if isinstance(right, Block) and left.sizes == right.sizes:
                return lhs, rhs
            if not right.is_block():
                return lhs, _splat(rhs, left)
        elif not left.is_block():
            if not right.is_block():
                return lhs, rhs
            if isinstance(right, Block):
                return _splat(lhs, right), rhs
        return super().broadcast_impl_value(lhs, rhs)


def _splat(value: Any, like: Block) -> Tile:
    data = np.broadcast_to(value.handle.data, like.sizes)
    return Tile(Handle(data, value.handle.dtype), like.with_element_ty(value.type))
