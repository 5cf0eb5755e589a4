"""PTX's arithmetic. A register is an array of 64 bits per lane, read by type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from .numerics import narrow, widen
from .ptx_parse import PtxInstruction

_KINDS = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4"),
}  # fmt: skip


def is_type(part: str) -> bool:
    return part in _KINDS or part == "pred"


def bytes_of(kind: str) -> int:
    """Return the bytes of memory that a value of this type takes."""
    return _KINDS[kind].itemsize


def as_type(bits: np.ndarray, kind: str) -> np.ndarray:
    """Return the values of registers for an instruction of this type.

    bf16 is widened to float32. A packed pair (bf16x2) has an axis of two at the end.
    """
    if kind == "pred":
        return bits != 0
    if kind.endswith("x2"):
        halves = np.stack([bits & np.uint64(0xFFFF), (bits >> np.uint64(16)) & np.uint64(0xFFFF)])
        return as_type(np.moveaxis(halves, 0, -1), kind[:-2])
    raw = np.ascontiguousarray(bits).astype(f"u{_KINDS[kind].itemsize}")
    return widen(raw, tl.bfloat16) if kind == "bf16" else raw.view(_KINDS[kind])


def as_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the registers' contents after an instruction of this type writes these values."""
    if kind == "pred":
        return values.astype(np.uint64)
    if kind.endswith("x2"):
        low, high = (as_bits(values[..., n], kind[:-2]) for n in (0, 1))
        return low | high << np.uint64(16)
    if kind == "bf16":
        return narrow(values.astype(np.float32), tl.bfloat16).astype(np.uint64)
    typed = values.astype(_KINDS[kind], copy=False)
    return typed.view(f"u{typed.itemsize}").astype(np.uint64)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        return np.asarray(a / b)
    zero = b == 0
    quotient = np.abs(a.astype(object)) // np.abs(np.where(zero, 1, b).astype(object))
    signed = np.where((a < 0) != (b < 0), -quotient, quotient)
    return np.where(zero, -1, signed).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(a - _divide(a, b) * b)


def _shift(kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def shift(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        width = a.itemsize * 8
        by = np.minimum(b.astype(np.uint64), width)
        small = np.minimum(by, width - 1).astype(a.dtype)
        if kind == "left":
            return np.where(by >= width, 0, a << small).astype(a.dtype)
        filled = a >> small
        return np.where((by >= width) & (a >= 0), 0, filled).astype(a.dtype)

    return shift


def _high_half(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the high half of a product, as mul.hi does."""
    return ((a.astype(object) * b.astype(object)) >> 8 * a.itemsize).astype(a.dtype)


def _digits(a: np.ndarray) -> np.ndarray:
    """Return the bits of each number, the highest first."""
    return np.unpackbits(a.byteswap().view(np.uint8).reshape(a.size, -1), axis=1)


BINARY: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divide, "rem": _remainder,
    "min": np.fmin, "max": np.fmax, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "shl": _shift("left"), "shr": _shift("right"),
    "mul.hi": _high_half,
}  # fmt: skip
UNARY: dict[str, Callable[[np.ndarray], Any]] = {
    "not": np.invert, "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt,
    "rcp": lambda a: (1 / a).astype(a.dtype), "ex2": lambda a: np.exp2(a).astype(a.dtype),
    "lg2": lambda a: np.log2(a).astype(a.dtype),
    "popc": lambda a: _digits(a).sum(axis=1),
    "clz": lambda a: (_digits(a).cumsum(axis=1) == 0).sum(axis=1),
    "brev": lambda a: np.packbits(_digits(a)[:, ::-1], axis=1).view(a.dtype).byteswap().ravel(),
}  # fmt: skip
COMPARE: dict[str, Callable[[np.ndarray, np.ndarray], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


def converted(
    instruction: PtxInstruction, bits: np.ndarray, target: str, source: str
) -> np.ndarray:
    """Convert by `cvt`, which cuts or extends integers, and rounds floats as specified."""
    values = as_type(bits, source)
    whole = target[0] in "su" and source[0] in "fb"
    if whole:
        rounds = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        mode = next((part for part in instruction.parts if part in rounds), "")
        if not mode:
            raise instruction.refused("a conversion to an integer needs .rni, .rzi, .rmi or .rpi")
        limits = np.iinfo(_KINDS[target])
        values = np.clip(np.nan_to_num(rounds[mode](values)), limits.min, limits.max)
    if target == "bf16":
        return as_bits(values.astype(np.float32), target)
    return as_bits(values.astype(_KINDS[target]), target)
