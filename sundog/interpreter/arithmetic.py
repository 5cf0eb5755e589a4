"""The arithmetic half of the interpreter's instruction set, on numbers instead of bits.

The base class is Triton's; what is overridden here it gets wrong in at least one of the versions
that we support (bfloat16 and float8, NaN, bool, unsigned all-ones, one rounding in fma), or takes
long for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder

from .numerics import (
    Handle,
    constant,
    fma,
    is_raw,
    narrow,
    np_dtype,
    to_integer,
    toward_zero,
    widen,
)
from .running import RunningMachine

__all__ = ["Arithmetic"]

_COMPARISONS = {
    np.less: "<",
    np.less_equal: "<=",
    np.greater: ">",
    np.greater_equal: ">=",
    np.equal: "==",
    np.not_equal: "!=",
}
_erf = np.frompyfunc(math.erf, 1, 1)


def _constant(dtype: tl.dtype) -> Callable[[Any, Any], Handle]:
    return lambda self, value: constant(value, dtype)


class Arithmetic(InterpreterBuilder):
    machine: RunningMachine  # set while programs run

    # constants

    get_int1 = _constant(tl.int1)
    get_int8 = _constant(tl.int8)
    get_int16 = _constant(tl.int16)
    get_int32 = _constant(tl.int32)
    get_int64 = _constant(tl.int64)
    get_uint8 = _constant(tl.uint8)
    get_uint16 = _constant(tl.uint16)
    get_uint32 = _constant(tl.uint32)
    get_uint64 = _constant(tl.uint64)
    get_fp16 = _constant(tl.float16)
    get_fp32 = _constant(tl.float32)
    get_fp64 = _constant(tl.float64)

    def get_bf16(self, value: float) -> Handle:
        return Handle(narrow(np.array([value], np.float64), tl.bfloat16), tl.bfloat16)

    def get_null_value(self, type: tl.dtype) -> Handle:
        return Handle(np.zeros(1, np_dtype(type)), type.scalar)

    def get_all_ones_value(self, type: tl.dtype) -> Handle:
        return Handle(~np.zeros(1, np_dtype(type)), type.scalar)

    # one value from two

    def binary_op(self, lhs: Handle, rhs: Handle, op: Any) -> Handle:
        dtype = lhs.dtype.scalar
        a, b = lhs.data, rhs.data
        sign = _COMPARISONS.get(op)
        if is_raw(dtype):
            a, b = widen(a, dtype), widen(b, rhs.dtype.scalar)
        if sign is not None:
            self.machine.program.compared_with(sign, b)
            return Handle(op(a, b), tl.int1)
        if a.dtype == np.bool_:  # a 1-bit integer, which numpy has not
            return Handle((op(a.astype(np.uint8), b.astype(np.uint8)) & 1).astype(bool), dtype)
        return _result(op(a, b), dtype)

    def create_minnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_approx_divf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.divide)

    def create_ashr(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.right_shift)

    def create_idiv(self, lhs: Handle, rhs: Handle) -> Handle:
        """Toward zero, as in C."""
        whole = lhs.data - np.fmod(lhs.data, rhs.data)
        return Handle(whole // rhs.data, lhs.dtype.scalar)

    def create_umulhi(self, lhs: Handle, rhs: Handle) -> Handle:
        data = lhs.data
        bits = 8 * data.itemsize
        unsigned = np.dtype(f"u{data.itemsize}")
        wide = np.uint64 if bits < 64 else object  # Python's integers have no end
        product = data.view(unsigned).astype(wide) * rhs.data.view(unsigned).astype(wide)
        return Handle((product >> bits).astype(unsigned).view(data.dtype), lhs.dtype.scalar)

    # one from one

    def unary_op(self, arg: Handle, op: Any) -> Handle:
        dtype = arg.dtype.scalar
        return _result(op(widen(arg.data, dtype)), dtype)

    def create_fneg(self, arg: Handle) -> Handle:
        return self.unary_op(arg, np.negative)

    def create_rsqrt(self, arg: Handle) -> Handle:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_erf(self, arg: Handle) -> Handle:
        return self.unary_op(arg, lambda x: np.asarray(_erf(x), x.dtype))

    # one from three

    def create_clampf(self, arg: Handle, lo: Handle, hi: Handle, propagate_nan: Any) -> Handle:
        dtype = arg.dtype.scalar
        x, low, high = (widen(v.data, dtype) for v in (arg, lo, hi))
        bounded = np.fmin(np.fmax(x, low), high)
        if propagate_nan != ir.PROPAGATE_NAN.NONE:
            bounded = np.where(np.isnan(x), x, bounded)
        return _result(bounded, dtype)

    def create_select(self, condition: Handle, lhs: Handle, rhs: Handle) -> Handle:
        other = rhs.data.view(lhs.data.dtype)  # Triton mistypes the result of a float's atomic_min
        return Handle(np.where(condition.data, lhs.data, other), lhs.dtype.scalar)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        dtype = z.dtype.scalar
        return _result(fma(*(widen(v.data, dtype) for v in (x, y, z))), dtype)

    # casts

    def cast_impl(self, src: Handle, dst_type: tl.dtype) -> Handle:
        source, target = src.dtype.scalar, dst_type.scalar
        numbers = widen(src.data, source)
        kind = np_dtype(target)
        if is_raw(target):
            return Handle(narrow(numbers, target), target)
        if numbers.dtype.kind == "f" and kind.kind in "iu":
            return Handle(to_integer(numbers, kind), target)
        return Handle(numbers.astype(kind), target)

    def create_fp_to_fp(self, src: Handle, dst_type: tl.dtype, rounding_mode: Any = None) -> Handle:
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(src, dst_type)
        target = dst_type.scalar
        return Handle(toward_zero(widen(src.data, src.dtype.scalar), target), target)

    def create_bitcast(self, src: Handle, dst_type: tl.dtype) -> Handle:
        return Handle(src.data.view(np_dtype(dst_type)), dst_type.scalar)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    # tiles

    def create_dot(self, a: Handle, b: Handle, d: Handle, *precision: Any) -> Handle:
        """Exact products, summed in float32 or wider and rounded to the accumulator's type once."""
        dtype = d.dtype.scalar
        if dtype.is_int():  # 8-bit factors: float64 holds every sum, and has a fast product
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return Handle(product.astype(np.int64).astype(d.data.dtype) + d.data, dtype)
        kind = np.float64 if dtype == tl.float64 else np.float32
        left, right = widen(a.data, a.dtype.scalar), widen(b.data, b.dtype.scalar)
        total = np.matmul(left, right, dtype=kind) + widen(d.data, dtype)
        return _result(total, dtype)

    def create_splat(self, ret_ty: tl.dtype, arg: Handle) -> Handle:
        return Handle(np.broadcast_to(arg.data, tuple(ret_ty.shape)), arg.dtype.scalar)

    def create_unsplat(self, arg: Handle) -> Handle:
        return Handle(arg.data.reshape(-1)[:1], arg.dtype.scalar)

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        # Negative offsets wrap around in 64 bits, and so does the sum: exact in the end.
        return Handle(ptr.data + offset.data.astype(np.uint64) * np.uint64(size), ptr.dtype)

    def create_histogram(self, data: Handle, bins: int, mask: Handle | None) -> Handle:
        """What is masked off or outside of [0, bins) is not counted."""
        chosen = (data.data >= 0) & (data.data < bins)
        if mask is not None:
            chosen = chosen & mask.data
        counts = np.bincount(data.data[chosen].astype(np.int64), minlength=bins)
        return Handle(counts.astype(np.int32), tl.int32)


def _result(numbers: np.ndarray, dtype: tl.dtype) -> Handle:
    """Numbers as values of a type: bits where it is kept as bits, never wider than the type."""
    if is_raw(dtype):
        return Handle(narrow(numbers, dtype), dtype)
    kind = np_dtype(dtype)
    return Handle(numbers if numbers.dtype == kind else numbers.astype(kind), dtype)
