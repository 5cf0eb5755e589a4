"""Gluon kernels on the simulator: `gl` runs as `tl`, layouts are checked, the rest is refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import arange as imported_arange
from triton.experimental.gluon.language import bank_conflicts

import sundog
from sundog.errors import CannotInterpret, KernelError

from .launching import Run, launch

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


@gluon.jit
def layout_kernel(
    out, N: gl.constexpr, TWO: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr
):
    gl.static_assert(gl.num_warps() == WARPS)
    if TWO:
        gl.store(out + gl.zeros((N, N), gl.int32, LAYOUT), gl.full((N, N), 1, gl.int32, LAYOUT))
    else:
        at = gl.arange(0, N, LAYOUT)
        gl.store(out + at, at)


BLOCKED = gl.BlockedLayout
LAYOUTS = {  # layout, size, two dimensions, warps
    "fits": (BLOCKED([4], [32], [4], [0]), 1024, False, 4),
    "warps of 64": (BLOCKED([4], [64], [4], [0]), 1024, False, 4),
    "one warp": (BLOCKED([4], [32], [1], [0]), 1024, False, 1),
    "larger than the tensor": (BLOCKED([8], [32], [4], [0]), 64, False, 4),
    "a single element": (BLOCKED([8], [32], [4], [0]), 1, False, 4),
    "too many warps": (BLOCKED([4], [32], [8], [0]), 1024, False, 4),
    "too few warps": (BLOCKED([4], [32], [4], [0]), 1024, False, 8),
    "16 threads": (BLOCKED([4], [16], [4], [0]), 1024, False, 4),
    "128 threads": (BLOCKED([4], [128], [4], [0]), 1024, False, 4),
    "not a power of two": (BLOCKED([3], [32], [4], [0]), 1024, False, 4),
    "nothing per thread": (BLOCKED([0], [32], [4], [0]), 1024, False, 4),
    "order": (BLOCKED([4], [32], [4], [1]), 1024, False, 4),
    "rank 2 for 1": (BLOCKED([1, 4], [1, 32], [1, 4], [1, 0]), 1024, False, 4),
    "two dimensions": (BLOCKED([1, 4], [4, 8], [2, 2], [1, 0]), 64, True, 4),
    "the other order": (BLOCKED([1, 4], [4, 8], [2, 2], [0, 1]), 64, True, 4),
    "order twice": (BLOCKED([1, 4], [4, 8], [2, 2], [1, 1]), 64, True, 4),
    "threads in both": (BLOCKED([1, 4], [8, 16], [2, 2], [1, 0]), 64, True, 4),
    "rank 1 for 2": (BLOCKED([4], [32], [4], [0]), 64, True, 4),
    "slice": (gl.SliceLayout(0, BLOCKED([1, 4], [4, 8], [2, 2], [1, 0])), 64, False, 4),
    "slice of too many warps": (gl.SliceLayout(1, BLOCKED([1, 4], [4, 8], [2, 4], [1, 0])), 64,
                                False, 4),
    "slice outside": (gl.SliceLayout(2, BLOCKED([1, 4], [4, 8], [2, 2], [1, 0])), 64, False, 4),
    "slice of one dimension": (gl.SliceLayout(0, BLOCKED([4], [32], [4], [0])), 64, False, 4),
    "slice for 2": (gl.SliceLayout(0, BLOCKED([1, 4], [4, 8], [2, 2], [1, 0])), 64, True, 4),
}  # fmt: skip


TARGETS = {32: GPUTarget("cuda", 90, 32), 64: GPUTarget("hip", "gfx942", 64)}


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], threads: int) -> None:
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    num_warps = constants.get("WARPS", 4)
    source = GluonASTSource(kernel, {k: signature[k] for k in kernel.arg_names}, constants, {})
    triton.compile(source, target=TARGETS[threads], options={"num_warps": num_warps})


def test_the_kernels_above_are_gluon_indeed() -> None:
    types = {"x": "*i32", "y": "*i32", "out": "*i32", "total": "*i64", "n": "i32"}
    layouts = [BLOCKED([size], [32], [4], [0]) for size in (4, 1)]
    build(tour_kernel, types, {"BLOCK": 256, "LAYOUT": layouts[0], "TO": layouts[1]}, 32)
    layout = BLOCKED([1, 4], [4, 8], [4, 1], [1, 0])
    build(rows_kernel, {"x": "*i32", "out": "*i32"}, {"M": 16, "N": 64, "LAYOUT": layout}, 32)


@functools.cache
def compiler_takes(case: str) -> bool:
    layout, size, two, num_warps = LAYOUTS[case]
    constants = {"N": size, "TWO": two, "LAYOUT": layout, "WARPS": num_warps}
    for threads in TARGETS:
        try:
            build(layout_kernel, {"out": "*i32"}, constants, threads)
        except (triton.CompilationError, RuntimeError):
            continue
        return True
    return False


@pytest.mark.sim_only
@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_are_refused_where_the_compiler_refuses_them(run: Run, case: str) -> None:
    layout, size, two, num_warps = LAYOUTS[case]
    constants = {"N": size, "TWO": two, "LAYOUT": layout, "WARPS": num_warps}
    constants["num_warps"] = num_warps
    out = torch.zeros(1024, dtype=torch.int32)
    if compiler_takes(case):
        launch(run, layout_kernel, (1,), out, **constants)
    else:
        with pytest.raises(KernelError, match=r"of shape .* can't have"):
            launch(run, layout_kernel, (1,), out, **constants)


def test_some_layouts_are_taken_and_some_refused() -> None:
    assert 6 < sum(map(compiler_takes, LAYOUTS)) < len(LAYOUTS) - 6


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
def test_what_is_not_covered_is_refused_before_anything_runs(run: Run, kernel: Any) -> None:
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
def test_what_it_is_launched_with_is_refused_by_name(run: Run) -> None:
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
