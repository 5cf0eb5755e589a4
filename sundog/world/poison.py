"""Fill memory that nobody has written, so that it does not look like an answer; know all heaps."""

from __future__ import annotations

import weakref

import torch

__all__ = ["FNUZ_NAN_BYTE", "NAN_BYTE", "POISON_BYTE", "heaps", "poison_tensor"]

# The heaps of all worlds of this process that are in use, by address: to tell them apart.
heaps: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

POISON_BYTE = 0xA5
NAN_BYTE = 0xFF  # all ones is a NaN in every float format
FNUZ_NAN_BYTE = 0x80  # but in those without negative zero


def poison_tensor(tensor: torch.Tensor) -> None:
    """Fill with NaN for floats and with a pattern for integers."""
    if tensor.numel() == 0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        fnuz = tensor.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        tensor.view(-1).view(torch.uint8).fill_(FNUZ_NAN_BYTE if fnuz else NAN_BYTE)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.view(-1).view(torch.uint8).fill_(POISON_BYTE)
