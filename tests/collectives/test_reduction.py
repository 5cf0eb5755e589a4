"""What the compilers make of the reducing kernels: all loads in flight, wide, 64-bit offsets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sundog.collectives import _reduce
from sundog.ops.load import find

pytestmark = pytest.mark.compat

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
SIZES = ("numel", "stride", "slice_numel", "dst")
CONSTANTS = {"OP": "avg", "SIZE": 8, "BLOCK": 2048, "ALIGNED": True, "TRACE": False}


def compiled(kernel: Any, target: str, dtype: str, odd: tuple[str, ...] = ()) -> dict[str, str]:
    """The kernel's code by stage. Pointers and sizes are multiples of 16, but for the odd ones."""
    data = ("x", "out", "buffer", "inbox")
    types = {
        n: f"*{dtype}" if n in data else "i32" if n in SIZES else "*i64" for n in kernel.arg_names
    }
    signature = {n: "constexpr" if n in CONSTANTS else kind for n, kind in types.items()}
    constants = {n: CONSTANTS[n] for n in kernel.arg_names if n in CONSTANTS}
    even = [i for i, n in enumerate(signature) if n not in CONSTANTS and n not in odd]
    attrs = {(i,): [["tt.divisibility", 16]] for i in even}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=TARGETS[target]).asm


@triton.jit
def every_operator(x, out, ctx, BLOCK: tl.constexpr):
    xs = _reduce.everywhere(x, 0, ctx, 3)
    at = tl.arange(0, BLOCK)
    tl.store(out + at, _reduce.reduce_ranks(xs, at, None, "sum", 3))
    tl.store(out + at, _reduce.reduce_ranks(xs, at, None, "avg", 3))
    tl.store(out + at, _reduce.reduce_ranks(xs, at, None, "min", 3))
    tl.store(out + at, _reduce.reduce_ranks(xs, at, None, "max", 3))
    tl.store(out + at, _reduce.reduce_ranks(xs, at, None, "prod", 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "fp64", "i8"])
def test_every_operator_compiles(target: str, dtype: str) -> None:
    code = compiled(every_operator, target, dtype)
    if target == "sm_90" and dtype == "bf16":
        # an average as torch gives it, not the fast division; a NaN stays one
        assert "div.rn.f32" in code["ptx"]
        assert "div.full" not in code["ptx"]
        assert "min.NaN." in code["ptx"]
        assert "max.NaN." in code["ptx"]


KERNELS = {
    "all_reduce.one_shot": "_one_shot_kernel",
    "all_reduce.two_shot": "_two_shot_kernel",
    "all_reduce.ring": "_ring_kernel",
    "reduce_scatter.direct": "_direct_kernel",
    "reduce.direct": "_direct_kernel",
}


@pytest.mark.parametrize("op", KERNELS)
def test_wide_in_the_middle_and_offsets_of_64_bits(op: str) -> None:
    """An odd number of elements costs one narrow access per tensor, of fewer than 16 bytes."""
    code = compiled(getattr(find(op), KERNELS[op]), "sm_90", "bf16", odd=("numel",))
    ptx = code["ptx"]
    wide = re.findall(r"ld\.global\.v4\.b32", ptx)
    narrow = re.findall(r"ld\.global\.b16", ptx)
    assert 0 < len(narrow) <= len(wide)
    assert len(re.findall(r"st\.global\.b16", ptx)) <= len(re.findall(r"st\.global\.v4\.b32", ptx))
    for name in SIZES[:3]:
        for line in re.findall(rf".*%{name}\b(?!:).*", code["ttir"]):
            assert "arith.extsi" in line, line  # widened before anything is computed from it
    offsets = re.findall(
        r"tt\.addptr .*: tensor<2048x!tt\.ptr<bf16>>, tensor<2048x(i\d+)>", code["ttir"]
    )
    assert offsets
    assert set(offsets) == {"i64"}


@pytest.mark.parametrize("op", ["all_reduce.one_shot", "all_reduce.two_shot", "reduce_scatter"])
def test_all_ranks_are_loaded_before_the_first_addition(op: str) -> None:
    """8 ranks, 2 vectors of 16 bytes a thread: 16 loads in flight, in order, then arithmetic."""
    name = KERNELS.get(op, "_direct_kernel")
    ptx = compiled(getattr(find(op), name), "sm_90", "bf16", odd=("numel",))["ptx"]
    events = re.findall(r"ld\.global\.v4\.b32|add\.(?:rn\.)?(?:ftz\.)?f32", ptx)
    runs = re.findall(r"l+", "".join("l" if e.startswith("ld") else "a" for e in events))
    assert max(map(len, runs)) >= 16
