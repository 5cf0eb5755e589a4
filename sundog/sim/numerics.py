"""Arithmetic where Triton's interpreter is wrong: bfloat16 and float8.

The interpreter keeps bfloat16 as raw uint16 and adds, compares and multiplies those integers. Here
such values are widened to float32, computed, and rounded back to nearest even: for +, -, *, / and
sqrt that gives the correctly rounded bfloat16 result, since float32 has more than 2 * 8 + 2 bits.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton.language as tl

__all__ = ["is_raw", "narrow", "widen"]

_FLOAT8 = {
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5b16": torch.float8_e5m2fnuz,
    "fp8e4b8": torch.float8_e4m3fnuz,
}


def is_raw(dtype: tl.dtype) -> bool:
    """Whether the interpreter's numpy array holds bits rather than numbers."""
    return dtype == tl.bfloat16 or dtype.name in _FLOAT8


def widen(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Bits of `dtype` to float32 numbers; anything else unchanged."""
    if dtype == tl.bfloat16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype.name in _FLOAT8:
        return _decode_table(dtype.name)[data.view(np.uint8)]
    return data


def narrow(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Numbers to the bits of `dtype`, rounded to nearest even; anything else unchanged."""
    if dtype == tl.bfloat16:
        return _to_bfloat16(data)
    if dtype.name in _FLOAT8:
        return _to_float8(data, dtype.name)
    return data


def _to_bfloat16(data: np.ndarray) -> np.ndarray:
    numbers = np.ascontiguousarray(data, dtype=np.float32).reshape(np.shape(data))
    bits = numbers.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x0040)  # adding could carry a NaN into infinity
    return np.where(np.isnan(numbers), quiet, rounded).astype(np.uint16)


def _to_float8(data: np.ndarray, name: str) -> np.ndarray:
    numbers = np.ascontiguousarray(data, dtype=np.float32).reshape(np.shape(data))
    with torch._C.DisableTorchFunction():  # ours, not a host access of the simulated rank
        narrowed = torch.from_numpy(numbers).to(_FLOAT8[name])
        return narrowed.view(torch.uint8).numpy()


@functools.cache
def _decode_table(name: str) -> np.ndarray:
    with torch._C.DisableTorchFunction():
        every = torch.arange(256, dtype=torch.uint8).view(_FLOAT8[name])
        return every.to(torch.float32).numpy()
