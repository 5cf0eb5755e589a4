"""Element by element, every dtype: what a kernel computes is what torch computes."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from .launching import Run, launch, same

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.0, float("inf"), -float("inf"), float("nan"), 1e-40, -1e-40]
N = 519  # not a multiple of anything
BLOCK = 256
GRID = (triton.cdiv(N, BLOCK),)


@triton.jit
def binary_kernel(x_ptr, y_ptr, out_ptr, N, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=1)
    y = tl.load(y_ptr + at, mask=at < N, other=1)
    if OP == "+":
        z = x + y
    elif OP == "-":
        z = x - y
    elif OP == "*":
        z = x * y
    elif OP == "/":
        z = x / y
    elif OP == "//":
        z = x // y
    elif OP == "%":
        z = x % y
    elif OP == "&":
        z = x & y
    elif OP == "|":
        z = x | y
    elif OP == "^":
        z = x ^ y
    elif OP == "<<":
        z = x << y
    elif OP == ">>":
        z = x >> y
    elif OP == "min":
        z = tl.minimum(x, y)
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "max with nan":
        z = tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "<":
        z = x < y
    elif OP == "<=":
        z = x <= y
    elif OP == ">":
        z = x > y
    elif OP == ">=":
        z = x >= y
    elif OP == "==":
        z = x == y
    elif OP == "!=":
        z = x != y
    else:
        z = tl.where(x < y, x, y)
    tl.store(out_ptr + at, z, mask=at < N)


def floats(dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    numbers = torch.randn(N, dtype=torch.float64) * 4
    numbers[: len(SPECIAL) ** 2] = torch.tensor(
        [a if seed else b for a in SPECIAL for b in SPECIAL], dtype=torch.float64
    )
    return numbers.to(dtype)


def integers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    info = np.iinfo(str(dtype).removeprefix("torch."))
    random = np.random.default_rng(seed)
    numbers = random.integers(info.min, info.max, N, dtype=info.dtype, endpoint=True)
    numbers[:4] = [info.min, info.max, info.max, 0]
    return torch.from_numpy(numbers)


def binary(run: Run, x: torch.Tensor, y: torch.Tensor, op: str, out: torch.dtype) -> torch.Tensor:
    result = torch.zeros(N, dtype=out)
    return launch(run, binary_kernel, GRID, x, y, result, N, OP=op, BLOCK=BLOCK)[2]


FLOAT_OPS: dict[str, Any] = {
    "+": torch.add, "-": torch.sub, "*": torch.mul, "min": torch.fmin, "max": torch.fmax,
    "max with nan": torch.maximum, "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge,
    "==": torch.eq, "!=": torch.ne, "where": lambda x, y: torch.where(x < y, x, y),
}  # fmt: skip


@pytest.mark.parametrize("op", FLOAT_OPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_bitwise_right(run: Run, op: str, dtype: torch.dtype) -> None:
    x, y = floats(dtype, 0), floats(dtype, 1)
    wanted = FLOAT_OPS[op](x, y)
    got = binary(run, x, y, op, wanted.dtype)
    assert same(got, wanted, zero_sign="m" not in op)  # max(0, -0) may be either


@pytest.mark.parametrize("dtype", FLOATS)
def test_division_of_floats(run: Run, dtype: torch.dtype) -> None:
    x, y = floats(dtype, 0), floats(dtype, 1)
    got = binary(run, x, y, "/", dtype).double()
    torch.testing.assert_close(got, (x / y).double(), rtol=1e-6, atol=0, equal_nan=True)


INTEGER_OPS: dict[str, Any] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "&": np.bitwise_and, "|": np.bitwise_or,
    "^": np.bitwise_xor, "min": np.minimum, "max": np.maximum, "<": np.less, ">=": np.greater_equal,
    "==": np.equal, "!=": np.not_equal, "<<": np.left_shift, ">>": np.right_shift,
    "//": lambda x, y: np.array([_quotient(int(a), int(b)) for a, b in zip(x, y)], x.dtype),  # noqa: B905
    "%": np.fmod,
}  # fmt: skip


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("op", INTEGER_OPS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_without_a_warning(run: Run, op: str, dtype: torch.dtype) -> None:
    x, y = integers(dtype, 0), integers(dtype, 1)
    if op in ("<<", ">>"):
        y = torch.from_numpy(np.arange(N).astype(y.numpy().dtype) % (8 * dtype.itemsize))
    if op in ("//", "%"):  # by zero, and the smallest by -1, mean nothing
        divisors = y.numpy().copy()
        divisors[(divisors == 0) | (divisors + divisors.dtype.type(1) == 0)] = 7
        y = torch.from_numpy(divisors)
    wanted = torch.from_numpy(INTEGER_OPS[op](x.numpy(), y.numpy()))
    assert same(binary(run, x, y, op, wanted.dtype), wanted)


@triton.jit
def bool_kernel(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    y = tl.load(y_ptr + at)
    tl.store(out_ptr + at, x & y)
    tl.store(out_ptr + BLOCK + at, x | ~y)
    tl.store(out_ptr + 2 * BLOCK + at, x ^ y)
    tl.store(out_ptr + 3 * BLOCK + at, x == y)
    tl.store(out_ptr + 4 * BLOCK + at, x.to(tl.int32) + y.to(tl.int32) > 1)


def test_bool(run: Run) -> None:
    x, y = torch.rand(64) < 0.5, torch.rand(64) < 0.5
    got = launch(run, bool_kernel, (1,), x, y, torch.zeros(320, dtype=torch.bool), BLOCK=64)[2]
    assert torch.equal(got, torch.cat([x & y, x | ~y, x ^ y, x == y, x & y]))


@triton.jit
def cast_kernel(x_ptr, out_ptr, N, MODE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < N, other=0.0)
    y = x.to(out_ptr.dtype.element_ty, fp_downcast_rounding=MODE)
    tl.store(out_ptr + at, y, mask=at < N)


def cast(
    run: Run, x: torch.Tensor, dtype: torch.dtype, mode: str | None = None, block: int = BLOCK
) -> torch.Tensor:
    out = torch.zeros(x.numel(), dtype=dtype)
    grid = (triton.cdiv(x.numel(), block),)
    return launch(run, cast_kernel, grid, x, out, x.numel(), MODE=mode, BLOCK=block)[1]


# Triton casts float8 to and from float32, float16 and bfloat16 only.
CASTS = [
    *itertools.product([*FLOATS, *INTEGERS, torch.bool], repeat=2),
    *itertools.product(FLOATS[1:], FLOAT8),
    *itertools.product(FLOAT8, FLOATS[1:]),
]


@pytest.mark.parametrize(("target", "source"), CASTS)
def test_casts_in_all_directions(run: Run, source: torch.dtype, target: torch.dtype) -> None:
    torch.manual_seed(0)
    unsigned = {source, target} & {torch.bool, *INTEGERS[4:]}
    low, high = (0, 100) if unsigned else (-100, 100)
    numbers = torch.rand(N, dtype=torch.float64) * (high - low) + low
    x = numbers.to(source)
    assert same(cast(run, x, target), x.to(target))


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integers_are_cut_and_extended(run: Run, source: torch.dtype, target: torch.dtype) -> None:
    x = integers(source, 3)
    assert same(cast(run, x, target), torch.from_numpy(x.numpy().astype(str(target)[6:])))


def halfway(count: int) -> torch.Tensor:
    """float32 bits of every kind around the places where rounding to 16 bits decides."""
    high = np.arange(0, 1 << 16, (1 << 16) // count, dtype=np.uint32) << np.uint32(16)
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0xFFFF, 0x1000, 0x1001], np.uint32)
    return torch.from_numpy((high[:, None] + low[None, :]).ravel().view(np.float32))


def test_float32_to_bfloat16_rounds_to_nearest_even(run: Run) -> None:
    x = halfway(1 << 13)
    assert same(cast(run, x, torch.bfloat16, block=8192), x.to(torch.bfloat16))


def test_float32_to_float16_rounds_to_nearest_even(run: Run) -> None:
    torch.manual_seed(1)
    x = torch.cat([halfway(1 << 12), torch.randn(4096) * 1e-6, torch.randn(4096) * 4e4])
    assert same(cast(run, x, torch.float16, block=8192), x.to(torch.float16))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_float64_is_rounded_once(run: Run, target: torch.dtype) -> None:
    step = torch.finfo(target).eps
    more = 1 + step / 2 + 2**-40  # in float32 this is halfway, and would be rounded to 1
    x = torch.tensor([more, 1 + step / 2, 1 + 1.5 * step, -more], dtype=torch.float64)
    wanted = torch.tensor([1 + step, 1, 1 + 2 * step, -1 - step], dtype=target)
    assert same(cast(run, x, target), wanted)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_rounding_toward_zero(run: Run, target: torch.dtype) -> None:
    x = halfway(1 << 10)
    got = cast(run, x, target, "rtz", block=2048).double()
    near = x.to(target)
    bits = near.view(torch.int16)
    below = torch.where(near.double().abs() > x.double().abs(), bits - 1, bits).view(target)
    assert same(got, below.double())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_holds_what_torch_holds(run: Run, dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    assert same(cast(run, every, torch.float32), every.float())
    torch.manual_seed(2)
    largest = torch.finfo(dtype).max
    numbers = torch.cat([torch.randn(2048), every.float().clamp(-largest, largest) * 1.0625])
    numbers = numbers.nan_to_num(nan=0.0).clamp(-largest, largest)
    assert same(cast(run, numbers, dtype).float(), numbers.to(dtype).float())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_saturates(run: Run, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([1e9, -1e9, float("inf"), -float("inf"), float("nan"), largest * 1.01])
    wanted = torch.tensor([1, -1, 1, -1, float("nan"), 1]) * largest
    assert same(cast(run, x, dtype).float(), wanted)


@pytest.mark.parametrize("target", [torch.int32, torch.int64, torch.uint32, torch.int16])
def test_floats_that_do_not_fit_become_the_nearest_integer(run: Run, target: torch.dtype) -> None:
    x = torch.tensor([1e30, -1e30, float("inf"), -float("inf"), float("nan"), -2.9, 2.9])
    info = np.iinfo(str(target)[6:])
    small = -2 if info.min else 0
    nan = info.min if target == torch.int64 else 0
    wanted = np.array([info.max, info.min, info.max, info.min, nan, small, 2], info.dtype)
    assert same(cast(run, x, target), torch.from_numpy(wanted))


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, y, z = tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at)
    tl.store(out_ptr + at, tl.fma(x, y, z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fma_rounds_once(run: Run, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x, y = torch.randn(1024, dtype=dtype), torch.randn(1024, dtype=dtype)
    z = -(x * y) * (1 + torch.randint(-2, 3, (1024,)) * torch.finfo(dtype).eps)
    x[:4] = y[:4] = 1 + 2**-12  # the product is halfway between two float32
    z[:4] = torch.tensor([2.0**-60, -(2.0**-60), 2.0**-100, 0], dtype=dtype)
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    function = libm.fmaf if dtype == torch.float32 else libm.fma
    number = ctypes.c_float if dtype == torch.float32 else ctypes.c_double
    function.restype, function.argtypes = number, [number] * 3
    wanted = [function(*each) for each in zip(x.tolist(), y.tolist(), z.tolist(), strict=True)]
    got = launch(run, fma_kernel, (4,), x, y, z, torch.zeros(1024, dtype=dtype), BLOCK=256)[3]
    assert same(got, torch.tensor(wanted, dtype=dtype))
