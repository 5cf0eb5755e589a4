"""Python objects between ranks: bytes, with tensors cut loose from the heap that they may view."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["pack", "unpack"]

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class _Raw:
    """A tensor of a dtype that torch pickles but does not read back: its bytes do."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._parts = tensor.reshape(-1).view(torch.uint8), tensor.dtype, tensor.shape

    def __reduce__(self) -> tuple:
        return _restore, self._parts


def _restore(data: torch.Tensor, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return data.view(dtype).view(shape)


def pack(value: Any) -> bytes:
    """A view is pickled with all of the storage behind it, so tensors are copied first."""
    return pickle.dumps(tree_map_only(torch.Tensor, _loose, value))


def _loose(tensor: torch.Tensor) -> Any:
    own, dtype = tensor.clone(), tensor.dtype
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    return _Raw(own) if is_float8 or dtype in _UNSIGNED else own


def unpack(data: bytes) -> Any:
    return pickle.loads(data)
