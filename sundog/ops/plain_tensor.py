"""Refuse tensors whose memory is not what their shape, strides and dtype say."""

from __future__ import annotations

import torch

__all__ = ["check_plain"]


def check_plain(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError that says what to pass instead; nothing for an ordinary tensor."""
    found = _unusual(tensor)
    if found is not None:
        what, instead = found
        raise ValueError(f"{op}: {name} is {what}; {instead.format(name)}")


def _unusual(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is, and what to do about it. First what would break the questions below."""
    if hasattr(tensor, "to_local"):
        return "a DTensor", "pass {0}.to_local(), which is this rank's part"
    if tensor.is_nested:
        return "a nested tensor", "pass {0}.values(), or each of its tensors"
    if tensor.layout != torch.strided:
        return f"not dense ({tensor.layout})", "pass {0}.to_dense()"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})", "pass {0}.int_repr(), and the scale on its own"
    if tensor.is_meta:
        return "on the meta device, without data", "pass a tensor on this rank's device"
    if tensor.is_conj():
        return "a view that is conjugated when it is read", "pass {0}.resolve_conj()"
    if tensor.is_neg():
        return "a view that is negated when it is read", "pass {0}.resolve_neg()"
    return None
