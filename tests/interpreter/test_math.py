"""Math functions, and matrix products of every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from .launching import Run, launch

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@triton.jit
def math_kernel(x_ptr, out_ptr, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if OP == "exp":
        y = tl.exp(x)
    elif OP == "exp2":
        y = tl.exp2(x)
    elif OP == "log":
        y = tl.log(x)
    elif OP == "log2":
        y = tl.log2(x)
    elif OP == "sqrt":
        y = tl.sqrt(x)
    elif OP == "rsqrt":
        y = tl.rsqrt(x)
    elif OP == "sin":
        y = tl.sin(x)
    elif OP == "cos":
        y = tl.cos(x)
    elif OP == "erf":
        y = tl.erf(x)
    elif OP == "floor":
        y = tl.floor(x)
    elif OP == "ceil":
        y = tl.ceil(x)
    elif OP == "abs":
        y = tl.abs(x)
    elif OP == "neg":
        y = -x
    elif OP == "sigmoid":
        y = tl.sigmoid(x)
    elif OP == "softmax":
        y = tl.softmax(x)
    else:
        y = tl.clamp(x, -0.5, 1.0)
    tl.store(out_ptr + at, y)


NAMES = [
    "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "abs",
    "neg", "sigmoid",
]  # fmt: skip
MATH: dict[str, Any] = {
    **{name: getattr(torch, name) for name in NAMES},
    "softmax": lambda x: x.softmax(0),
    "clamp": lambda x: x.nan_to_num(-0.5).clamp(-0.5, 1),
}


# Triton has most of them for float32 and float64 only.
OF_ALL = ("abs", "neg", "clamp")


@pytest.mark.parametrize(
    ("dtype", "op"), [(d, op) for d in FLOATS for op in MATH if d.itemsize > 2 or op in OF_ALL]
)
def test_math(run: Run, op: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(256).to(dtype)
    if op != "softmax":
        x[:4] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    wanted = MATH[op](x)
    got = launch(run, math_kernel, (1,), x, torch.zeros_like(x), OP=op, BLOCK=256)[1]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@triton.jit
def dot_kernel(a_ptr, b_ptr, c_ptr, ACC: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    acc = tl.full((N, N), 3, ACC)
    c = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at).trans(), acc, out_dtype=ACC)
    tl.store(c_ptr + at, c)


DOTS = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.int8, torch.int32),
    (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e5m2, torch.float32),
]
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.int32: tl.int32}


@pytest.mark.parametrize(("dtype", "acc"), DOTS)
def test_dot_is_exact_on_whole_numbers(run: Run, dtype: torch.dtype, acc: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b = (torch.randint(-4, 5, (32, 32)).to(dtype) for _ in "ab")
    got = launch(run, dot_kernel, (1,), a, b, torch.zeros(32, 32, dtype=acc), ACC=TYPES[acc], N=32)
    assert torch.equal(got[2].double(), a.double() @ b.double().T + 3)
