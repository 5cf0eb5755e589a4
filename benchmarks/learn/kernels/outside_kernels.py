"""Kernels that the dataset does not have, to tune with a model that has never seen them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hard_swish_product_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, inside, other=0.0).to(tl.float32)
    gate = tl.minimum(tl.maximum(value + 3.0, 0.0), 6.0) / 6.0
    other = tl.load(y + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * gate * other).to(out.dtype.element_ty), inside)


@triton.jit
def min_max_rows_kernel(x, out, n, BLOCK: tl.constexpr):
    """Scale each row to the range from 0 to 1."""
    at, lane = tl.program_id(0).to(tl.int64) * n, tl.arange(0, BLOCK)
    low = tl.full([BLOCK], float("inf"), tl.float32)
    high = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.where(inside, value, float("inf")))
        high = tl.maximum(high, tl.where(inside, value, float("-inf")))
    least, most = tl.min(low, axis=0), tl.max(high, axis=0)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        scaled = (value - least) / (most - least + 1e-6)
        tl.store(out + at + start + lane, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def outer_gate_kernel(x, row, column, out, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    down = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    along = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (down < m)[:, None] & (along < n)[None, :]
    at = down[:, None].to(tl.int64) * n + along[None, :]
    gate = tl.load(row + down, down < m)[:, None] + tl.load(column + along, along < n)[None, :]
    value = tl.load(x + at, inside, other=0.0).to(tl.float32) * tl.sigmoid(gate.to(tl.float32))
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def matmul_bias_relu_kernel(
    a, b, bias, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    down = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    along = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        deep = start + tl.arange(0, BLOCK_K)
        left = (down < m)[:, None] & (deep < k)[None, :]
        right = (deep < k)[:, None] & (along < n)[None, :]
        first = tl.load(a + down[:, None] * k + deep[None, :], left, other=0.0)
        second = tl.load(b + deep[:, None] * n + along[None, :], right, other=0.0)
        total = tl.dot(first, second, total)
    total += tl.load(bias + along, along < n, other=0.0)[None, :].to(tl.float32)
    inside = (down < m)[:, None] & (along < n)[None, :]
    result = tl.maximum(total, 0.0).to(out.dtype.element_ty)
    tl.store(out + down[:, None] * n + along[None, :], result, inside)
