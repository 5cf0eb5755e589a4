"""The arithmetic of the interpreter's instruction set, with reductions and scans.

The base class is Triton's. What is overridden here is wrong there in at least one supported version
(bfloat16 and float8, NaN, bool, unsigned all-ones, one rounding in fma), or slow. Its reductions
call the combine function once per element; here that function gets tiles. A reduction combines one
half with the other in each of log2(n) steps, and a scan doubles its reach. A scan keeps the order
of the elements. A reduction does not, as on a GPU (seen on an H200), so that a combine function
that is not commutative shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder
from triton.runtime.jit import JITFunction

from ..errors import CannotInterpret
from .numerics import (
    Value,
    constant,
    fma,
    is_raw,
    narrow,
    np_dtype,
    scalar,
    tile,
    to_integer,
    toward_zero,
    widen,
)

if TYPE_CHECKING:
    from ..machine.machine import Machine

_COMPARISONS = {
    np.less: "<",
    np.less_equal: "<=",
    np.greater: ">",
    np.greater_equal: ">=",
    np.equal: "==",
    np.not_equal: "!=",
}
_erf = np.frompyfunc(math.erf, 1, 1)


def _constant(dtype: tl.dtype) -> Callable[[Any, Any], Value]:
    return lambda self, value: constant(value, dtype)


class Arithmetic(InterpreterBuilder):
    machine: Machine  # set while programs run

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

    def get_bf16(self, value: float) -> Value:
        return Value(narrow(np.array([value], np.float64), tl.bfloat16), tl.bfloat16)

    def get_null_value(self, type: tl.dtype) -> Value:
        return Value(np.zeros(1, np_dtype(type)), type.scalar)

    def get_all_ones_value(self, type: tl.dtype) -> Value:
        return Value(~np.zeros(1, np_dtype(type)), type.scalar)

    # one value from two

    def binary_op(self, lhs: Value, rhs: Value, op: Any) -> Value:
        dtype = lhs.dtype.scalar
        a, b = lhs.data, rhs.data
        sign = _COMPARISONS.get(op)
        if is_raw(dtype):
            a, b = widen(a, dtype), widen(b, rhs.dtype.scalar)
        if sign is not None:
            self.machine.program.compared_with(sign, b)
            return Value(op(a, b), tl.int1)
        if a.dtype == np.bool_:  # a 1-bit integer, which numpy lacks
            return Value((op(a.astype(np.uint8), b.astype(np.uint8)) & 1).astype(bool), dtype)
        return _result(op(a, b), dtype)

    def create_minnumf(self, lhs: Value, rhs: Value) -> Value:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: Value, rhs: Value) -> Value:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_approx_divf(self, lhs: Value, rhs: Value) -> Value:
        return self.binary_op(lhs, rhs, np.divide)

    def create_ashr(self, lhs: Value, rhs: Value) -> Value:
        return self.binary_op(lhs, rhs, np.right_shift)

    def create_idiv(self, lhs: Value, rhs: Value) -> Value:
        """Round toward zero, as in C."""
        whole = lhs.data - np.fmod(lhs.data, rhs.data)
        return Value(whole // rhs.data, lhs.dtype.scalar)

    def create_umulhi(self, lhs: Value, rhs: Value) -> Value:
        data = lhs.data
        bits = 8 * data.itemsize
        unsigned = np.dtype(f"u{data.itemsize}")
        wide = np.uint64 if bits < 64 else object  # Python's integers are unbounded
        product = data.view(unsigned).astype(wide) * rhs.data.view(unsigned).astype(wide)
        return Value((product >> bits).astype(unsigned).view(data.dtype), lhs.dtype.scalar)

    # one from one

    def unary_op(self, arg: Value, op: Any) -> Value:
        dtype = arg.dtype.scalar
        return _result(op(widen(arg.data, dtype)), dtype)

    def create_fneg(self, arg: Value) -> Value:
        return self.unary_op(arg, np.negative)

    def create_rsqrt(self, arg: Value) -> Value:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_erf(self, arg: Value) -> Value:
        return self.unary_op(arg, lambda x: np.asarray(_erf(x), x.dtype))

    # one from three

    def create_clampf(self, arg: Value, lo: Value, hi: Value, propagate_nan: Any) -> Value:
        dtype = arg.dtype.scalar
        x, low, high = (widen(v.data, dtype) for v in (arg, lo, hi))
        bounded = np.fmin(np.fmax(x, low), high)
        if propagate_nan != ir.PROPAGATE_NAN.NONE:
            bounded = np.where(np.isnan(x), x, bounded)
        return _result(bounded, dtype)

    def create_select(self, condition: Value, lhs: Value, rhs: Value) -> Value:
        other = rhs.data.view(lhs.data.dtype)  # Triton mistypes the result of a float's atomic_min
        return Value(np.where(condition.data, lhs.data, other), lhs.dtype.scalar)

    def create_fma(self, x: Value, y: Value, z: Value) -> Value:
        dtype = z.dtype.scalar
        return _result(fma(*(widen(v.data, dtype) for v in (x, y, z))), dtype)

    # casts

    def cast_impl(self, src: Value, dst_type: tl.dtype) -> Value:
        source, target = src.dtype.scalar, dst_type.scalar
        numbers = widen(src.data, source)
        kind = np_dtype(target)
        if is_raw(target):
            return Value(narrow(numbers, target), target)
        if numbers.dtype.kind == "f" and kind.kind in "iu":
            return Value(to_integer(numbers, kind), target)
        return Value(numbers.astype(kind), target)

    def create_fp_to_fp(self, src: Value, dst_type: tl.dtype, rounding_mode: Any = None) -> Value:
        if rounding_mode != ir.ROUNDING_MODE.RTZ:
            return self.cast_impl(src, dst_type)
        target = dst_type.scalar
        return Value(toward_zero(widen(src.data, src.dtype.scalar), target), target)

    def create_bitcast(self, src: Value, dst_type: tl.dtype) -> Value:
        return Value(src.data.view(np_dtype(dst_type)), dst_type.scalar)

    create_int_to_ptr = create_bitcast
    create_ptr_to_int = create_bitcast

    # tiles

    def create_dot(self, a: Value, b: Value, d: Value, *precision: Any) -> Value:
        """Sum exact products in float32 or wider, and round once, to the accumulator's type."""
        if self.machine.accesses.product(a.data.shape, b.data.shape, a.dtype.primitive_bitwidth):
            return d
        dtype = d.dtype.scalar
        if dtype.is_int():  # 8-bit factors: float64 holds every sum, and has a fast product
            product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64))
            return Value(product.astype(np.int64).astype(d.data.dtype) + d.data, dtype)
        kind = np.float64 if dtype == tl.float64 else np.float32
        left, right = widen(a.data, a.dtype.scalar), widen(b.data, b.dtype.scalar)
        total = np.matmul(left, right, dtype=kind) + widen(d.data, dtype)
        return _result(total, dtype)

    def create_splat(self, ret_ty: tl.dtype, arg: Value) -> Value:
        return Value(np.broadcast_to(arg.data, tuple(ret_ty.shape)), arg.dtype.scalar)

    def create_unsplat(self, arg: Value) -> Value:
        return Value(arg.data.reshape(-1)[:1], arg.dtype.scalar)

    def create_addptr(self, ptr: Value, offset: Value) -> Value:
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
        # Negative offsets wrap around in 64 bits, and so does the sum: exact in the end.
        return Value(ptr.data + offset.data.astype(np.uint64) * np.uint64(size), ptr.dtype)

    def create_histogram(self, data: Value, bins: int, mask: Value | None) -> Value:
        """Count the values inside [0, bins) that are not masked off."""
        chosen = (data.data >= 0) & (data.data < bins)
        if mask is not None:
            chosen = chosen & mask.data
        counts = np.bincount(data.data[chosen].astype(np.int64), minlength=bins)
        return Value(counts.astype(np.int32), tl.int32)


