"""Kernels whose IR the dataset tests record: one per construct that MLIR prints differently.

`CASES` maps a name to a kernel, its example arguments and its launch options. The arguments are
meta tensors: a launch specialises on dtype and alignment, and those they have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, x_stride, out_stride, num_rows, num_cols, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < num_cols
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=2):
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=-float("inf"))
        numerator = tl.exp(x - tl.max(x, axis=0))
        y = numerator / tl.sum(numerator, axis=0)
        tl.store(out_ptr + row * out_stride + columns, y, mask=mask)


@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / n
    spread = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + columns, mask=columns < n, other=0.0).to(tl.float32)
        x = tl.where(columns < n, x - mean, 0.0)
        spread += x * x
    rstd = 1 / tl.sqrt(tl.sum(spread, axis=0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < n
        x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + columns, mask=mask)
        y = (x - mean) * rstd * w + tl.load(b_ptr + columns, mask=mask)
        tl.store(y_ptr + row * stride + columns, y, mask=mask)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, m, n, k, stride_am, stride_bk, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)) % m
    columns = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)) % n
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :]
    b_ptrs = b_ptr + inner[:, None] * stride_bk + columns[None, :]
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(0, tl.cdiv(k, BLOCK_K)):
        a = tl.load(a_ptrs, mask=inner[None, :] < k - step * BLOCK_K, other=0.0)
        b = tl.load(b_ptrs, mask=inner[:, None] < k - step * BLOCK_K, other=0.0)
        accumulator = tl.dot(a, b, accumulator)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_bk
    if RELU:
        accumulator = tl.maximum(accumulator, 0.0)
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :]
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c_ptrs, accumulator.to(tl.float16), mask=mask)


@triton.jit
def descriptor_matmul_kernel(a_desc, b_desc, c_ptr, m, n, k, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK
    column = tl.program_id(1) * BLOCK
    c_desc = tl.make_tensor_descriptor(c_ptr, [m, n], [n, 1], [BLOCK, BLOCK])
    accumulator = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, k, BLOCK):
        a = a_desc.load([row, start])
        b = b_desc.load([column, start])
        accumulator = tl.dot(a, b.T, accumulator)
    c_desc.store([row, column], accumulator.to(tl.float16))


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, scale, stride_h, num_keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    start_m = tl.program_id(0)
    base = tl.program_id(1) * stride_h
    rows = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD)
    q = tl.load(q_ptr + base + rows[:, None] * HEAD + dims[None, :], mask=rows[:, None] < num_keys)
    high = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32) + 1.0
    accumulator = tl.zeros([BLOCK_M, HEAD], dtype=tl.float32)
    end = tl.minimum((start_m + 1) * BLOCK_M, num_keys) if CAUSAL else num_keys
    scale *= 1.44269504
    for start in range(0, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        offsets = base + (start + keys)[None, :] * HEAD + dims[:, None]
        k = tl.load(k_ptr + offsets, mask=(start + keys)[None, :] < num_keys, other=0.0)
        scores = tl.dot(q, k) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= (start + keys)[None, :], scores, -1.0e6)
        new_high = tl.maximum(high, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_high[:, None])
        shrink = tl.math.exp2(high - new_high)
        total = total * shrink + tl.sum(p, 1)
        accumulator = accumulator * shrink[:, None]
        offsets = base + (start + keys)[:, None] * HEAD + dims[None, :]
        v = tl.load(v_ptr + offsets, mask=(start + keys)[:, None] < num_keys, other=0.0)
        accumulator = tl.dot(p.to(tl.float16), v, accumulator)
        high = new_high
    out = accumulator / total[:, None]
    if start_m > 0:
        tl.store(lse_ptr + tl.program_id(1) * num_keys + rows, high + tl.math.log2(total))
    else:
        tl.store(lse_ptr + tl.program_id(1) * num_keys + rows, high, mask=rows < num_keys)
    stored = base + rows[:, None] * HEAD + dims[None, :]
    tl.store(out_ptr + stored, out.to(tl.float16), mask=rows[:, None] < num_keys)


@triton.jit
def control_flow_kernel(x_ptr, out_ptr, n, limit, BLOCK: tl.constexpr):
    """scf.while, scf.if with results and without an else, an early return (cf)."""
    pid = tl.program_id(0)
    if pid >= n:
        return
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    steps = 0
    total = tl.sum(x, axis=0)
    while total > limit:
        if steps % 2 == 0:
            total = total * 0.5
            x = x * 0.5
        else:
            total = total - 1.0
        steps += 1
    if steps > 3:
        tl.store(out_ptr + offsets, x)
    else:
        if steps == 2:
            tl.store(out_ptr + offsets, -x)
    tl.store(out_ptr + n * BLOCK + pid, steps.to(tl.float32))


@triton.jit
def _larger(value_a, index_a, value_b, index_b):
    take_b = (value_b > value_a) | ((value_b == value_a) & (index_b < index_a))
    return tl.where(take_b, value_b, value_a), tl.where(take_b, index_b, index_a)


@triton.jit
def _affine(scale_a, shift_a, scale_b, shift_b):
    return scale_a * scale_b, shift_a * scale_b + shift_b


@triton.jit
def reduce_scan_kernel(x_ptr, y_ptr, out_ptr, index_ptr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Two-result reduce and scan with combine functions of our own."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + rows * COLS + columns)
    y = tl.load(y_ptr + rows * COLS + columns)
    indices = tl.broadcast_to(columns, [ROWS, COLS])
    best, where = tl.reduce((x, indices), 1, _larger)
    tl.store(index_ptr + tl.arange(0, ROWS), where)
    _, shift = tl.associative_scan((x, y), 1, _affine, reverse=True)
    tl.store(out_ptr + rows * COLS + columns, shift + best[:, None] + tl.cumsum(y, 0))
    tl.store(index_ptr + ROWS + tl.arange(0, 16), tl.histogram(where, 16))


@triton.jit
def atomics_kernel(x_ptr, flag_ptr, count_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, cache_modifier=".cg", eviction_policy="evict_first")
    old = tl.atomic_add(x_ptr + offsets, x, mask=offsets < numel, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, 1, sem="release", scope="sys")
    while tl.atomic_cas(flag_ptr, 2, 3, sem="acquire", scope="sys") != 2:
        pass
    tl.atomic_max(count_ptr, numel)
    tl.store(x_ptr + offsets, old, cache_modifier=".wt")
    tl.store(count_ptr + 1, tl.load(count_ptr + 2, volatile=True))


@triton.jit(noinline=True)
def _polynomial(x, y):
    return x * x + 3 * y, x - y


@triton.jit
def call_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    a, b = _polynomial(n, n + 1)
    c, _ = _polynomial(b, a)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * (a + c))


@triton.jit
def literals_kernel(x_ptr, out_ptr, big, small, BLOCK: tl.constexpr):
    """Constants whose spelling is hard: hex floats, negatives, 64-bit, bools, dense, strings."""
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < BLOCK - 1, other=float("nan"))
    x = tl.where(offsets == 3, x * 0.1, x + 1e-45)
    x = x.to(tl.float64) * 3.141592653589793 - 1e300
    wide = offsets.to(tl.int64) * -9223372036854775807 + big
    halved = (x.to(tl.bfloat16) * 0.3333).to(tl.float32)
    narrow = halved.to(tl.float8e5, fp_downcast_rounding="rtne").to(tl.float32)
    asm: tl.constexpr = 'add.s64 $0, $1, $1; // "quoted" \\ tab\t'
    doubled = tl.inline_asm_elementwise(asm, "=l,l", [wide], tl.int64, is_pure=True, pack=1)
    tl.device_print('x is "so" \\ \n and 100%: ', wide, hex=True)
    tl.device_assert(small > 0, 'small must be > 0, "quoted"')
    tl.assume(small > 0)
    tl.store(out_ptr + offsets, doubled.to(tl.float32) + narrow + tl.rand(7, offsets) + small)


@triton.jit
def shapes_kernel(x_ptr, out_ptr, N: tl.constexpr):
    """Reshapes, joins, transposes, gathers: the ops with order, dims and layout attributes."""
    x = tl.load(x_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    y = tl.permute(tl.reshape(x, (N // 2, 2, N)), (2, 0, 1))
    even, odd = tl.split(y)
    z = tl.interleave(even, odd)
    index = tl.broadcast_to(tl.arange(0, N)[:, None] % 4, (N, N))
    z = tl.gather(z, index, axis=0) + tl.sort(x, descending=True)
    z = tl.dot(z.to(tl.float16), tl.trans(x).to(tl.float16), out_dtype=tl.float16).to(tl.float32)
    tl.store(out_ptr + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :], z)


class Case(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


_TENSOR = _tensor(4096)
_HALF = _tensor(4096, dtype=torch.float16)
_TILE = TensorDescriptor(_HALF, [64, 64], [64, 1], [64, 64])
_INTS = _tensor(64, dtype=torch.int32)

CASES: dict[str, Case] = {
    "add": Case(add_kernel, (_TENSOR, _TENSOR, _TENSOR, 4000), {"BLOCK": 1024}),
    "softmax": Case(softmax_kernel, (_TENSOR, _TENSOR, 64, 64, 64, 50), {"BLOCK": 64}),
    "layer_norm": Case(
        layer_norm_kernel,
        (_HALF, _TENSOR, _TENSOR, _HALF, _TENSOR, 512, 512, 1e-5),
        {"BLOCK": 256, "num_warps": 8},
    ),
    "matmul": Case(
        matmul_kernel,
        (_HALF, _HALF, _HALF, 256, 256, 128, 128, 256, 256),
        {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "RELU": True, "num_stages": 3},
    ),
    "descriptor_matmul": Case(
        descriptor_matmul_kernel,
        (_TILE, _TILE, _HALF, 128, 128, 128),
        {"BLOCK": 64, "num_stages": 2},
    ),
    "attention": Case(
        attention_kernel,
        (_HALF, _HALF, _HALF, _HALF, _TENSOR, 0.125, 4096, 4000),
        {"BLOCK_M": 64, "BLOCK_N": 64, "HEAD": 64, "CAUSAL": True, "num_stages": 2},
    ),
    "control_flow": Case(control_flow_kernel, (_TENSOR, _TENSOR, 7, 1.5), {"BLOCK": 128}),
    "reduce_scan": Case(
        reduce_scan_kernel, (_TENSOR, _TENSOR, _TENSOR, _INTS), {"ROWS": 16, "COLS": 32}
    ),
    "atomics": Case(atomics_kernel, (_TENSOR, _INTS, _INTS, 100), {"BLOCK": 128}),
    "call": Case(call_kernel, (_TENSOR, _TENSOR, 5), {"BLOCK": 128}),
    "literals": Case(
        literals_kernel, (_TENSOR, _TENSOR, 1 << 40, 3), {"BLOCK": 128, "debug": True}
    ),
    "shapes": Case(shapes_kernel, (_TENSOR, _TENSOR), {"N": 32}),
}
