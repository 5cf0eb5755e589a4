"""The simulator takes the layouts that the compiler takes, and no others."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sundog.errors import KernelError

from .launching import Run, launch

pytestmark = pytest.mark.compat


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
    "slice of too many warps": (
        gl.SliceLayout(1, BLOCKED([1, 4], [4, 8], [2, 4], [1, 0])),
        64,
        False,
        4,
    ),
    "slice outside": (gl.SliceLayout(2, BLOCKED([1, 4], [4, 8], [2, 2], [1, 0])), 64, False, 4),
    "slice of one dimension": (gl.SliceLayout(0, BLOCKED([4], [32], [4], [0])), 64, False, 4),
    "slice for 2": (gl.SliceLayout(0, BLOCKED([1, 4], [4, 8], [2, 2], [1, 0])), 64, True, 4),
}


TARGETS = {32: GPUTarget("cuda", 90, 32), 64: GPUTarget("hip", "gfx942", 64)}


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], threads: int) -> None:
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    num_warps = constants.get("WARPS", 4)
    source = GluonASTSource(kernel, {k: signature[k] for k in kernel.arg_names}, constants, {})
    triton.compile(source, target=TARGETS[threads], options={"num_warps": num_warps})


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
def warps_kernel(out, ONE: gl.constexpr, OTHER: gl.constexpr):
    gl.store(out + gl.arange(0, 64, ONE), 1)
    gl.store(out + gl.arange(0, 64, OTHER), 2)


@pytest.mark.sim_only
@pytest.mark.parametrize("threads", [32, 64])
def test_a_kernel_has_one_size_of_warps(run: Run, threads: int) -> None:
    layouts = [BLOCKED([1], [threads], [4], [0]), BLOCKED([2], [96 - threads], [4], [0])]
    out = torch.zeros(64)
    launch(run, warps_kernel, (1,), out, ONE=layouts[0], OTHER=layouts[0])
    with pytest.raises(KernelError, match=rf"another layout of this kernel {threads}"):
        launch(run, warps_kernel, (1,), out, ONE=layouts[0], OTHER=layouts[1])