def _result(numbers: np.ndarray, dtype: tl.dtype) -> Value:
    """Make numbers values of a type, as bits if it is kept as bits, never wider than the type."""
    if is_raw(dtype):
        return Value(narrow(numbers, dtype), dtype)
    kind = np_dtype(dtype)
    return Value(numbers if numbers.dtype == kind else numbers.astype(kind), dtype)


Arrays = list[np.ndarray]


def reduce(input: Any, axis: Any, combine_fn: JITFunction, keep_dims: Any = False, **_: Any) -> Any:
    """Do as `tl.reduce`, for one value or a tuple of values that are reduced together."""
    tiles = _tiles(input)
    dtypes = [each.dtype for each in tiles]
    shape = tiles[0].handle.data.shape
    arrays = [each.handle.data for each in tiles]
    axis = tl.core._unwrap_if_constexpr(axis)
    if axis is None:
        arrays = [data.reshape(-1) for data in arrays]
    place = 0 if axis is None else _checked(axis, len(shape))
    reduced = _reduce(arrays, place, combine_fn, dtypes)
    if not tl.core._unwrap_if_constexpr(keep_dims):
        reduced = [data.squeeze(place) for data in reduced]
    elif axis is None:
        reduced = [data.reshape([1] * len(shape)) for data in reduced]
    return _like(input, [tile(data, dtype) for data, dtype in zip(reduced, dtypes, strict=True)])


