"""pytorch/helion: the signal-pad barriers of `dist_utils`, its wait, and the distributed examples.

Helion makes Triton code of an example without a GPU, with the configuration that it names; a rank
runs that code. Two examples build a C++ extension when they are imported, which they do not use.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.decomposition  # Helion needs it, and it cannot be imported by a rank
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.utils.cpp_extension as cpp_extension
import triton
import triton.language as tl

from .case import Case, Repair, Substitution, alone, device, group, start

PACKAGE = "helion"
_UTILS = "helion/runtime/triton/dist_utils.py"
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
    if x is None:  # an earlier kernel has filled the buffers
        SYNC(pads, None, rank, size, False, True)
    else:
        mine = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
        tl.store(mine + at, tl.load(x + at))
        SYNC(pads, None, rank, size, True, True)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(size):
        total += tl.load(tl.load(buffers + peer).to(tl.pointer_type(tl.float32)) + at)
    tl.store(out + at, total)
    SYNC(pads, None, rank, size, True, False)


def _reduce(name: str) -> None:
    sync: Any = getattr(alone(_UTILS), name)
    start()
    buffer = symm_mem.empty(256, dtype=torch.float32, device=device())
    handle: Any = symm_mem.rendezvous(buffer, group())
    given = [torch.randint(-4, 5, (256,), device=device()).float() for _ in range(3)]
    found = [torch.empty_like(x) for x in given]
    for x, out, filled in zip(given, found, (False, False, True), strict=True):
        if filled:
            buffer.copy_(x)
        _all_reduce[(2,)](
            handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, None if filled else x, out,
            rank=handle.rank, size=handle.world_size, BLOCK=128, SYNC=sync,
        )  # fmt: skip
    for x, out in zip(given, found, strict=True):
        dist.all_reduce(x)
        torch.testing.assert_close(out, x, rtol=0, atol=0)


cuda = functools.partial(_reduce, "_symm_mem_sync_cuda")
rocm = functools.partial(_reduce, "_symm_mem_sync_rocm")


@triton.jit
def _produce_and_wait(x, out, flags, WAIT: tl.constexpr, BLOCK: tl.constexpr):
    """Hand a tile from program 0 to 1 to 2, by each of the wait's forms."""
    at = tl.arange(0, BLOCK)
    number = tl.program_id(0)
    if number == 0:
        tl.store(out + at, tl.load(x + at) + 1)
    elif number == 1:
        WAIT(flags, 1, 0, "acquire", "gpu", "ld", False)
        tl.store(out + BLOCK + at, tl.load(out + at) + 1)
    else:
        WAIT(flags + 1, 1, 0, "acquire", "gpu", "atomic_cas", False)
        tl.store(out + 2 * BLOCK + at, tl.load(out + BLOCK + at) + 1)
    if number < 2:  # publishes the tile, after a CTA barrier, to the next program
        WAIT(flags + number, 0, 1, "release", "gpu", "atomic_cas", True, True)


def wait() -> None:
    module = alone(_HELPERS)
    start()
    x = torch.arange(64, device=device(), dtype=torch.float32)
    out = torch.empty(192, device=device())
    flags = torch.zeros(2, dtype=torch.int32, device=device())
    how = {"BLOCK": 64, "num_warps": 4, "launch_cooperative_grid": True}  # they wait for others
    _produce_and_wait[(3,)](x, out, flags, WAIT=module.triton_wait_signal, **how)
    torch.testing.assert_close(out, torch.cat([x + 1, x + 2, x + 3]))


def _example(name: str) -> Any:
    os.environ["_USE_HARDCODED_CONFIG_FOR_CI"] = "1"  # no search for one
    cpp_extension.load_inline = lambda *args, **kwargs: SimpleNamespace()
    return importlib.import_module(f"examples.distributed.{name}")


def _small(*shape: int, dtype: torch.dtype = torch.float32, same: bool = False) -> torch.Tensor:
    """Return small integers, on request the same on every rank: sums are exact in any order."""
    generator = torch.Generator().manual_seed(7 if same else 8 + dist.get_rank())
    return torch.randint(-4, 5, shape, generator=generator).to(dtype).to(device())


def _symmetric(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    buffer = symm_mem.empty(*shape, dtype=dtype, device=device())
    symm_mem.rendezvous(buffer, group())
    return buffer


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def all_reduce() -> None:
    module = _example("all_reduce")
    start()
    x = _symmetric(512)
    x.copy_(_small(512))
    found = [module.helion_one_shot_all_reduce(x) for _ in range(2)]
    wanted = x.clone()
    dist.all_reduce(wanted)
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=0, atol=0)


def _norm(shots: str) -> None:
    function = getattr(
        _example("allreduce_bias_rmsnorm"), f"helion_{shots}_shot_allreduce_bias_rmsnorm"
    )
    start()
    x, bias, weight = _small(16, 128), _small(128, same=True), _small(128, same=True)
    buffer = _symmetric(16, 128)
    found = [function(buffer, x, bias, weight) for _ in range(2)]
    dist.all_reduce(x)
    wanted = torch.nn.functional.rms_norm(x + bias, (128,), weight, 1e-5)
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)


one_shot_norm = functools.partial(_norm, "one")
two_shot_norm = functools.partial(_norm, "two")


