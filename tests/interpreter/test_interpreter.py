"""Triton's language: control flow, functions, arguments, types."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from sundog.errors import KernelError

from .launching import Run, launch

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]

TWELVE = tl.constexpr(12)


@triton.jit
def _twice(x, by=2):
    return x * by


@triton.jit
def _both_ways(x, y, SWAP: tl.constexpr = False):
    if SWAP:
        return y, x
    return x, y


@triton.jit
def control_kernel(out, n, first, last):
    total = tl.full((), 0, tl.int64)
    for i in range(first, last, 2):  # a loop variable is a tensor
        total += i.to(tl.int64) * n
    tl.store(out, total)
    product = 1
    for i in tl.static_range(1, 5):
        product = product * i
    tl.store(out + 1, product)
    steps = 0
    x = n
    while x != 1:
        x = tl.where(x % 2 == 0, x // 2, 3 * x + 1)
        steps += 1
    tl.store(out + 2, steps)
    a, b = _both_ways(first, last, SWAP=True)
    tl.store(out + 3, a * 100 + b)
    tl.store(out + 4, _twice(n) + _twice(_twice(n, 3), by=TWELVE))
    tl.store(out + 5, n if n > 5 and last > 5 else -n)
    down = 0
    for i in tl.range(3, 0, -1):
        down = down * 10 + i
    tl.store(out + 6, down)
    tl.store(out + 7, 0 if not n % 7 == 0 else 1)  # noqa: SIM201


def test_control_flow(run: Run) -> None:
    got = launch(run, control_kernel, (1,), torch.zeros(8, dtype=torch.int64), 7, 1, 10)[0]
    assert got.tolist() == [7 * 25, 24, 16, 1001, 14 + 7 * 36, 7, 321, 1]


@triton.jit
def _less_four_half(x):
    x -= 4  # from here on a tensor, also if it was given a number
    return x // 2


@triton.jit
def assigned_kernel(out, n):
    low, high = -7, 2
    tl.store(out, low // high)  # toward zero: they are tensors, not Python's numbers
    first, second, third = 1, n, -9
    tl.store(out + 1, first.to(tl.int64) + second + third // 2)
    typed: tl.tensor = -5
    tl.store(out + 2, typed // 2)
    size: tl.constexpr = 2
    tl.store(out + 3, tl.sum(tl.arange(0, size)))
    tl.store(out + 4, _less_four_half(-3))
    total = 0
    for i in tl.range(0, n, 1, 2):  # the last is num_stages
        total += i
    tl.store(out + 5, total)


def test_assigned_numbers_are_tensors(run: Run) -> None:
    got = launch(run, assigned_kernel, (1,), torch.zeros(6, dtype=torch.int64), 7)[0]
    assert got.tolist() == [-3, 1 + 7 - 4, -2, 1, -3, 21]


@triton.jit
def tiles_kernel(x_ptr, out, maybe_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out + at, (x > 2 and x < 9) or x == 0)
    tl.store(out + N + at, not x > 2)
    if maybe_ptr is not None and tl.load(maybe_ptr) > 0:
        tl.store(out + at, x > 99)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_and_or_not_of_tiles_are_element_by_element(run: Run) -> None:
    x = torch.arange(16, dtype=torch.int32)
    got = launch(run, tiles_kernel, (1,), x, torch.zeros(32, dtype=torch.bool), None, N=16)[1]
    assert torch.equal(got, torch.cat([((x > 2) & (x < 9)) | (x == 0), ~(x > 2)]))


@triton.jit
def condition_kernel(x_ptr):
    if tl.load(x_ptr + tl.arange(0, 4)) > 0:
        tl.store(x_ptr, 1)


@pytest.mark.sim_only
def test_a_tile_is_no_condition(run: Run) -> None:
    with pytest.raises(KernelError, match="condition of 4 elements"):
        launch(run, condition_kernel, (1,), torch.ones(4))


def make_kernel(offset: int, table: tl.constexpr) -> Callable:
    @triton.jit
    def closure_kernel(out):
        tl.store(out, OFFSET + TABLE)

    OFFSET, TABLE = tl.constexpr(offset), table
    return closure_kernel


def test_closures(run: Run) -> None:
    for offset in (3, 4):
        kernel = make_kernel(offset, tl.constexpr(100))
        assert (
            launch(run, kernel, (1,), torch.zeros(1, dtype=torch.int32))[0].item() == 100 + offset
        )


@triton.jit
def arguments_kernel(out, flag, small, large, huge, real, nothing, pair, number=5):
    tl.store(out, small.to(tl.int64) * 2)
    tl.store(out + 1, large * 2)
    tl.store(out + 2, (huge // 2).to(tl.int64))
    tl.store(out + 3, (real.to(tl.float64) * 1e9).to(tl.int64))
    tl.store(out + 4, pair[0] + pair[1] + number)
    if flag:
        tl.store(out + 5, 1)
    if nothing is None:
        tl.store(out + 6, 1)
    tl.static_assert(real.dtype == tl.float32)
    tl.static_assert(large.dtype == tl.int64)


def test_arguments_have_the_types_that_a_gpu_gives_them(run: Run) -> None:
    args = (True, 2**31 - 1, 2**31, 2**64 - 2, 0.1, None, (7, 8))
    got = launch(run, arguments_kernel, (1,), torch.zeros(7, dtype=torch.int64), *args)[0]
    tenth = int(torch.tensor(0.1).double() * 1e9)
    assert got.tolist() == [2**32 - 2, 2**32, 2**63 - 1, tenth, 20, 1, 1]


@triton.jit
def mixed_kernel(small, large, unsigned, half, brain, single, out, N: tl.constexpr):
    at = tl.arange(0, N)
    i, j, u = tl.load(small + at), tl.load(large + at), tl.load(unsigned + at)
    h, b, f = tl.load(half + at), tl.load(brain + at), tl.load(single + at)
    tl.static_assert((i * j).dtype == tl.int64)
    tl.static_assert((i + u).dtype == tl.uint32)
    tl.static_assert((h + b).dtype == tl.float16)
    tl.static_assert((b * f).dtype == tl.float32)
    tl.static_assert((h / h).dtype == tl.float32)
    tl.static_assert((b * 2).dtype == tl.bfloat16)
    tl.static_assert((i * 2.5).dtype == tl.float32)
    tl.store(out + at, (i * j).to(tl.float64) + (j + i) + (i + u))
    tl.store(out + N + at, (b * f) + (f * i) + (i + f) + h * 0.5 + (1 + b) + (1 - i))


def test_types_are_promoted(run: Run) -> None:
    torch.manual_seed(0)
    i, j, u = (torch.randint(1, 2**20, (32,)) for _ in "iju")
    h, b, f = (torch.randint(-99, 99, (32,)).double() for _ in "hbf")
    types = torch.int32, torch.int64, torch.uint32, torch.float16, torch.bfloat16, torch.float32
    tensors = [t.to(d) for t, d in zip((i % 64, j, u, h, b, f), types, strict=True)]
    got = launch(run, mixed_kernel, (1,), *tensors, torch.zeros(64, dtype=torch.float64), N=32)[6]
    i = i % 64
    first = i * j + j + i + i + u
    second = b * f + f * i + i + f + h / 2 + 1 + b + 1 - i
    assert got.tolist() == [*first.tolist(), *second.tolist()]


@triton.jit
def range_kernel(x_ptr, NUMBER: tl.constexpr):
    tl.store(x_ptr, tl.load(x_ptr) + NUMBER)


@pytest.mark.sim_only
@pytest.mark.parametrize(("dtype", "number"), [(torch.int8, 300), (torch.uint32, -1)])
def test_numbers_that_do_not_fit_are_refused(run: Run, dtype: torch.dtype, number: int) -> None:
    with pytest.raises(KernelError, match=r"out of range|negative scalar"):
        launch(run, range_kernel, (1,), torch.ones(1).to(dtype), NUMBER=number)


@triton.jit
def wrap_kernel(out, n):
    tl.store(out, n * n)  # in 32 bits, as both are
    tl.store(out + 1, n.to(tl.int64) * n)
    tl.store(out + 2, ~n.to(tl.uint32))


def test_arithmetic_wraps_silently(run: Run) -> None:
    got = launch(run, wrap_kernel, (1,), torch.zeros(3, dtype=torch.int64), 70000)[0]
    assert got.tolist() == [70000**2 - 2**32, 70000**2, 2**32 - 1 - 70000]


@triton.jit
def print_kernel(x_ptr, GOOD: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_print("x", x)
    tl.device_assert(x < 3, "too large")
    tl.static_assert(GOOD, "not good")


@pytest.mark.sim_only
def test_print_and_assert(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
    launch(run, print_kernel, (1,), x, GOOD=True, N=2)
    assert "rank 0 program (0, 0, 0) of print_kernel" in (text := capfd.readouterr().out)
    assert "[0.5 1.5]" in text
    with pytest.raises(KernelError, match="not good"):
        launch(run, print_kernel, (1,), x, GOOD=False, N=2)
    with pytest.raises(KernelError, match=r"test_interpreter.py:\d+: .*too large"):
        launch(run, print_kernel, (1,), x * 4, GOOD=True, N=2)


def test_kernel_globals_stay_as_they_are(run: Run) -> None:
    before = dict(globals())
    launch(run, control_kernel, (1,), torch.zeros(8, dtype=torch.int64), 7, 1, 10)
    assert globals().keys() == before.keys()
    assert all(globals()[name] is value for name, value in before.items())
    assert isinstance(control_kernel, triton.JITFunction)
