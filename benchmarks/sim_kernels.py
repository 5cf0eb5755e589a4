"""Kernels that `sundog bench sim` times."""

import triton
import triton.language as tl

from sundog.device import signal

__all__ = ["barrier_kernel", "matmul_kernel", "softmax_kernel"]


@triton.jit
def matmul_kernel(
    a_ptr, stride_am, stride_ak,
    b_ptr, stride_bk, stride_bn,
    c_ptr, stride_cm, stride_cn,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of C = A @ B, with masks at every edge, as a kernel for ragged sizes has them."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - k) & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(c_ptrs, total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def softmax_kernel(x_ptr, stride_x, out_ptr, stride_out, N, BLOCK: tl.constexpr):
    """Softmax of one row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    valid = columns < N
    x = tl.load(x_ptr + row * stride_x + columns, mask=valid, other=float("-inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    out = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * stride_out + columns, out, mask=valid)


@triton.jit
def barrier_kernel(flags, counter, epoch, ctx, LANES: tl.constexpr):
    """All programs of all ranks meet: those of a rank, one of them with the other ranks, again."""
    signal.barrier_programs(counter, ctx)
    if tl.program_id(0) == 0:
        signal.barrier_ranks(flags, epoch, ctx, LANES)
    signal.barrier_programs(counter, ctx)
