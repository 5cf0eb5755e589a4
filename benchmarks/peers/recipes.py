"""yifuwang/symm-mem-recipes: a barrier on signal pads, and two kernels on it.

Its GEMM uses names for descriptors that Triton has dropped since: the adapter provides them, and
an address becomes the tensor that lies there.
"""

from __future__ import annotations

import importlib
import sys
import unittest
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl
from torch._C._distributed_c10d import _SymmetricMemory
from triton.tools.tensor_descriptor import TensorDescriptor

from sundog.compat.patches import current

from .case import Case, Repair, Substitution, device, group, start

PACKAGE = "symm_mem_recipes"
_B16 = torch.bfloat16


def _symmetric(*shape: int, dtype: torch.dtype = _B16) -> torch.Tensor:
    stride = [1]
    for n in reversed(shape[1:]):
        stride.insert(0, stride[0] * n)
    name = group().group_name
    return _SymmetricMemory.empty_strided_p2p(shape, stride, dtype, device(), name)


def barrier() -> None:
    module = importlib.import_module("symm_mem_recipes.triton_barrier")

    start()
    x = _symmetric(64, dtype=torch.int32)
    handle = _SymmetricMemory.rendezvous(x)
    given = handle.signal_pad_ptrs_dev, handle.rank, handle.world_size
    theirs = handle.get_buffer((handle.rank + 1) % handle.world_size, (64,), torch.int32)
    for n in range(2):  # one barrier before what peers read, one after it
        x.fill_(n + 1)
        module.barrier_test_kernel[(4, 1, 1)](*given)
        assert theirs.eq(n + 1).all().item()
        module.barrier_test_kernel[(4, 1, 1)](*given)
    dist.barrier()  # the host reads plainly what peers' atomics have written
    assert handle.get_signal_pad(handle.rank).eq(0).all().item()


def one_shot() -> None:
    _provide_expecttest()
    module = importlib.import_module("symm_mem_recipes.triton_one_shot_all_reduce")

    start()
    x = _symmetric(8192)
    x.copy_(torch.randint(-4, 5, (8192,)).to(_B16))
    wanted = x.clone()
    found = module.one_shot_all_reduce(x)
    dist.all_reduce(wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def gather_matmul() -> None:
    _provide_expecttest()
    _provide_old_descriptors()
    module = importlib.import_module("symm_mem_recipes.triton_all_gather_matmul")
    if not isinstance(module.matmul_kernel_tma_persistent, _Launches):
        module.matmul_kernel_tma_persistent = _Launches(module.matmul_kernel_tma_persistent)  # type: ignore[attr-defined]

    start()
    size, k, n = dist.get_world_size(), 32, 64
    shard = _symmetric(32, k)
    shard.copy_(torch.randint(-4, 5, (32, k)).to(_B16))
    generator = torch.Generator().manual_seed(7)
    b = torch.randint(-4, 5, (n, k), generator=generator).to(_B16)
    whole, out = (torch.zeros(32 * size, w, dtype=_B16, device=device()) for w in (k, n))
    how = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 1,
           "num_stages": 3, "num_warps": 4}  # fmt: skip
    module.all_gather_matmul_tma_persistent(shard, b, whole, out, how)
    parts = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(parts, shard)
    torch.testing.assert_close(out, torch.cat(parts) @ b.T, rtol=2e-2, atol=2e-2)


class _Launches:
    """A kernel whose launch returns something with `asm`, which this program keeps."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> SimpleNamespace:
            self._kernel[grid](*args, **kwargs)
            return SimpleNamespace(asm={"ptx": "not compiled"})

        return launch


def _provide_expecttest() -> None:
    """Provide what torch's own test utilities import, and these programs through them."""
    module = ModuleType("expecttest")
    module.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", module)


def _provide_old_descriptors() -> None:
    module = ModuleType("triton.tools.experimental_descriptor")
    module.create_2d_tma_descriptor = _descriptor  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    sys.modules["triton.tools"].experimental_descriptor = module  # type: ignore[attr-defined]
    tl._experimental_descriptor_load = lambda d, at, shape, dtype: d.load(at)
    tl._experimental_descriptor_store = lambda d, value, at: d.store(at, value)


def _descriptor(
    address: int, rows: int, columns: int, block_rows: int, block_columns: int, itemsize: int
) -> TensorDescriptor:
    rank = current()
    tensors = [*rank._held, *(each.tensor for each in rank.allocations)]
    with torch._C.DisableTorchFunction():
        (found,) = (t for t in tensors if t.data_ptr() == address)
        whole = found.view(-1)[: rows * columns].view(rows, columns)
    assert whole.element_size() == itemsize
    return TensorDescriptor.from_tensor(whole, [block_rows, block_columns])


_BARRIER, _GATHER = (
    f"symm_mem_recipes/triton_{name}.py" for name in ("barrier", "all_gather_matmul")
)
_WORDS = Repair(
    "relaxed acquire",
    "The compare-and-swap that waits is relaxed, and the loads that acquire after it read the "
    "words of block 0 in every block: only block 0 is ordered after its peers.",
    (
        Substitution(
            _BARRIER,
            149,
            "local_signal_pad_addr + remote_rank",
            "local_signal_pad_addr + block_id * WORLD_SIZE + remote_rank",
        ),
    ),
)
_POLL = Repair(
    "relaxed acquire",
    "The kernel polls by a relaxed load, which orders nothing after it, and reads by TMA what the "
    "copy engine wrote while it ran: it needs an acquire and a proxy fence.",
    (
        Substitution(_GATHER, 81, "ld.global.relaxed.gpu.u32", "ld.global.acquire.sys.u32"),
        Substitution(
            _GATHER, 94, "bar.sync 0;", "bar.sync 0; fence.proxy.async.global; bar.sync 0;"
        ),
    ),
)

EQUIVALENT = {
    "triton_all_gather_matmul.py:75 wait_signal: `ld.global.acquire.sys.u32 $0, [$1]`: sys becomes "
    "gpu": "the flags are on the kernel's own GPU, and a stream of that GPU writes them",
}
CASES = [
    Case("barrier_test_kernel", _BARRIER, barrier, repairs=(_WORDS,)),
    Case("one_shot_all_reduce_kernel", "symm_mem_recipes/triton_one_shot_all_reduce.py", one_shot,
         repairs=(_WORDS,)),
    Case("matmul_kernel_tma_persistent", _GATHER, gather_matmul,
         repairs=(_POLL,), note="names of old descriptors are provided by the adapter"),
]  # fmt: skip
