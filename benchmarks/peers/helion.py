"""pytorch/helion: the signal-pad barriers of `dist_utils`, CUDA's and ROCm's, and its wait.

The examples are Helion kernels, which Helion compiles on a GPU only; they call these functions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

from .case import Case, alone, device, group, start

__all__ = ["CASES", "PACKAGE"]

PACKAGE = "helion/runtime/triton/dist_utils.py"
_HELPERS = "helion/runtime/triton/helpers.py"


@triton.jit
def _all_reduce(
    table,
    pads,
    x,
    out,
    rank: tl.constexpr,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
    SYNC: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    buffers = table.to(tl.pointer_type(tl.uint64))
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    tl.store(mine + at, tl.load(x + at))
    SYNC(pads, None, rank, size, True, True)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(size):
        total += tl.load(tl.load(buffers + peer).to(tl.pointer_type(tl.float32)) + at)
    tl.store(out + at, total)
    SYNC(pads, None, rank, size, True, False)


def _reduce(name: str) -> None:
    sync: Any = getattr(alone(PACKAGE), name)
    start()
    buffer = symm_mem.empty(256, dtype=torch.float32, device=device())
    handle: Any = symm_mem.rendezvous(buffer, group())
    given = [torch.randint(-4, 5, (256,), device=device()).float() for _ in range(2)]
    found = [torch.empty_like(x) for x in given]
    for x, out in zip(given, found, strict=True):
        _all_reduce[(2,)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, x, out,
            rank=handle.rank, size=handle.world_size, BLOCK=128, SYNC=sync,
        )  # fmt: skip
    for x, out in zip(given, found, strict=True):
        dist.all_reduce(x)
        torch.testing.assert_close(out, x, rtol=0, atol=0)


cuda = functools.partial(_reduce, "_symm_mem_sync_cuda")
rocm = functools.partial(_reduce, "_symm_mem_sync_rocm")


@triton.jit
def _produce_and_wait(x, out, flags, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(out + at, tl.load(x + at) + 1)
        tl.debug_barrier()  # orders the tile before the release, for program 1
        tl.atomic_xchg(flags, 1, sem="release", scope="gpu")
    else:
        WAIT(flags, 1, 0, "acquire", "gpu", "ld", False)
        tl.store(out + BLOCK + at, tl.load(out + at) + 1)


def wait() -> None:
    module = alone(_HELPERS)
    start()
    x = torch.arange(64, device=device(), dtype=torch.float32)
    out = torch.empty(128, device=device())
    flags = torch.zeros(1, dtype=torch.int32, device=device())
    _produce_and_wait[(2,)](x, out, flags, WAIT=module.triton_wait_signal, BLOCK=64, num_warps=4)
    torch.testing.assert_close(out, torch.cat([x + 1, x + 2]))


CASES = [
    Case("_symm_mem_sync_cuda", PACKAGE, cuda),
    Case("_symm_mem_sync_rocm", PACKAGE, rocm),
    Case("triton_wait_signal", _HELPERS, wait, world=1),
]
