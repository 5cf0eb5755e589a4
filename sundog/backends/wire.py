"""Python objects between ranks: bytes, with tensors cut loose from the heap that they may view."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

__all__ = ["pack", "unpack"]


def pack(value: Any) -> bytes:
    """A view is pickled with all of the storage behind it, so tensors are copied first."""
    return pickle.dumps(tree_map_only(torch.Tensor, torch.clone, value))


def unpack(data: bytes) -> Any:
    return pickle.loads(data)
