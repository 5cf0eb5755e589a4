"""flashinfer-ai/flashinfer, its Triton part: the FP8 all-reduce and the all-gather GEMM.

The package's own __init__ compiles CUDA; the adapter loads the files of `comm` without it, and
decorators that register operators and write logs do nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .case import Case, Repair, Substitution, checkout, device, group, start

PACKAGE = "flashinfer/comm"


def _plain(*names: Any, **more: Any) -> Any:
    """Stand for a decorator, with arguments or without."""
    return names[0] if names and callable(names[0]) else lambda function: function


def _load(name: str) -> Any:
    for package in ("flashinfer", "flashinfer.comm", "flashinfer.comm.all_gather_matmul"):
        if package not in sys.modules:
            module = ModuleType(package)
            module.__path__ = [os.path.join(checkout(), *package.split("."))]
            sys.modules[package] = module
    for stub, attribute in (("api_logging", "flashinfer_api"), ("utils", "register_custom_op")):
        module = ModuleType(f"flashinfer.{stub}")
        setattr(module, attribute, _plain)
        sys.modules.setdefault(f"flashinfer.{stub}", module)
    return importlib.import_module(name)


def quantized(p2p: bool) -> None:
    module = _load("flashinfer.comm.quantized_allreduce")
    start()
    x = torch.randn(4096, device=device(), dtype=torch.bfloat16)
    for key in [key for key in module._cache if key[1] == x.device]:
        del module._cache[key]  # of a schedule before this one, whose memory is gone
    how = {"scale_group": 64, "block_size": 256, "num_warps": 4, "p2p_phase3": p2p}
    calls = [module.quantized_all_reduce(x, dist.group.WORLD, **how) for _ in range(2)]
    for found in calls:
        wanted = x.clone()
        dist.all_reduce(wanted)
        torch.testing.assert_close(found, wanted, rtol=0.2, atol=0.2)


def pushed() -> None:
    quantized(p2p=False)


def pulled() -> None:
    quantized(p2p=True)


def barrier() -> None:
    """Read what a peer wrote before the barrier, and write again after the next one."""
    module = _load("flashinfer.comm.all_gather_matmul.all_gather_matmul_triton")
    start()
    x = symm_mem.empty(64, device=device(), dtype=torch.float32)
    handle: Any = symm_mem.rendezvous(x, group())
    size = handle.world_size
    pads = tuple(handle.get_signal_pad(r, (size,), torch.int32, 0) for r in range(size))
    theirs = handle.get_buffer((handle.rank + 1) % size, (64,), torch.float32)
    for n in range(2):
        x.fill_(n)
        module.barrier_triton(pads, handle.rank)
        assert theirs.eq(n).all().item()
        module.barrier_triton(pads, handle.rank)


def gather_matmul() -> None:
    module = _load("flashinfer.comm.all_gather_matmul.all_gather_matmul_triton")
    start()
    symm_mem.set_backend("NVSHMEM")
    size = dist.get_world_size()
    x = symm_mem.empty(128, 128, device=device(), dtype=torch.bfloat16)
    x.copy_(torch.randint(-4, 5, (128, 128)).to(torch.bfloat16))
    generator = torch.Generator().manual_seed(7)
    w = torch.randint(-4, 5, (128, 128), generator=generator).to(torch.bfloat16)
    found = module.all_gather_matmul_triton(x, w, dist.group.WORLD)
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    torch.testing.assert_close(found, torch.cat(parts) @ w, rtol=2e-2, atol=2e-2)


_QUANTIZED = "flashinfer/comm/quantized_allreduce.py"
_GATHER = "flashinfer/comm/all_gather_matmul/all_gather_matmul_triton.py"
_FENCED = (
    'tl.inline_asm_elementwise("fence.proxy.async.global; bar.sync 0; mov.b32 $0, 0;", "=r", [], '
    "dtype=tl.int32, is_pure=False, pack=1)"
)
_REPAIRS = (
    Repair(
        "scope does not reach",
        "The barrier's compare-and-swap has the default scope, gpu, and its words are on other "
        "GPUs: it is not atomic to theirs, and orders nothing between ranks.",
        (
            Substitution(_GATHER, 26, "rank, 0, 1)", 'rank, 0, 1, scope="sys")'),
            Substitution(_GATHER, 32, "peer, 1, 0)", 'peer, 1, 0, scope="sys")'),
        ),
    ),
    Repair(
        "plain access to a flag",
        "The kernel polls with volatile loads, which acquire nothing: neither the data nor the "
        "zeroing of the flags after it is ordered after the peer's signal. And it reads the data "
        "by TMA, which needs a proxy fence after the wait.",
        (
            Substitution(
                _GATHER,
                108,
                "tl.load(signal_ptr + signal_off, volatile=True)",
                'tl.atomic_add(signal_ptr + signal_off, 0, sem="acquire", scope="sys")',
            ),
            Substitution(_GATHER, 111, "tile_id = pid", f"{_FENCED}; tile_id = pid"),
        ),
    ),
)
_REUSE = Repair(
    "no order",
    "With P2P_PHASE3 a rank reads its peers' buffers until the kernel ends, and nothing tells the "
    "peers: their next call overwrites the buffers while they are still read.",
    (
        Substitution(
            _QUANTIZED,
            194,
            "pid = tl.program_id(0)",
            "symm_mem_sync(signal_pad_ptrs, None, rank, world_size, hasPreviousMemAccess=True, "
            "hasSubsequentMemAccess=True); pid = tl.program_id(0)",
        ),
    ),
)
_KERNEL = 'barrier_triton_kernel: atomic_cas: sem="acq_rel" (the default) becomes'
EQUIVALENT = {
    f'all_gather_matmul_triton.py:26 {_KERNEL} "release"': "it signals, and acquires nothing",
    f'all_gather_matmul_triton.py:32 {_KERNEL} "acquire"': "it waits, and publishes nothing",
}
CASES = [
    Case("barrier_triton_kernel, alone", _GATHER, barrier, world=2, repairs=_REPAIRS[:1],
         kernels=0),
    Case("_fp8_blockscale_2shot_kernel", _QUANTIZED, pushed, world=2),
    Case("_fp8_blockscale_2shot_kernel, P2P_PHASE3", _QUANTIZED, pulled, world=2,
         repairs=(_REUSE,)),
    Case("barrier_triton_kernel and wait_signal_matmul_triton_kernel", _GATHER, gather_matmul,
         world=2, schedules=6, repairs=_REPAIRS),
]  # fmt: skip
