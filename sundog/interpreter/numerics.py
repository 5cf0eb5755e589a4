"""Values of a running kernel: numpy arrays with a Triton type, with little overhead.

Triton's own classes compute the same shapes and types for every value anew, which took most of a
simulation's time. These look the same to `triton.language`, but cache them.

The numbers are those of a GPU, also where numpy or Triton's interpreter would be wrong. Triton's
interpreter keeps bfloat16 and float8 as raw integers, and adds, compares and multiplies those. Here
such values are widened to float32, computed, and rounded back to nearest even. For +, -, *, / and
sqrt that is the correctly rounded result, since float32 has more than twice the bits.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from ..errors import CannotInterpret
from ..world.tensors import FNUZ_NAN_BYTE, NAN_BYTE, POISON_BYTE


class Value(TensorHandle):
    """An array and the Triton type of its elements. A scalar is an array of one element."""

    def __init__(self, data: np.ndarray, dtype: tl.dtype) -> None:
        self.data = data
        self.dtype = dtype

    def set_attr(self, key: str, value: Any) -> None:
        """Ignore hints (`tl.multiple_of`), which are for compilers."""


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
    """A `tl.tensor` that does not recompute what its type knows."""

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
    """Make an array a value; one without axes is a scalar."""
    if data.ndim == 0:
        return Tile(Value(data.reshape(1), dtype), dtype)
    return Tile(Value(data, dtype), block(dtype, data.shape))


def scalar(value: Any, dtype: tl.dtype) -> Tile:
    """Make a Python number a value, wrapped around if it is out of range."""
    return Tile(constant(value, dtype), dtype)


def constant(value: Any, dtype: tl.dtype) -> Value:
    return Value(np.array([value]).astype(np_dtype(dtype)), dtype)


_FLOAT8 = {
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "fp8e4b8": torch.float8_e4m3fnuz,
}
_RAW = frozenset(["bf16", *_FLOAT8])
_NUMPY = {
    "int1": np.dtype(bool), "fp16": np.dtype("f2"), "fp32": np.dtype("f4"), "fp64": np.dtype("f8"),
    "int8": np.dtype("i1"), "int16": np.dtype("i2"), "int32": np.dtype("i4"),
    "int64": np.dtype("i8"), "uint8": np.dtype("u1"), "uint16": np.dtype("u2"),
    "uint32": np.dtype("u4"), "uint64": np.dtype("u8"), "bf16": np.dtype("u2"),
    **{name: np.dtype("u1") for name in _FLOAT8},
}  # fmt: skip
_POINTER = np.dtype("u8")


def np_dtype(dtype: tl.dtype) -> np.dtype:
    """Return numpy's dtype for values of a Triton type."""
    found = _NUMPY.get(dtype.name)
    if found is not None:
        return found
    scalar = dtype.scalar
    if scalar.is_ptr():
        return _POINTER
    if scalar.name not in _NUMPY:
        raise CannotInterpret(f"values of type {scalar.name} can't be simulated")
    return _NUMPY[scalar.name]


def same_bits(value: Value, element: tl.dtype) -> Value:
    """Return an integer as one of this type if only the sign differs: compiled code has none."""
    given = value.dtype.scalar
    if given == element or not (given.is_int() and element.is_int()):
        return value
    if given.primitive_bitwidth != element.primitive_bitwidth:
        return value
    return Value(value.data.view(np_dtype(element)), element)


def is_raw(dtype: tl.dtype) -> bool:
    """Return whether the numpy array holds bits rather than numbers."""
    return dtype.name in _RAW


def poison_like(shape: tuple[int, ...], np_dtype: np.dtype, dtype: tl.dtype) -> np.ndarray:
    """Return what a masked-off lane reads: NaN for floats, a pattern for integers."""
    if np_dtype == np.bool_:
        return np.ones(shape, np_dtype)
    if dtype.name in ("fp8e4b8", "fp8e5b16"):
        byte = FNUZ_NAN_BYTE
    else:
        byte = NAN_BYTE if np_dtype.kind == "f" or is_raw(dtype) else POISON_BYTE
    word = np.full(np_dtype.itemsize, byte, np.uint8).view(np_dtype)
    return np.full(shape, word[0], np_dtype)


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Convert bits of `dtype` to float32 numbers; leave anything else unchanged."""
    name = dtype.name
    if name not in _RAW:
        return data
    if name == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _decode_table(name)[data]


def narrow(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Round numbers to the bits of `dtype`, once, to nearest even; leave others unchanged."""
    name = dtype.name
    if name not in _RAW:
        return data
    numbers = data if data.dtype == np.float32 else _to_float32(data)
    return _to_bfloat16(numbers) if name == "bf16" else _to_float8(numbers, name)