def scan(input: Any, axis: Any, combine_fn: JITFunction, reverse: Any = False, **_: Any) -> Any:
    """Do as `tl.associative_scan`, inclusive; `reverse` starts at the end."""
    tiles = _tiles(input)
    dtypes = [each.dtype for each in tiles]
    arrays = [each.handle.data for each in tiles]
    place = _checked(tl.core._unwrap_if_constexpr(axis), arrays[0].ndim)
    backwards = tl.core._unwrap_if_constexpr(reverse)
    if backwards:
        arrays = [np.flip(data, place) for data in arrays]
    arrays = _scan(arrays, place, combine_fn, dtypes)
    if backwards:
        arrays = [np.flip(data, place) for data in arrays]
    return _like(input, [tile(data, dtype) for data, dtype in zip(arrays, dtypes, strict=True)])


def map_elementwise(scalar_fn: JITFunction, *args: Any, pack: Any = 1, **_: Any) -> Any:
    """Do as `tl.map_elementwise`: call the function for each element, on which it may branch."""
    if tl.core._unwrap_if_constexpr(pack) != 1:
        raise CannotInterpret(f"tl.map_elementwise with pack={pack} is not simulated; leave it out")
    arrays = np.broadcast_arrays(*(each.handle.data for each in args))
    dtypes = [each.dtype for each in args]
    rows = zip(*(data.ravel() for data in arrays), strict=True)
    results = [scalar_fn(*map(scalar, row, dtypes)) for row in rows]
    columns = zip(*map(_tiles, results), strict=True)
    made = []
    for column in columns:
        data = np.concatenate([each.handle.data.ravel() for each in column])
        made.append(tile(data.reshape(arrays[0].shape), column[0].dtype))
    return _like(results[0], made)


def _reduce(arrays: Arrays, axis: int, combine: JITFunction, dtypes: list[tl.dtype]) -> Arrays:
    ufunc = _ufunc(combine, dtypes, _REDUCTIONS)
    if ufunc is not None:
        return [ufunc.reduce(arrays[0], axis=axis, dtype=arrays[0].dtype, keepdims=True)]
    while arrays[0].shape[axis] > 1:
        half = arrays[0].shape[axis] // 2
        first = [data[_at(axis, slice(0, half))] for data in arrays]
        second = [data[_at(axis, slice(half, None))] for data in arrays]
        arrays = _combined(combine, first, second, dtypes)
    return arrays


def _scan(arrays: Arrays, axis: int, combine: JITFunction, dtypes: list[tl.dtype]) -> Arrays:
    ufunc = _ufunc(combine, dtypes, _SCANS)
    if ufunc is not None:
        return [ufunc.accumulate(arrays[0], axis=axis, dtype=arrays[0].dtype)]
    reach = 1
    while reach < arrays[0].shape[axis]:
        # Combined in full, since a tile's size is a power of two; the first `reach` are already
        # done.
        before = [np.roll(data, reach, axis) for data in arrays]
        combined = _combined(combine, before, arrays, dtypes)
        for data, done in zip(combined, arrays, strict=True):
            data[_at(axis, slice(0, reach))] = done[_at(axis, slice(0, reach))]
        arrays = combined
        reach *= 2
    return arrays


def _combined(combine: JITFunction, left: Arrays, right: Arrays, dtypes: list[tl.dtype]) -> Arrays:
    operands = [tile(data, dtype) for data, dtype in zip(left + right, dtypes * 2, strict=True)]
    results = combine(*operands)
    shape = left[0].shape
    return [
        np.array(np.broadcast_to(_data(result, dtype), shape))
        for result, dtype in zip(_tiles(results), dtypes, strict=True)
    ]


def _data(result: Any, dtype: tl.dtype) -> np.ndarray:
    if not isinstance(result, tl.tensor):
        return np.asarray(tl.core._unwrap_if_constexpr(result)).astype(np_dtype(dtype))
    assert result.dtype == dtype, f"combine function made {result.dtype} of {dtype}"
    return result.handle.data


def _ufunc(combine: JITFunction, dtypes: list[tl.dtype], known: dict[str, Any]) -> np.ufunc | None:
    """Return numpy's version of a combine function of Triton's standard library, or None."""
    dtype = dtypes[0]
    if len(dtypes) > 1 or is_raw(dtype) or dtype == tl.int1:
        return None
    name = combine.fn.__name__
    if getattr(tl.standard, name, None) is not combine:
        return None
    return known.get(f"{name} of floats" if dtype.is_floating() else name, known.get(name))


_REDUCTIONS = {
    "_sum_combine": np.add,
    "_elementwise_max": np.maximum,
    "_elementwise_min": np.minimum,
    "_elementwise_max of floats": np.fmax,  # a NaN loses
    "_elementwise_min of floats": np.fmin,
    "_xor_combine": np.bitwise_xor,
    "_or_combine": np.bitwise_or,
}
_SCANS = {"_sum_combine": np.add, "_prod_combine": np.multiply}


def _tiles(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, tl.core.tuple)) else [values]


def _like(input: Any, results: list[Any]) -> Any:
    return tuple(results) if isinstance(input, (tuple, tl.core.tuple)) else results[0]


def _checked(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tile with {rank} axes")
    return axis % rank


def _at(axis: int, where: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (where,)
