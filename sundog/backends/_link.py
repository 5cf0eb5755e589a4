"""A real link on one GPU: peers' data in pinned host memory, which kernels reach across PCIe.

Rank 0 is measured; the other ranks are passive and only play their side of the protocol. Their
flags stay in device memory, since the GPU's atomics on host memory are slow. With link="host" no
rank is passive, and the flags of all ranks but the first are in host memory too: that tries
signals="store".
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

LINKS = ("", "pcie", "host")


class _Mapped:
    """Pinned memory in the form that torch accepts as a GPU's memory."""

    def __init__(self, host: torch.Tensor) -> None:
        self._host = host  # a tensor made from this object keeps it, and with it the memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (host.numel(),),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 2,
        }


def pinned_heap(nbytes: int, device: torch.device) -> torch.Tensor:
    """Pin host memory and return it as a tensor of the GPU, which torch uses in stream order."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    view = torch.as_tensor(_Mapped(host), device=device)
    assert view.data_ptr() == host.data_ptr(), "torch made a copy of mapped memory"
    return view


def on_host(view: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor in pinned memory as the host sees it, while its heap lives.

    Torch copies such a tensor to the GPU by the copy engine, which takes no SM and is faster than
    any kernel. It would copy the GPU's view of the same bytes by a kernel.
    """
    assert view.is_contiguous()
    memory = (ctypes.c_char * view.nbytes).from_address(view.data_ptr())
    return torch.frombuffer(memory, dtype=view.dtype).view(view.shape)


def check_host_memory(num_heaps: int, nbytes: int) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_heaps * nbytes > memory // 2:
        raise ValueError(
            f"link='pcie' pins {num_heaps} heaps of {nbytes:,} bytes, {num_heaps * nbytes:,} in "
            f"all; this machine has {memory:,}, of which sundog pins at most half. Ask for less "
            "with heap_size= or SUNDOG_HEAP_SIZE."
        )