def _to_float32(data: np.ndarray) -> np.ndarray:
    """Round to float32, to odd if inexact, so that rounding again to fewer bits is exact."""
    exact = data.astype(np.float64)
    near = exact.astype(np.float32)
    back = near.astype(np.float64)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    inexact = (back != exact) & even & np.isfinite(back)
    away = np.where(back < exact, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact, np.nextafter(near, away), near)


def _to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    bits = numbers.view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + ((high & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    unordered = np.isnan(numbers)
    if unordered.any():  # adding could carry a NaN into infinity
        rounded = np.where(unordered, high | np.uint32(0x0040), rounded)
    return rounded.astype(np.uint16)


def _to_float8(numbers: np.ndarray, name: str) -> np.ndarray:
    """Saturate, also infinity, like `cvt.rn.satfinite`; torch would give NaN or infinity."""
    largest = np.float32(torch.finfo(_FLOAT8[name]).max)
    bounded = np.clip(numbers, -largest, largest)
    with torch._C.DisableTorchFunction():  # ours, not a host access of the simulated rank
        narrowed = torch.from_numpy(np.ascontiguousarray(bounded)).to(_FLOAT8[name])
        return narrowed.view(torch.uint8).numpy()


@functools.cache
def _decode_table(name: str) -> np.ndarray:
    with torch._C.DisableTorchFunction():
        every = torch.arange(256, dtype=torch.uint8).view(_FLOAT8[name])
        return every.to(torch.float32).numpy()


def toward_zero(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Round numbers to `dtype` toward zero: to nearest, then one step back if that is larger."""
    near = narrow(data, dtype) if is_raw(dtype) else data.astype(np_dtype(dtype))
    bits = near.view(np.dtype(f"u{near.itemsize}"))
    larger = np.abs(widen(near, dtype).astype(np.float64)) > np.abs(data.astype(np.float64))
    return np.where(larger, bits - bits.dtype.type(1), bits).view(near.dtype)


def to_integer(numbers: np.ndarray, target: np.dtype) -> np.ndarray:
    """Convert floats to integers like an H200: what does not fit becomes the nearest that does.

    8-bit integers are the low bits of 16-bit ones. NaN becomes 0, or in 64 bits the highest bit
    alone.
    """
    wide = target if target.itemsize > 1 else np.dtype(f"{target.kind}2")
    info = np.iinfo(wide)
    whole = numbers.astype(np.float64)
    out = whole.astype(wide)
    nan = np.array(0 if wide.itemsize < 8 else 1 << 63, np.uint64).astype(wide)
    np.putmask(out, np.isnan(whole), nan)
    np.putmask(out, whole >= float(info.max), info.max)
    np.putmask(out, whole <= float(info.min), info.min)
    return out.astype(target)


def round_to_tf32(data: np.ndarray) -> np.ndarray:
    """Round float32 to 10 mantissa bits, to nearest even, as a TF32 descriptor loads it."""
    bits = data.view(np.uint32)
    odd = (bits >> np.uint32(13)) & np.uint32(1)
    rounded = (bits + (odd + np.uint32(0xFFF))) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(data), rounded, bits).view(np.float32)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z, rounded once: float64 as such, smaller floats as float64 rounded to odd.

    The product of two float32 is exact in float64. The sum is rounded to odd, so that the caller's
    rounding to the smaller type is as if there had been no other.
    """
    if z.dtype == np.float64:
        return _fma64()(x, y, z).astype(np.float64)
    product = x.astype(np.float64) * y.astype(np.float64)
    total = product + z
    part = total - product
    error = (product - (total - part)) + (z - part)  # exact, by Knuth
    bits = np.ascontiguousarray(total).view(np.uint64)
    even = (bits & np.uint64(1)) == 0
    away = np.where(error > 0, np.inf, -np.inf)
    inexact = even & (error != 0) & np.isfinite(error)
    return np.where(inexact, np.nextafter(total, away), total)


@functools.cache
def _fma64() -> np.ufunc:
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    libm.fma.restype = ctypes.c_double
    libm.fma.argtypes = [ctypes.c_double] * 3
    return np.frompyfunc(libm.fma, 3, 1)
