"""meta-pytorch/kraken: all-reduces, fused norms and GEMMs on signal pads."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .case import Case, Repair, Substitution, device, group, start

PACKAGE = "kraken"
_B16 = torch.bfloat16


def _symmetric(shape: tuple[int, ...], fill: bool = False) -> torch.Tensor:
    x = symm_mem.empty(shape, dtype=_B16, device=device())
    if fill:
        x.copy_(torch.randint(-4, 5, shape).to(_B16))
    symm_mem.rendezvous(x, group())
    return x


def _small(*shape: int) -> torch.Tensor:
    """Return small integers, so that sums are exact in any order."""
    return torch.randint(-4, 5, shape).to(_B16).to(device())


def _same(*shape: int) -> torch.Tensor:
    """Return the same tensor on every rank."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-4, 5, shape, generator=generator).to(_B16).to(device())


def _sum(x: torch.Tensor) -> torch.Tensor:
    total = x.float().cpu()
    dist.all_reduce(total)
    return total.to(x)


def _each_equals(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compare exactly, and return the results for a comparison with another machine's."""
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    return [x.cpu() for x in found]


def _overwrite(handle: Any, like: torch.Tensor) -> None:
    """Write to the next rank's buffer, as a caller may after a kernel that ends with a barrier."""
    peer = (handle.rank + 1) % handle.world_size
    handle.get_buffer(peer, like.shape, like.dtype).zero_()


def _workspace(like: torch.Tensor) -> Any:
    return symm_mem.get_symm_mem_workspace(group().group_name, like.nbytes)


def one_shot() -> list[torch.Tensor]:
    import kraken

    start()
    x = _symmetric((32, 64), fill=True)
    given = x.clone()
    found = [kraken.comm.one_shot_all_reduce(x, BLOCK_SIZE=1024, num_warps=4) for _ in range(2)]
    _overwrite(symm_mem.rendezvous(x, group()), x)
    return _each_equals(found, [_sum(given)] * 2)


def two_shot() -> list[torch.Tensor]:
    import kraken

    start()
    given = [_small(32, 64) for _ in range(2)]
    found = [kraken.comm.two_shot_all_reduce(x, BLOCK_SIZE=256, num_warps=4) for x in given]
    _overwrite(_workspace(given[0]), given[0])
    return _each_equals(found, [_sum(x) for x in given])


def _bias(function: Any, **how: int) -> list[torch.Tensor]:
    start()
    buffer, bias = _symmetric((16, 128)), _same(16, 128)
    given = [_small(16, 128) for _ in range(2)]
    found = [torch.empty_like(x) for x in given]
    for x, y in zip(given, found, strict=True):
        function(buffer, x, bias, y, **how)
    _overwrite(symm_mem.rendezvous(buffer, group()), buffer)
    return _each_equals(found, [_sum(x) + bias for x in given])


def one_shot_bias() -> list[torch.Tensor]:
    from kraken.fused import one_shot_all_reduce_bias

    return _bias(one_shot_all_reduce_bias, BLOCK_SIZE=1024)


def two_shot_bias() -> list[torch.Tensor]:
    from kraken.fused import two_shot_all_reduce_bias

    return _bias(two_shot_all_reduce_bias, BLOCK_SIZE=256)


def _norm(function: Any) -> None:
    start()
    rows, width = 8, 256
    buffer, bias, weight = _symmetric((rows, width)), _same(rows, width), _same(width)
    x, y = _small(rows, width), torch.empty(rows, width, dtype=_B16, device=device())
    function(buffer, x, bias, weight, y)
    _overwrite(symm_mem.rendezvous(buffer, group()), buffer)
    z = _sum(x).float() + bias.float()
    wanted = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    torch.testing.assert_close(y, wanted.to(_B16), rtol=4e-2, atol=4e-2)


def one_shot_norm() -> None:
    from kraken.fused import one_shot_all_reduce_bias_rms_norm

    _norm(one_shot_all_reduce_bias_rms_norm)


def two_shot_norm() -> None:
    from kraken.fused import two_shot_all_reduce_bias_rms_norm

    _norm(two_shot_all_reduce_bias_rms_norm)


def gemm_all_reduce() -> list[torch.Tensor]:
    from kraken.fused import gemm_one_shot_all_reduce_fused as gemm_one_shot_all_reduce

    start()
    a, b = _small(32, 32).float(), _small(32, 64).float()
    how = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32}
    found = [gemm_one_shot_all_reduce(a, b, **how) for _ in range(2)]
    _overwrite(_workspace(found[0]), found[0])
    return _each_equals(found, [_sum(a @ b)] * 2)


def gemm_scatter() -> list[torch.Tensor]:
    from kraken.fused import gemm_reduce_scatter

    rank = start()
    a, b = _small(128, 32).float(), _small(32, 32).float()
    found = gemm_reduce_scatter(a, b, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32)
    _overwrite(_workspace(a @ b), a @ b)
    wanted = _sum(a @ b).chunk(dist.get_world_size())[rank]
    return _each_equals([found], [wanted])


