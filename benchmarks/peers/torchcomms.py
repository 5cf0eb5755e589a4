"""meta-pytorch/torchcomms: the NVLink send and receive of `prims/triton`, in its three modes.

Its kernels over InfiniBand call a device library (`torchcomms.triton.fb`) that is not public.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .case import Case, Repair, Substitution, checkout, device, group, start

__all__ = ["CASES", "PACKAGE"]

PACKAGE = "comms/prims/triton/collectives/nvl"
_BLOCKS, _TILE, _DEPTH = 2, (2, 16), 2


def _load() -> Any:
    if "nvl" not in sys.modules:
        package = ModuleType("nvl")
        package.__path__ = [os.path.join(checkout(), PACKAGE)]
        sys.modules["nvl"] = package
    return importlib.import_module("nvl.sendrecv")


def exchange(mode: int) -> None:
    """Send to the peer, receive from it, or both (mode 0); twice, so that slots are used again."""
    module = _load()
    rank = start()
    peer, n = 1 - rank, 400
    stride = 2 * _TILE[0] * _TILE[1]
    staging = stride * 4 * _DEPTH
    buffer: Any = symm_mem.empty(staging, dtype=torch.float32, device=device())
    handle: Any = symm_mem.rendezvous(buffer, group())
    remote, local = (handle.get_buffer(r, (staging,), torch.float32) for r in (peer, rank))
    signals = [handle.get_signal_pad(r).view(torch.int64) for r in (peer, rank)]
    steps = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    dist.barrier()
    given = [torch.arange(n).float() + 1000 * rank + k for k in range(2)]
    found = [torch.zeros(n) for _ in given]
    for x, out in zip(given, found, strict=True):
        own = mode if mode == 0 else 1 + (rank != mode - 1)
        grid = (2 * _BLOCKS,) if own == 0 else (_BLOCKS,)
        module.triton_nvl_sendrecv_kernel[grid](
            x, out, remote, local, *signals, *steps, rank, peer, n, n, TILE_ROWS=_TILE[0],
            TILE_COLS=_TILE[1], BLOCK_STRIDE_ELEMS=stride, PIPELINE_DEPTH=_DEPTH,
            MAX_BLOCKS_PER_DIR=4, NUM_SEND_BLOCKS=_BLOCKS, MAX_TILES_PER_BLOCK_PER_SLOT=2,
            MODE=own,
        )  # fmt: skip
    for k, out in enumerate(found):
        if mode == 0 or rank != mode - 1:
            torch.testing.assert_close(out, torch.arange(n).float() + 1000 * peer + k)


_FILE = f"{PACKAGE}/sendrecv.py"
_CREDIT = Repair(
    "no order",
    "The receiver returns a slot by a relaxed store, and the sender polls it by a volatile load: "
    "neither orders the receiver's loads before the sender's next stores. Their documentation says "
    "that a CTA barrier is enough; the PTX model gives no order there.",
    (
        Substitution(_FILE, 285, "remote_store_i64_relaxed(", "fence_and_remote_store_i64("),
        Substitution(_FILE, 188, "wait_ge_volatile(", "wait_ge("),
    ),
)
CASES = [
    Case(f"triton_nvl_sendrecv_kernel, {name}", _FILE,
         functools.partial(exchange, mode), world=2, schedules=4, num_sms=16,
         repairs=(_CREDIT,), kernels=int(mode == 0))
    for mode, name in enumerate(("both ways", "rank 0 sends", "rank 1 sends"))
]  # fmt: skip
