"""torch's symm_mem ops on a CPU, called as torch's own passes call them."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from support.jobs import job
from torch import Tensor

import sundog
import sundog.torch
from sundog.torch.symm_mem import KERNELS

pytestmark = pytest.mark.sim_only  # names its backend itself, so once is enough
ops = torch.ops.symm_mem


def _call_all(rank: int, size: int, group: str) -> None:
    """Every op against the same by hand, from inputs that every rank can make."""
    torch.manual_seed(0)
    every = torch.randint(-2, 3, (size, 4, 3, 8)).float()
    a, b = every[rank], torch.randint(-2, 3, (8, 8)).float()
    for dim in (0, 1):
        whole = torch.cat(list(every), dim)
        gathered, (product,) = ops.fused_all_gather_matmul(a, [b], dim, group)
        assert torch.equal(gathered, whole)
        assert torch.equal(product, whole @ b)
    whole = torch.cat([x[:, 0] for x in every], 1)
    columns = torch.cat([b] * size)
    nothing, (product,) = ops.fused_all_gather_matmul(a[:, 0], [columns], 1, group, return_A=False)
    assert nothing is None
    assert torch.equal(product, whole @ columns)
    summed = every.sum(0) @ b
    for dim in (0, 2):
        mine = ops.fused_matmul_reduce_scatter(a, b, "sum", dim, group)
        assert torch.equal(mine, summed.chunk(size, dim)[rank])
    mine = ops.fused_matmul_reduce_scatter(a.double(), b.double(), "avg", 0, group)
    assert torch.equal(mine, (summed / size).chunk(size)[rank].double())
    total = every.sum(0)
    assert torch.equal(ops.one_shot_all_reduce(a, "sum", group), total)
    for call in (ops.two_shot_all_reduce_, ops.multimem_all_reduce_):
        assert torch.equal(call(a.clone(), "sum", group), total)
    assert torch.equal(ops.one_shot_all_reduce_out(a, "sum", group, torch.empty_like(a)), total)
    assert torch.equal(ops._low_contention_all_gather(a, group), torch.cat(list(every)))
    mine = ops._low_contention_reduce_scatter(a, "sum", group)
    assert torch.equal(mine, total.chunk(size)[rank])
    _call_scaled(every[:, :, 0], b, rank, size, group)
    _call_vdev(rank, size, group)


def _call_scaled(every: Tensor, b: Tensor, rank: int, size: int, group: str) -> None:
    eight = torch.float8_e4m3fn
    a, scale_a, scale_b = every[rank].to(eight), torch.tensor(0.5), torch.tensor(2.0)
    whole, (product,) = ops.fused_all_gather_scaled_matmul(
        a, [b.to(eight)], scale_a, [scale_b], 0, group, [None], [None], [torch.float32], [False]
    )
    assert torch.equal(whole.float(), torch.cat(list(every)))
    assert torch.equal(product, torch.cat(list(every)) @ b)
    mine = ops.fused_scaled_matmul_reduce_scatter(
        a, b.to(eight), scale_a, scale_b, "sum", 0, 0, group, [4, 8], out_dtype=torch.float32
    )
    assert torch.equal(mine, (every.sum(0) @ b).chunk(size)[rank])


def _call_vdev(rank: int, size: int, group: str) -> None:
    """Rank r sends r + 1 rows to each rank."""
    sent = torch.full((size,), rank + 1)
    x, out = torch.full((size * size, 2), float(rank)), torch.zeros(size * size, 2)
    told = torch.zeros(2, size, dtype=torch.int64)
    ops.all_to_all_vdev(x, out, sent, told, group)
    assert told.tolist() == [[1, 2], [0, 1]]
    assert out[:3, 0].tolist() == [0.0, 1.0, 1.0]


def test_all_ops_on_sim() -> None:
    """There a group is named as its world is."""
    with sundog.torch.enable():
        sundog.run(lambda world: _call_all(world.rank, world.size, world.name), 2, "sim")


def test_all_ops_in_a_job_on_gloo() -> None:
    def main(rank: int) -> None:
        with sundog.torch.enable():
            _call_all(rank, 2, dist.group.WORLD.group_name)

    job(main, 2)


def test_enable_says_what_it_patches_and_undoes_it(capfd: Any) -> None:
    before = dist.is_nccl_available
    with sundog.torch.enable(explain=True) as patched:
        assert len(patched.patched) >= len(KERNELS) + (not before())
        half = torch.ones(2, 2, dtype=torch.bfloat16)
        assert torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
        assert dist.is_nccl_available()
        sundog.run(lambda world: ops.one_shot_all_reduce(torch.ones(4), "sum", "world"), 1, "sim")
    assert "symm_mem.one_shot_all_reduce of [(4,)]: sundog's CPU kernel" in capfd.readouterr().err
    assert dist.is_nccl_available is before
    with pytest.raises(NotImplementedError, match="one_shot_all_reduce"):
        ops.one_shot_all_reduce(torch.ones(4), "sum", "world")


def test_kernels_stay_if_nobody_keeps_what_enable_returned() -> None:
    """torch forgets the kernels of a library that is collected."""
    enabled = weakref.ref(sundog.torch.enable())
    gc.collect()
    try:
        sundog.run(lambda world: ops.one_shot_all_reduce(torch.ones(4), "sum", "world"), 1, "sim")
    finally:
        enabled().disable()
    gc.collect()
    assert enabled() is None


def test_the_micro_pipeline_pass_fuses_on_a_cpu() -> None:
    """Inductor rewrites gather + product and product + reduce-scatter to ops that run here."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    def main(rank: int) -> list[str]:
        group = dist.group.WORLD
        enable_symm_mem_for_group(group.group_name)

        def fn(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
            h = torch.relu(functional.all_gather_tensor(x, 0, group) @ up)
            return functional.reduce_scatter_tensor(h @ down, "sum", 0, group)

        torch.manual_seed(0)
        x, up, down = (torch.randint(-2, 3, (8, 8)).float() for _ in range(3))
        with sundog.torch.enable(), config.patch(_micro_pipeline_tp=True, compile_threads=1):
            out, (code, *_) = run_and_get_code(torch.compile(fn, fullgraph=True), x, up, down)
        assert torch.equal(out, fn(x, up, down))
        fused = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
        return [name for name in fused if f"symm_mem.{name}" in code]

    assert job(main, 2) == [["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]] * 2


def test_it_may_be_enabled_twice_and_disabled_in_any_order() -> None:
    """The second left is_nccl_available patched for good, and the first took torch.mm's kernel."""
    has_mm = functools.partial(
        torch._C._dispatch_has_kernel_for_dispatch_key, "aten::mm.dtype", "CPU"
    )
    had, had_mm = dist.is_nccl_available, has_mm()
    for order in ((0, 1), (1, 0)):
        enabled = [sundog.torch.enable(), sundog.torch.enable()]
        enabled[order[0]].disable()
        assert dist.is_nccl_available()
        half = torch.ones(2, 2, dtype=torch.bfloat16)
        assert torch.mm(half, half, out_dtype=torch.float32).dtype == torch.float32
        enabled[order[1]].disable()
        assert dist.is_nccl_available is had
        assert has_mm() == had_mm


def test_a_dimension_that_is_not_there_is_refused() -> None:
    """It was taken modulo the number of dimensions; torch's own kernels refuse it."""

    def main(world: sundog.World) -> None:
        a, b, eight = torch.ones(4, 8), torch.ones(8, 8), torch.ones(4, 8).to(torch.float8_e4m3fn)
        one, name = torch.tensor(1.0), world.name
        for dim in (2, -3):
            wrong = pytest.raises(ValueError, match=rf"_dim {dim}: expected one from -2 to 1")
            with wrong:
                ops.fused_all_gather_matmul(a, [b], dim, name)
            with wrong:
                ops.fused_matmul_reduce_scatter(a, b, "sum", dim, name)
            with wrong:
                ops.fused_all_gather_scaled_matmul(
                    eight, [b], one, [one], dim, name, [None], [None], [None], [False]
                )
            with wrong:
                ops.fused_scaled_matmul_reduce_scatter(
                    eight, b, one, one, "sum", dim, dim, name, [4, 8]
                )

    with sundog.torch.enable():
        sundog.run(main, 2, "sim")