def scatter() -> None:
    module = _example("matmul_reduce_scatter")
    rank = start()
    a, b, buffer = _small(256, 32), _small(32, 64, same=True), _symmetric(256, 64)
    found = [module.helion_matmul_reduce_scatter(buffer, a, b) for _ in range(2)]
    wanted = a @ b
    dist.all_reduce(wanted)
    for each in found:
        torch.testing.assert_close(each, wanted.chunk(dist.get_world_size())[rank], rtol=0, atol=0)


_FP8 = torch.float8_e4m3fn


def scatter_fp8() -> None:
    module = _example("fp8_matmul_reduce_scatter")
    rank = start()
    a, b = _small(256, 32, dtype=_FP8), _small(32, 64, dtype=_FP8, same=True)
    rows, columns = torch.full((256, 1), 0.5), torch.full((1, 64), 2.0)
    buffer = _symmetric(256, 64, dtype=torch.bfloat16)
    how = a, b, rows.to(device()), columns.to(device())
    found = [module.helion_fp8_matmul_reduce_scatter(buffer, *how) for _ in range(2)]
    wanted = a.float() @ b.float()
    dist.all_reduce(wanted)
    mine = wanted.chunk(dist.get_world_size())[rank]
    for each in found:
        torch.testing.assert_close(each.float(), mine, rtol=1e-2, atol=2.0)


def gather_matmul() -> None:
    module = _example("all_gather_matmul")
    start()
    a, b = _symmetric(128, 64, dtype=torch.bfloat16), _small(64, 256, same=True).bfloat16()
    a.copy_(_small(128, 64).bfloat16())
    whole, found = module.helion_all_gather_matmul(a, b)
    torch.testing.assert_close(whole, _gathered(a), rtol=0, atol=0)
    torch.testing.assert_close(found, _gathered(a) @ b, rtol=2e-2, atol=2e-2)


def gather_matmul_fp8() -> None:
    module = _example("fp8_scaled_all_gather_matmul")
    start()
    a, b = _small(128, 64, dtype=_FP8), _small(64, 256, dtype=_FP8, same=True)
    size = dist.get_world_size()
    rows, columns = torch.full((128 * size, 1), 0.5), torch.full((1, 256), 2.0)
    found = module.helion_ag_matmul(a, b, rows.to(device()), columns.to(device()), size, group())
    wanted = _gathered(a.float()) @ b.float()
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


def two_dimensions() -> None:
    module = _example("two_dim_parallel_matmul")
    rank = start()
    pairs: list[Any] = [
        dist.new_group([2 * n, 2 * n + 1]) for n in range(dist.get_world_size() // 2)
    ]
    pair = pairs[rank // 2]
    a, b = _small(64, 32), _small(32, 64)
    buffer = symm_mem.empty(64, 64, dtype=torch.float32, device=device())
    symm_mem.rendezvous(buffer, pair)
    found = [module.helion_two_dim_parallel_matmul(a, b, pair, buffer) for _ in range(2)]
    wanted = a @ b
    dist.all_reduce(wanted, group=pair)
    for each in found:
        torch.testing.assert_close(each, wanted, rtol=0, atol=0)


_EXAMPLES = "examples/distributed"
_FP8_GATHER = f"{_EXAMPLES}/fp8_scaled_all_gather_matmul.py"
_BARRIERS = Repair(
    "no order",
    "Two calls of the barrier are commented out: a rank reads its peers' shards before they are "
    "written, and writes its own again while peers still read it.",
    tuple(
        Substitution(_FP8_GATHER, line, "# symm_mem.barrier()", "symm_mem.barrier()")
        for line in (146, 165)
    ),
)
_HANDED_OUT = (
    "the loop before it uses the result of a scalar atomic, and Triton hands that to all threads "
    "through shared memory, after a CTA barrier"
)
EQUIVALENT = {
    "dist_utils.py:399 _symm_mem_sync_rocm: tl.debug_barrier(): dropped": _HANDED_OUT,
    "helpers.py:114 triton_wait_signal: `bar.sync 0;`: dropped": _HANDED_OUT,
    "helpers.py:114 triton_wait_signal: inline_asm_elementwise(...): dropped": _HANDED_OUT,
}
CASES = [
    Case("_symm_mem_sync_cuda", _UTILS, cuda),
    Case("_symm_mem_sync_rocm", _UTILS, rocm),
    Case("triton_wait_signal", _HELPERS, wait, world=1),
    Case("one_shot_all_reduce_kernel", f"{_EXAMPLES}/all_reduce.py", all_reduce, world=2),
    Case("one_shot_allreduce_bias_rmsnorm_kernel", f"{_EXAMPLES}/allreduce_bias_rmsnorm.py",
         one_shot_norm, world=2),
    Case("two_shot_allreduce_bias_rmsnorm_kernel", f"{_EXAMPLES}/allreduce_bias_rmsnorm.py",
         two_shot_norm, world=2),
    Case("matmul_reduce_scatter_kernel", f"{_EXAMPLES}/matmul_reduce_scatter.py", scatter, world=2),
    Case("fp8_matmul_reduce_scatter_kernel", f"{_EXAMPLES}/fp8_matmul_reduce_scatter.py",
         scatter_fp8, world=2),
    Case("helion_matmul_w_progress", f"{_EXAMPLES}/all_gather_matmul.py", gather_matmul, world=2),
    Case("helion_matmul_w_progress_fp8", _FP8_GATHER,
         gather_matmul_fp8, world=2, repairs=(_BARRIERS,)),
    Case("two_dim_parallel_matmul_kernel", f"{_EXAMPLES}/two_dim_parallel_matmul.py",
         two_dimensions, world=4),
]  # fmt: skip
