"""Which torch functions make the host wait for the GPU: they return what the GPU has computed."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["reads_back", "waits"]

# The result, or the size of it, is something that the host must know.
_WAITING = {
    "item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__",
    "equal", "allclose", "nonzero", "unique", "masked_select", "__repr__", "__format__", "__iter__",
    "__contains__", "__reduce_ex__", "is_nonzero", "argwhere", "bincount", "repeat_interleave",
    "multinomial",
}  # fmt: skip


_MAY_WAIT = _WAITING | {
    "to", "cuda", "tensor", "as_tensor", "copy_", "__getitem__", "__setitem__",
}  # fmt: skip


def waits(name: str, args: tuple, kwargs: dict) -> bool:
    """Does this torch function make the host wait, or copy between its memory and the GPU's?"""
    if name not in _MAY_WAIT:  # most: this is asked at every call
        return False
    if reads_back(name, args):
        return True
    if name in ("to", "cuda", "tensor", "as_tensor"):
        places = [*args[1:], kwargs.get("device")]
        return name == "cuda" or any(isinstance(p, str | torch.device) for p in places)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return name in ("copy_", "__setitem__") and len({t.device for t in tensors}) > 1


def reads_back(name: str, args: tuple) -> bool:
    """Does the host need what is in device memory? Known by the name alone, also on a CPU."""
    if name == "to":
        return "cpu" in args[1:]
    return name in _WAITING or (name in ("__getitem__", "__setitem__") and _by_mask(args))


def _by_mask(args: tuple) -> bool:
    index: Any = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) for i in index)
