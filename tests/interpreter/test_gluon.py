"""Gluon kernels on the simulator: `gl` runs as `tl`, layouts are checked, the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import arange as imported_arange
from triton.experimental.gluon.language import bank_conflicts

import sundog
from sundog.errors import CannotInterpret

from .launching import Run, launch
from .test_gluon_layouts import build

pytestmark = pytest.mark.compat


@gluon.jit
def tour_kernel(x, y, out, total, n, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, TO: gl.constexpr):
    at = gl.program_id(0) * BLOCK + imported_arange(0, BLOCK, LAYOUT)
    pointers = gl.max_contiguous(gl.multiple_of(x + at, 4), 4)
    a = gl.load(pointers, mask=at < n, other=0)
    b = gl.load(y + at, mask=at < n, other=0)
    gl.assume(n > 0)
    sum_of_all = gl.zeros([BLOCK], gl.int32, LAYOUT)
    for step in gl.static_range(3):
        sum_of_all += gl.where(at % 3 == step, gl.maximum(a, b), gl.minimum(a, b) + step)
    sum_of_all += gl.full([BLOCK], 7, gl.int32, LAYOUT) + gl.full_like(a, 1) * gl.num_warps()
    sum_of_all += gl.zeros_like(a) + gl.cdiv(n, BLOCK)
    both = gl.convert_layout(sum_of_all, TO)
    there = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, TO)
    gl.store(out + there, both, mask=there < n)
    gl.atomic_add(total, gl.sum(gl.where(at < n, a.to(gl.int64), 0), 0))
    gl.atomic_max(total + 1, gl.max(a, 0).to(gl.int64))
    if gl.program_id(0) == gl.num_programs(0) - 1:
        gl.store(total + 2, gl.num_programs(0))


@pytest.mark.parametrize("num_warps", [1, 4, 8])
def test_operations_give_what_their_twins_give(run: Run, num_warps: int) -> None:
    n, block = 997, 256
    programs = triton.cdiv(n, block)
    torch.manual_seed(num_warps)
    x, y = (torch.randint(-(2**20), 2**20, (n,), dtype=torch.int32) for _ in range(2))
    total = torch.tensor([0, -(2**40), 0])
    layouts = [gl.BlockedLayout([size], [32], [num_warps], [0]) for size in (4, 1)]
    _, _, out, total = launch(
        run, tour_kernel, (programs,), x, y, torch.zeros_like(x), total, n,
        BLOCK=block, LAYOUT=layouts[0], TO=layouts[1], num_warps=num_warps,
    )  # fmt: skip
    low, high = torch.minimum(x, y), torch.maximum(x, y)
    wanted = high + 2 * low + 7 + num_warps + programs
    wanted += 3 - torch.arange(n, dtype=torch.int32) % 3
    assert torch.equal(out, wanted)
    padded = max(int(x.max()), 0)
    assert total.tolist() == [int(x.long().sum()), padded, programs]


@gluon.jit
def rows_kernel(x, out, M: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    row = gl.arange(0, M, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    tile = gl.load(x + row[:, None] * N + gl.expand_dims(column, 0))
    gl.store(out + row, gl.sum(tile, 1))
    gl.store(out + M + column, gl.max(tile, axis=0))


def test_slices_of_a_layout(run: Run) -> None:
    x = torch.randint(-99, 99, (16, 64), dtype=torch.int32)
    layout = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    out = torch.zeros(80, dtype=torch.int32)
    out = launch(run, rows_kernel, (1,), x, out, M=16, N=64, LAYOUT=layout)[1]
    assert torch.equal(out, torch.cat([x.sum(1), x.amax(0)]).int())


def test_these_kernels_are_gluon() -> None:
    types = {"x": "*i32", "y": "*i32", "out": "*i32", "total": "*i64", "n": "i32"}
    layouts = [gl.BlockedLayout([size], [32], [4], [0]) for size in (4, 1)]
    build(tour_kernel, types, {"BLOCK": 256, "LAYOUT": layouts[0], "TO": layouts[1]}, 32)
    layout = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    build(rows_kernel, {"x": "*i32", "out": "*i32"}, {"M": 16, "N": 64, "LAYOUT": layout}, 32)


@triton.jit
def types_kernel(addresses, out):
    """In Triton: what both languages have is left alone."""
    x = tl.load(addresses).to(tl.pointer_type(tl.float32))
    tl.static_assert(out.dtype.element_ty == tl.float32)
    for i in tl.static_range(2):
        tl.store(out + i, tl.load(x + i) + tl.constexpr(1))


@gluon.jit
def types_gluon_kernel(addresses, out):
    x = gl.load(addresses).to(gl.pointer_type(gl.float32))
    gl.static_assert(out.dtype.element_ty == gl.float32)
    for i in gl.static_range(2):
        gl.store(out + i, gl.load(x + i) + gl.constexpr(1))


@pytest.mark.parametrize("kernel", [types_kernel, types_gluon_kernel])
def test_types_are_what_they_are(run: Run, kernel: Any) -> None:
    def main(world: sundog.World) -> list[float]:
        x = world.empty((2,)).copy_(torch.tensor([2.5, 7.0]))
        addresses = torch.tensor([x.data_ptr()], device=world.device)
        out = torch.zeros(2, device=world.device)
        kernel[(1,)](addresses, out)
        world.synchronize()
        return out.tolist()

    assert run(main, 1) == [[3.5, 8.0]]


@gluon.jit
def shared_kernel(out, written):
    gl.store(written, 1)
    gl.allocate_shared_memory(gl.int32, [16], gl.SwizzledSharedLayout(1, 1, 1, [0]))  # here


@gluon.jit
def tensor_core_kernel(out, written):
    gl.store(written, 1)
    gl.nvidia.hopper.fence_async_shared()  # here


@gluon.jit
def imported_kernel(out, written):
    gl.store(written, 1)
    bank_conflicts(out, out)  # here


@gluon.jit
def _inner(written):
    gl.store(written, 1)
    gl.warp_specialize([], [])  # here


@triton.jit
def _middle(written):
    _inner(written)


@gluon.jit
def calling_kernel(out, written):
    gl.store(written, 1)
    _middle(written)


@triton.jit
def _makes_a_tile(out, written):
    tl.store(written, 1)
    tl.store(out + tl.arange(0, 16), 1)  # here


@gluon.jit
def tl_kernel(out, written):
    gl.store(written, 1)
    _makes_a_tile(out, written)


REFUSED: dict[Any, tuple[Any, str]] = {
    shared_kernel: (shared_kernel, "gl.allocate_shared_memory"),
    tensor_core_kernel: (tensor_core_kernel, "gl.nvidia.hopper.fence_async_shared"),
    imported_kernel: (imported_kernel, "bank_conflicts"),
    calling_kernel: (_inner, "gl.warp_specialize"),
    tl_kernel: (_makes_a_tile, "tl.arange"),
}


@pytest.mark.sim_only
@pytest.mark.parametrize("kernel", REFUSED, ids=lambda k: k.fn.__name__)
def test_what_is_not_covered_is_refused_before_anything_runs(kernel: Any) -> None:
    function, name = REFUSED[kernel]
    place = next(i for i, text in enumerate(function.raw_src) if "# here" in text)
    line = function.starting_line_number + place
    out, written = torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(CannotInterpret) as caught:
            sundog.run(lambda world: kernel[(1,)](out, written), 1, backend="sim")
        assert f"{function.fn.__name__} at " in str(caught.value)
        assert f"test_gluon.py:{line}: {name} " in str(caught.value)
        assert written.item() == 0


@gluon.jit
def fill_kernel(out):
    gl.store(out, 1)


@pytest.mark.sim_only
def test_launch_options_are_refused_by_name(run: Run) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    with pytest.raises(CannotInterpret, match="fill_kernel: num_ctas=2"):
        launch(run, fill_kernel, (1,), torch.zeros(1), num_ctas=2)
    layout = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float16)
    tensor = torch.zeros(16, 16, dtype=torch.float16)
    descriptor = TensorDescriptor.from_tensor(tensor, [16, 16], layout)
    with pytest.raises(CannotInterpret, match=r"argument out of kernel fill_kernel is a .*hopper"):
        launch(run, fill_kernel, (1,), descriptor)


@pytest.mark.sim_only
def test_gluon_is_left_as_it_was(run: Run) -> None:
    modules = [gl, tl, tl.core, gluon, gl.BlockedLayout]
    before = [dict(vars(module)) for module in modules]
    out = torch.zeros(80, dtype=torch.int32)
    layout = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    x = torch.ones(16, 64, dtype=torch.int32)
    launch(run, rows_kernel, (1,), x, out, M=16, N=64, LAYOUT=layout)
    assert [dict(vars(module)) for module in modules] == before
