"""`tl.reduce` and `tl.associative_scan` with any combine function, on whole tiles at a time.

Triton's interpreter calls the combine function once per element. Here it gets tiles: a reduction
combines one half with the other in each of log2(n) steps, a scan doubles its reach. A scan keeps
the order of the elements; a reduction does not, as on a GPU (seen on an H200), so that a combine
function which is not commutative is found out. Those of the standard library are numpy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.jit import JITFunction

from .numerics import is_raw, np_dtype, tile

__all__ = ["reduce", "scan"]

Arrays = list[np.ndarray]


def reduce(input: Any, axis: Any, combine_fn: JITFunction, keep_dims: Any = False, **_: Any) -> Any:
    """As `tl.reduce`: one value, or a tuple of values that are reduced together."""
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
    """As `tl.associative_scan`, inclusive; `reverse` starts at the end."""
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
        # Combined in full, as a tile's size is a power of two; the first `reach` are done already.
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
    """numpy's version of a combine function of the standard library, if it is one."""
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
