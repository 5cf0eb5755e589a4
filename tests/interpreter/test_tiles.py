"""Functions of whole tiles: reductions, scans, shapes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from .launching import Run, launch, same

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


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
def _larger(a, b, c, d):
    first = (a > c) | ((a == c) & (b > d))
    return tl.where(first, a, c), tl.where(first, b, d)


@triton.jit
def scan_kernel(a_ptr, b_ptr, a_out, b_out, sums, both, N: tl.constexpr, REVERSE: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    c, d = tl.associative_scan((a, b), 0, _affine, reverse=REVERSE)
    tl.store(a_out + at, c)
    tl.store(b_out + at, d)
    tl.store(sums + at, tl.cumsum(b, 0, reverse=REVERSE))
    e, f = tl.reduce((a, b), 0, _larger)
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
    assert got[3].tolist() == [*max(zip(a.tolist(), b.tolist(), strict=True)), b.sum()]


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
    parts[1] = parts[1].sort().values  # tl.cat may reorder
    wanted[1] = wanted[1].sort().values
    for part, want in zip(parts, wanted, strict=True):
        assert same(part, want.ravel())


@triton.jit
def views_kernel(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    """Values and pointers that are views of others: transposed, and spread over an axis."""
    row, column = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    x = tl.load((x_ptr + column * M + row).trans())
    tl.store(out_ptr + row * N + column, x.trans(), mask=column < N - 1)
    tl.store(out_ptr + M * N + row * N + column, tl.broadcast_to(row, (M, N)).to(x.dtype))
    tl.atomic_add(out_ptr + tl.broadcast_to(row * N + N - 1, (M, N)), tl.full((M, N), 1, x.dtype))


def test_views(run: Run) -> None:
    x = torch.randn(8, 4)
    got = launch(run, views_kernel, (1,), x, torch.zeros(2, 4, 8), M=4, N=8)[1]
    wanted = x.T.clone()
    wanted[:, -1] = 8
    assert torch.equal(got, torch.stack([wanted, torch.arange(4.0)[:, None].expand(4, 8)]))


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


@triton.jit
def grown_kernel(out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    one, two = tl.arange(0, A), tl.arange(0, B)
    both = one[:, None] * 100 + two[None, :]  # each has an axis that the other lacks
    three = both[:, :, None] * 10 + tl.arange(0, C)[None, None, :]
    at = (one[:, None, None] * B + two[None, :, None]) * C + tl.arange(0, C)[None, None, :]
    tl.store(out_ptr + at, three + tl.zeros((1, B, 1), tl.int32))


@pytest.mark.parametrize("sizes", [(4, 2, 8), (1, 4, 2), (2, 1, 1), (1, 1, 1)])
def test_axes_of_one_element_are_stretched(run: Run, sizes: tuple[int, int, int]) -> None:
    result = launch(run, grown_kernel, (1,), torch.zeros(sizes, dtype=torch.int32), *sizes)[0]
    one, two, three = (torch.arange(n, dtype=torch.int32) for n in sizes)
    assert same(result, (one[:, None, None] * 100 + two[:, None]) * 10 + three)


@triton.jit
def unequal_kernel(out_ptr):
    tl.store(out_ptr + tl.arange(0, 4)[:, None] + tl.arange(0, 2)[:, None], 0)


def test_tiles_of_other_sizes_are_not_stretched(run: Run) -> None:
    with pytest.raises(Exception, match="incompatible dimensions at index 0: 4 and 2"):
        launch(run, unequal_kernel, (1,), torch.zeros(8))
