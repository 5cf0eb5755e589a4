"""Functions of whole tiles: math, matrix products, reductions, scans, shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from .launching import Run, launch, same

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


@pytest.mark.parametrize("op", MATH)
@pytest.mark.parametrize("dtype", FLOATS)
def test_math(run: Run, op: str, dtype: torch.dtype) -> None:
    if dtype.itemsize == 2 and op not in ("abs", "neg", "clamp"):
        pytest.skip("Triton has it for float32 and float64 only")
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
    (torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32), (torch.int8, torch.int32),
    (torch.float8_e4m3fn, torch.float32), (torch.float8_e5m2, torch.float32),
]  # fmt: skip
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.int32: tl.int32}


@pytest.mark.parametrize(("dtype", "acc"), DOTS)
def test_dot_is_exact_on_whole_numbers(run: Run, dtype: torch.dtype, acc: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b = (torch.randint(-4, 5, (32, 32)).to(dtype) for _ in "ab")
    got = launch(run, dot_kernel, (1,), a, b, torch.zeros(32, 32, dtype=acc), ACC=TYPES[acc], N=32)
    assert torch.equal(got[2].double(), a.double() @ b.double().T + 3)


@triton.jit
def reduce_kernel(
    x_ptr, out_ptr, OP: tl.constexpr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr
):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    if OP == "sum":
        y = tl.sum(x, AXIS, keep_dims=True)
    elif OP == "max":
        y = tl.max(x, AXIS, keep_dims=True)
    elif OP == "min":
        y = tl.min(x, AXIS, keep_dims=True)
    elif OP == "argmax":
        y = tl.argmax(x, AXIS, keep_dims=True)
    elif OP == "argmin":
        y = tl.argmin(x, AXIS, keep_dims=True)
    elif OP == "xor":
        y = tl.xor_sum(x, AXIS, keep_dims=True)
    if AXIS == 0:
        tl.store(out_ptr + tl.arange(0, N)[None, :], y)
    else:
        tl.store(out_ptr + tl.arange(0, M)[:, None], y)


def reduced(run: Run, x: torch.Tensor, op: str, axis: int, out: torch.dtype) -> torch.Tensor:
    result = torch.zeros(x.shape[1 - axis], dtype=out)
    M, N = x.shape
    return launch(run, reduce_kernel, (1,), x, result, OP=op, AXIS=axis, M=M, N=N)[1]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", ["sum", "max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.int32, torch.int64])
def test_reductions(run: Run, op: str, dtype: torch.dtype, axis: int) -> None:
    torch.manual_seed(2)
    x = torch.randint(-50, 50, (16, 32)).to(dtype)  # with ties; every sum is exact
    if op.startswith("arg"):  # the leftmost of equals
        value = (x.amax if op == "argmax" else x.amin)(axis, keepdim=True)
        wanted = (x == value).to(torch.int32).argmax(axis).to(torch.int32)
    else:
        wide = x.to(torch.int64 if x.dtype.itemsize < 8 and not x.is_floating_point() else x.dtype)
        wanted = {"sum": wide.sum, "max": x.amax, "min": x.amin}[op](axis)
        wanted = wanted.to(torch.int32) if op == "sum" and dtype == torch.int8 else wanted.to(dtype)
    assert same(reduced(run, x, op, axis, wanted.dtype), wanted)


def test_integer_sums_wrap(run: Run) -> None:
    x = torch.full((4, 8), 2**30, dtype=torch.int32)
    x[0, 0] = 17
    wanted = x.sum(1).to(torch.int32)
    assert same(reduced(run, x, "sum", 1, torch.int32), wanted)
    bits = torch.randint(-(2**31), 2**31, (16, 16)).to(torch.int32)
    folded = bits[:, 0].clone()
    for column in bits.T[1:]:
        folded ^= column
    assert same(reduced(run, bits, "xor", 1, torch.int32), folded)


def test_a_nan_loses_against_any_number(run: Run) -> None:
    x = torch.randn(4, 8)
    x[0, 3] = x[1, 0] = x[3, :] = float("nan")
    wanted = x.nan_to_num(-99).amax(1)
    wanted[3] = float("nan")
    assert same(reduced(run, x, "max", 1, torch.float32), wanted)


@triton.jit
def _affine(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def scan_kernel(a_ptr, b_ptr, a_out, b_out, sums, both, N: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    c, d = tl.associative_scan((a, b), 0, _affine, reverse=REVERSE)
    tl.store(a_out + at, c)
    tl.store(b_out + at, d)
    tl.store(sums + at, tl.cumsum(b, 0, reverse=REVERSE))
    e, f = tl.reduce((a, b), 0, _affine)
    tl.store(both, e)
    tl.store(both + 1, f)
    tl.store(both + 2, tl.sum(b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("reverse", [False, True])
def test_scans_keep_the_order(run: Run, dtype: torch.dtype, reverse: bool) -> None:
    """A combine function that is associative but not commutative."""
    torch.manual_seed(3)
    a = torch.randint(0, 2, (64,)).mul(2).sub(1).to(dtype)
    b = torch.randint(-9, 10, (64,)).to(dtype)
    empty = torch.zeros(64, dtype=dtype)
    got = launch(
        run, scan_kernel, (1,), a, b, empty, empty, empty, empty[:3], N=64, REVERSE=reverse
    )[2:]
    order = range(63, -1, -1) if reverse else range(64)
    scale, shift, total = 1, 0, 0
    wanted = torch.zeros(3, 64, dtype=dtype)
    for i in order:
        scale, shift, total = scale * a[i], shift * a[i] + b[i], total + b[i]
        wanted[:, i] = torch.tensor([scale, shift, total])
    assert torch.equal(torch.stack(got[:3]), wanted)
    forward = [1, 0]
    for i in range(64):
        forward = [forward[0] * a[i], forward[1] * a[i] + b[i]]
    assert got[3].tolist() == [*forward, b.sum()]


@triton.jit
def bfloat16_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out_ptr, tl.reduce(x, 0, _add))
    tl.store(out_ptr + 1 + tl.arange(0, N), tl.associative_scan(x, 0, _add))


def test_bfloat16_with_a_combine_function(run: Run) -> None:
    x = torch.randint(-4, 4, (64,)).to(torch.bfloat16)  # every partial sum is exact
    got = launch(run, bfloat16_kernel, (1,), x, torch.zeros(65, dtype=torch.bfloat16), N=64)[1]
    assert same(got, torch.cat([x.sum(0, keepdim=True), x.cumsum(0)]).to(torch.bfloat16))


@triton.jit
def shapes_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    square = tl.reshape(x, (N // 8, 8))
    out_ptr += tl.arange(0, 2 * N)
    tl.store(out_ptr, tl.interleave(x, y))
    pairs = tl.join(x, y)
    left, right = tl.split(pairs)
    tl.store(out_ptr + 2 * N, tl.cat(left, right, can_reorder=True))
    moved = tl.permute(square.trans(), (1, 0)).trans()
    tl.store(out_ptr + 4 * N, tl.interleave(tl.ravel(moved), tl.flip(x, 0)))
    wide = tl.broadcast_to(tl.expand_dims(x, 0), (2, N)) + tl.zeros((2, N), x.dtype)
    tl.store(out_ptr + 6 * N, tl.ravel(wide))
    tl.store(out_ptr + 8 * N, tl.interleave(tl.sort(x), tl.sort(x, descending=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int16])
def test_shapes(run: Run, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x, y = torch.randint(-99, 99, (2, 32)).to(dtype)
    got = launch(run, shapes_kernel, (1,), x, y, torch.zeros(320, dtype=dtype), N=32)[2]
    ordered = x.sort().values
    wanted = [
        torch.stack([x, y], 1),
        torch.cat([x, y]),
        torch.stack([x.view(4, 8).T.ravel(), x.flip(0)], 1),
        torch.cat([x, x]),
        torch.stack([ordered, ordered.flip(0)], 1),
    ]
    parts = got.view(5, 64)
    for part, want in zip(parts, wanted, strict=True):
        assert same(part, want.ravel())


@triton.jit
def counts_kernel(x_ptr, index_ptr, out_ptr, taken_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + tl.arange(0, 16), tl.histogram(x, 16, mask=at % 2 == 0))
    tl.store(taken_ptr + at, tl.gather(x, tl.load(index_ptr + at), 0))


def test_histogram_and_gather(run: Run) -> None:
    torch.manual_seed(5)
    x = torch.randint(0, 16, (64,), dtype=torch.int32)
    index = torch.randint(0, 64, (64,), dtype=torch.int32)
    out = torch.zeros(16, dtype=torch.int32)
    got = launch(run, counts_kernel, (1,), x, index, out, torch.zeros_like(x), N=64)
    assert torch.equal(got[2].long(), torch.bincount(x[::2], minlength=16))
    assert torch.equal(got[3], x[index.long()])