def gather_matmul() -> None:
    from kraken.fused import all_gather_matmul

    start()
    a, b = _symmetric((32, 64), fill=True), _same(64, 64).T.contiguous().T
    whole, found = all_gather_matmul(a, b, block_size_m=32, block_size_n=64, block_size_k=32)
    parts = [torch.empty_like(a) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, a)
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=0)
    torch.testing.assert_close(found, torch.cat(parts) @ b, rtol=2e-2, atol=2e-2)


def gather() -> None:
    import kraken

    start()
    a = _symmetric((32, 64), fill=True)
    found = kraken.comm.all_gather_w_progress(a)
    parts = [torch.empty_like(a) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, a)
    torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=0)


def gemm_scatter_copies() -> None:
    from kraken.fused import gemm_reduce_scatter_ce_persistent

    rank = start()
    a, b = _small(1024, 32), _same(32, 64)
    how = {"block_size_m": 128, "block_size_n": 64, "block_size_k": 32}
    found = gemm_reduce_scatter_ce_persistent(a, b, **how)
    wanted = _sum(a.float() @ b.float()).chunk(dist.get_world_size())[rank]
    torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=2.0)


_RELAXED = (
    "The kernel stores its tile and then synchronises as if only later accesses mattered: the "
    "signal is relaxed and no CTA barrier stands before it, so it does not publish the tile. The "
    "function's own description asks for both flags here, and the kernels beside it pass both."
)
FENCE = (
    "The copy engine writes the data while the kernel runs, and the kernel reads it by TMA: the "
    "wait orders ordinary accesses, and the async proxy needs a fence after it."
)
COPIES = (
    "The stream that copies begins to wait for the flags before they are zeroed on the other "
    "stream; and what a descriptor has stored no release publishes, so the flag does not order the "
    "tile before the copy. The repair gives up the overlap; storing the tile by pointers, with a "
    "CTA barrier before the counter and acq_rel on it, keeps it."
)


def both(path: str, line: int) -> tuple[Repair, ...]:
    flag = "hasSubsequentMemAccess=True"
    change = Substitution(path, line, flag, f"hasPreviousMemAccess=True, {flag}")
    return (Repair("relaxed release", _RELAXED, (change,)),)


REDUCE = "kraken/fused/gemm_one_shot_all_reduce_fused.py"
SCATTER = "kraken/fused/gemm_reduce_scatter_fused.py"
_COPY = "kraken/fused/gemm_reduce_scatter_ce_persistent.py"
WAIT = Substitution(
    "kraken/_ptx_utils/gmem_barrier_arrive_wait.py",
    67,
    "bar.sync 0;",
    "fence.proxy.async.global; bar.sync 0;",
)
AFTER = Substitution(
    _COPY,
    367,
    "with backend_stream",
    "backend_stream.wait_stream(torch.cuda.current_stream())\n    with backend_stream",
)

EQUIVALENT = {
    "gemm_reduce_scatter_ce_persistent.py:128 _gemm_producer_persistent_kernel: atomic_add: "
    'sem="release" becomes "relaxed"': "with the repair the copies wait for the end of the "
    "kernel, and nothing relies on what the counter publishes",
}
CASES = [
    Case("one_shot_all_reduce_kernel", "kraken/comm/one_shot_all_reduce.py", one_shot),
    Case("two_shot_all_reduce_kernel", "kraken/comm/two_shot_all_reduce.py", two_shot),
    Case("one_shot_all_reduce_bias_kernel", "kraken/fused/one_shot_all_reduce_bias.py",
         one_shot_bias),
    Case("two_shot_all_reduce_bias_kernel", "kraken/fused/two_shot_all_reduce_bias.py",
         two_shot_bias),
    Case("one_shot_all_reduce_bias_rms_norm_kernel",
         "kraken/fused/one_shot_all_reduce_bias_rms_norm.py", one_shot_norm),
    Case("two_shot_all_reduce_bias_rms_norm_kernel",
         "kraken/fused/two_shot_all_reduce_bias_rms_norm.py", two_shot_norm),
    Case("gemm_one_shot_all_reduce_kernel", REDUCE, gemm_all_reduce, repairs=both(REDUCE, 81)),
    Case("gemm_reduce_scatter_kernel", SCATTER, gemm_scatter, repairs=both(SCATTER, 94)),
    Case("_matmul_kernel_tma_persistent_w_progress", "kraken/fused/all_gather_matmul.py",
         gather_matmul, repairs=(Repair("no proxy fence", FENCE, (WAIT,)),)),
    Case("_gemm_producer_persistent_kernel", _COPY, gemm_scatter_copies,
         repairs=(Repair("no order", COPIES, (AFTER,)),)),
    Case("copies of all_gather_w_progress", "kraken/comm/copy_engine_all_gather.py", gather),
]  # fmt: skip
