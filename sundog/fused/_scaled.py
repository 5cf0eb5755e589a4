"""FP8 products with scales: what the ops scaled_* share.

    out = activation(sum over k of a * scale(a) * b * scale(b) + bias), accumulated in float32

    scaling      scale of a                 scale of b
    "tensor"     one number                 one number
    "row"        [m]                        [n]
    "block"      [m, k / 128]               [k / 128, n / 128]

The first two kinds are multiplied in the epilogue. Block scales are applied to the sum over each
128 columns of A. wgmma wants b as a transposed view (`weight.T`), as torch._scaled_mm does.
NVIDIA's tensor cores add FP8 products with fewer digits than float32: all of them with
`fast_accum`, else 128 at a time, like torch's use_fast_accum. For an FP8 output in some scale, fold
that scale into a's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..device import tiles
from ..ops.dispatch import CallOptions, call
from ..ops.op import Plan
from . import _aligned, _gemm, _matmul_reduce, _unfused
from ._call import check_apart, check_tensors
from ._fitting import fitting

if TYPE_CHECKING:
    from ..world.world import World

FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32, *FP8)
SCALINGS = ("tensor", "row", "block")
BLOCK = tl.constexpr(128)


@dataclass(frozen=True)
class Config(_gemm.Grid):
    """Tiles as for any product, and how tensor cores accumulate."""

    fast_accum: bool = True


def unfit(problem: Any) -> str | None:
    """Return why no config takes a problem, or None."""
    if problem.dtype not in FP8:
        return f"{problem.dtype}: expected float8_e4m3fn or float8_e4m3fnuz"
    if problem.scaling not in SCALINGS:
        return f"scaling {problem.scaling!r}: expected one of {', '.join(SCALINGS)}"
    if (problem.out_dtype or torch.bfloat16) not in OUTPUTS:
        return f"output {problem.out_dtype}: expected bfloat16, float16, float32 or FP8"
    if problem.activation not in _gemm.ACTIVATIONS:
        return f"activation {problem.activation!r}: expected None or 'silu'"
    return None


def valid(problem: Any, config: Config) -> str | None:
    if problem.scaling == "block" and config.tile_k != BLOCK.value:
        return f"tile_k {config.tile_k}: with scales per block it is {BLOCK.value}"
    if config.tile_k < 32:
        return f"tile_k {config.tile_k}: an FP8 product has at least 32 columns of A"
    return unfit(problem) or _gemm.valid_grid(config, problem.dtype)


def space(problem: Any) -> list[Config]:
    made = [
        Config(**{**tile, "tile_k": 128}, group_m=group_m)
        for tile in _gemm.tried(
            (64, 64, 4, 4), (64, 128, 4, 4), (128, 128, 4, 4), (128, 128, 8, 3), (128, 256, 8, 3),
            (128, 256, 8, 4),
        )
        for group_m in (1, 8)
    ]  # fmt: skip
    return [config for config in made if valid(problem, config) is None]


def default(problem: Any, num_sms: int) -> Config:
    """Choose tiles as for FP8 without scales; with scales per block, those of 128 columns of A."""
    base = fitting(problem.m, problem.m, problem.n, problem.k, problem.dtype, num_sms)
    if problem.scaling == "block":  # a second accumulator, which would spill with 256 columns
        base |= dict(tile_n=min(base["tile_n"], BLOCK.value), tile_k=BLOCK.value)
    most = triton.cdiv(problem.m, base["tile_m"]) * triton.cdiv(problem.n, base["tile_n"])
    return Config(**base, programs=max(1, min(num_sms, most)))


def scale_shapes(scaling: str, m: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the scales of A [m, k] and B [k, n]."""
    if scaling == "tensor":
        return (1,), (1,)
    if scaling == "row":
        return (m,), (n,)
    blocks = triton.cdiv(k, BLOCK.value)
    return (m, blocks), (blocks, triton.cdiv(n, BLOCK.value))


# the call


def check(
    world: World, op: str, a: torch.Tensor, b: torch.Tensor, scales: Any,
    bias: torch.Tensor | None, k: int, out: torch.Tensor | None, rows: int,
    out_dtype: torch.dtype | None,
) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Raise ValueError if these can't be multiplied. Return scaling, both scales and the output."""
    given = scales if isinstance(scales, tuple | list) else ()
    if len(given) != 2 or not all(isinstance(each, torch.Tensor) for each in given):
        raise ValueError(f"{op}: {a.dtype} takes two scales, of a and of b, and they are tensors")
    check_tensors(world, op, a=a, b=b, a_scale=given[0], b_scale=given[1], bias=bias, out=out)
    if a.dim() != 2 or b.dim() != 2 or b.shape[0] != k or b.dtype != a.dtype:
        raise ValueError(
            f"{op}: a is {tuple(a.shape)} of {a.dtype} and b {tuple(b.shape)} of {b.dtype}; "
            f"expected two dimensions, {k} rows of b, and the same FP8 type"
        )
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or not bias.is_contiguous()):
        raise ValueError(f"{op}: bias has shape {tuple(bias.shape)}, expected ({b.shape[1]},)")
    dtype, shape = out_dtype or torch.bfloat16, (rows, b.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    if out.shape != shape or out.dtype != dtype or dtype not in OUTPUTS:
        raise ValueError(
            f"{op}: out is {tuple(out.shape)} of {out.dtype}, expected {shape} of {dtype}, which "
            "is bfloat16, float16, float32 or FP8"
        )
    for name, tensor in (("a", a), ("b", b)):
        check_apart(op, name, tensor, out)
    scaling, shapes = _scaling_of(op, a, b, *given)
    of_a, of_b = (each.reshape(s).contiguous() for each, s in zip(given, shapes, strict=True))
    return scaling, of_a, of_b, out


def _scaling_of(
    op: str, a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor
) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """Return the scaling whose scales have these shapes, and its shapes."""
    m, k = a.shape
    of_b = b.shape[0]  # where A is sharded, B has more rows than A has columns
    for scaling in SCALINGS:
        wanted = (
            scale_shapes(scaling, m, b.shape[1], k)[0],
            scale_shapes(scaling, m, b.shape[1], of_b)[1],
        )
        found = [_plain(scales[at], wanted[at], bool(at)) for at in (0, 1)]
        if found == list(wanted) and all(each.dtype == torch.float32 for each in scales):
            return scaling, wanted
    text = " and ".join(f"{tuple(each.shape)} of {each.dtype}" for each in scales)
    raise ValueError(
        f"{op}: scales are {text}; expected float32, of a {tuple(a.shape)} and "
        f"b {tuple(b.shape)} one number each, ({m},) and ({b.shape[1]},), or "
        f"{scale_shapes('block', m, b.shape[1], k)[0]} and "
        f"{scale_shapes('block', m, b.shape[1], of_b)[1]}"
    )


def _plain(scale: torch.Tensor, wanted: tuple[int, ...], is_of_b: bool) -> tuple[int, ...]:
    """Return a scale's shape, or `wanted` if only a 1 is added where torch._scaled_mm wants it.

    That is (m, 1) and (1, n). (n, 1) is also the shape of blocks that are one column wide.
    """
    shape = tuple(scale.shape)
    beside = (1, *wanted) if is_of_b else (*wanted, 1)
    is_one = wanted == (1,) and scale.numel() == 1
    return wanted if is_one or shape == beside else shape


# inputs, and what torch computes from them


def inputs(world: World, problem: Any, seed: int, exact: bool = True) -> tuple[torch.Tensor, ...]:
    """Make a rank's part of A on the heap, its B, transposed, and the scales of both.

    `exact` takes powers of two.
    """
    torch.manual_seed(seed * 1000 + world.rank)
    (m, k), (whole, n) = problem.shard_shape, (problem.k, problem.n)
    made = [torch.empty(size, device=world.device) for size in ((m, k), (n, whole))]
    made = [each.random_(-2, 3) if exact else each.normal_() for each in made]
    a = world.empty((m, k), problem.dtype, "a").copy_(made[0])
    b = made[1].to(problem.dtype).T
    of_a = scale_shapes(problem.scaling, m, n, k)[0]
    of_b = scale_shapes(problem.scaling, m, n, whole)[1]
    # Where A is sharded along K, the scales are those of all of A: the same on every rank.
    if problem.scaling != "block":
        torch.manual_seed(seed)
    scales = [
        torch.exp2(torch.randint(-1, 2, s, device=world.device).float()) for s in (of_a, of_b)
    ]
    return a, b, *scales


def product(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, scaling: str
) -> torch.Tensor:
    """Multiply A @ B with their scales, in float64."""
    if scaling == "block":
        a_scale = a_scale.repeat_interleave(BLOCK.value, 1)[:, : a.shape[1]]
        b_scale = b_scale.repeat_interleave(BLOCK.value, 0)[: b.shape[0]]
        b_scale = b_scale.repeat_interleave(BLOCK.value, 1)[:, : b.shape[1]]
    else:
        a_scale, b_scale = a_scale.view(-1, 1), b_scale.view(1, -1)
    return (a.double() * a_scale.double()) @ (b.double() * b_scale.double())


def saturated(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to `dtype`. What exceeds FP8 becomes its largest number."""
    if dtype in FP8:
        most = torch.finfo(dtype).max
        value = value.clamp(-most, most)
    return value.to(dtype)


# what the two ops that add over the ranks share


@dataclass(frozen=True)
class Problem(_matmul_reduce.Problem):
    scaling: str = "row"  # what a scale is for: a tensor, a row or a block

    @property
    def shard_shape(self) -> tuple[int, int]:
        return self.m, self.k


def valid_sum(problem: Problem, config: Config) -> str | None:
    """Return why not, or None: bias and activation belong after the sum, which is rounded here."""
    if problem.has_bias or problem.activation:
        return f"bias or activation {problem.activation!r} after a sum that is rounded to bfloat16"
    return valid(problem, config)


def sum_of(problem: Problem, rank: int, *given: list[torch.Tensor]) -> torch.Tensor:
    """Return all of the result, from all ranks' inputs, with partials rounded as they travel."""
    out_dtype = problem.out_dtype or torch.bfloat16
    if given[0][rank].is_meta:  # only its shape is asked for
        return given[0][rank].new_empty((problem.m, problem.n), dtype=out_dtype)
    parts = [
        product(a, b, a_scale, b_scale, problem.scaling).bfloat16().double()
        for a, b, a_scale, b_scale in zip(*given, strict=True)
    ]
    return saturated(torch.stack(parts).sum(0).bfloat16(), out_dtype)


def plan_sum(world: World, collective: str, problem: Problem, config: Config, rows: int) -> Plan:
    """Plan a product and a collective that adds it up; a rank gets `rows` rows."""
    rooms = _aligned.Rooms(world, config, config.programs)

    def multiply(a: tuple, b: tuple, partial: torch.Tensor, *_: None) -> None:
        x, y = rooms.wide(a[0], b[0])
        matmul(x, y, (a[1], b[1]), partial, None, problem, config)

    plain = replace(problem, dtype=torch.bfloat16, out_dtype=None)
    then = _unfused.product_then(world, collective, plain, config, multiply)
    is_same = (problem.out_dtype or torch.bfloat16) == torch.bfloat16
    shape = (rows, problem.n)
    spare = None if is_same else world.empty(shape, torch.bfloat16, f"scaled_{collective}.sum")

    def launch(
        a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        total = out if spare is None else spare
        then.launch((a, a_scale), (b, b_scale), total)
        if spare is not None:
            if out.dtype in FP8:  # a wider type has infinities, or holds every sum
                most = torch.finfo(out.dtype).max
                spare.clamp_(-most, most)
            out.detach().copy_(spare)
        return out

    workspaces = then.workspaces if spare is None else (*then.workspaces, spare)
    return Plan(world, problem, config, workspaces, launch)


def call_sum(
    world: World, op: str, given: tuple[torch.Tensor, ...], rows: int,
    out_dtype: torch.dtype | None, out: torch.Tensor | None, options: CallOptions,
) -> torch.Tensor:  # fmt: skip
    """Check the tensors and run the op."""
    a, b, *pair = given
    k = a.shape[-1]
    scaling, *scales, out = check(world, op, a, b, pair, None, k, out, rows, out_dtype)
    problem = Problem(
        a.shape[0], b.shape[1], k, a.dtype, world.size, out_dtype=out.dtype, scaling=scaling
    )
    tensors = {"a": a, "b": b, "a_scale": scales[0], "b_scale": scales[1], "out": out}
    result: torch.Tensor = call(world, op, problem, tensors, options, is_flat=False)
    return result


# the kernel


@triton.jit
def _plain_product(acc, a, b, row, col, K, shape, AT_ONCE: tl.constexpr):
    for block in tl.range(0, tl.cdiv(K, shape.tile_k)):
        x = _gemm.block_of(a, row, block * shape.tile_k, shape.a_kind, shape.tile_m, shape.tile_k)
        y = _gemm.block_of(b, block * shape.tile_k, col, shape.b_kind, shape.tile_k, shape.tile_n)
        acc = tl.dot(x, y, acc, max_num_imprecise_acc=AT_ONCE)
    return acc


@triton.jit
def _block_product(acc, a, b, of_a, of_b, row, col, K, shape):
    """Multiply block by block of 128 along K, scaled by row of A and by 128 columns of B."""
    rows = row + tl.arange(0, shape.tile_m)
    cols = (col + tl.arange(0, shape.tile_n)) // BLOCK
    for block in tl.range(0, tl.cdiv(K, shape.tile_k)):
        x = _gemm.block_of(a, row, block * shape.tile_k, shape.a_kind, shape.tile_m, shape.tile_k)
        y = _gemm.block_of(b, block * shape.tile_k, col, shape.b_kind, shape.tile_k, shape.tile_n)
        down = tl.load(of_a.ptr + rows * of_a.row_stride + block, mask=rows < of_a.rows, other=0.0)
        across = tl.load(
            of_b.ptr + block * of_b.row_stride + cols, mask=cols < of_b.cols, other=0.0
        )
        acc += tl.dot(x, y) * down[:, None] * across[None, :]
    return acc


@triton.jit
def _scaled_kernel(
    a, b, of_a, of_b, out, to, bias, K, shape, SCALING: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Multiply, with `of_a` and `of_b` as views of the scales, where a stride of 0 means one number
    for all. Tensor cores add AT_ONCE products with fewer digits; None: all of them."""
    rows, cols = tl.cdiv(out.rows, shape.tile_m), tl.cdiv(out.cols, shape.tile_n)
    for tile in tl.range(tl.program_id(0), rows * cols, tl.num_programs(0), flatten=shape.flat):
        i, j = _gemm.swizzle(tile, rows, cols, shape.group_m)
        row, col = i * shape.tile_m, j * shape.tile_n
        acc = tl.zeros((shape.tile_m, shape.tile_n), tl.float32)
        if SCALING == "block":
            acc = _block_product(acc, a, b, of_a, of_b, row, col, K, shape)
        else:
            acc = _plain_product(acc, a, b, row, col, K, shape, AT_ONCE)
            down, across = row + tl.arange(0, shape.tile_m), col + tl.arange(0, shape.tile_n)
            left = tl.load(of_a.ptr + down * of_a.row_stride, mask=down < out.rows, other=0.0)
            right = tl.load(of_b.ptr + across * of_b.row_stride, mask=across < out.cols, other=0.0)
            acc = acc * left[:, None] * right[None, :]
        value = _gemm.finish(bias, acc, col, out.cols, shape)
        if out.ptr.dtype.element_ty.primitive_bitwidth == 8:
            LIMIT: tl.constexpr = 448.0 if out.ptr.dtype.element_ty == tl.float8e4nv else 240.0
            value = tl.clamp(value, -LIMIT, LIMIT)
        if to is None and shape.a_kind == "view":
            tiles.store_product(out, row, col, value)
        elif to is None:
            tiles.store(out, row, col, value)
        else:
            to.store([row, col], value.to(out.ptr.dtype.element_ty))


def matmul(
    a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor, bias: torch.Tensor | None, problem: Any, config: Config,
) -> torch.Tensor:  # fmt: skip
    """Launch a product into `out`. The caller has checked the tensors."""
    x, a_kind = _gemm.operand(a, (config.tile_m, config.tile_k), config.descriptors)
    y, b_kind = _gemm.operand(b, (config.tile_k, config.tile_n), config.descriptors)
    to = _gemm.target(out, config, 1)
    flat = problem.scaling != "block"  # scales are loaded by pointers, which flattening forbids
    flat = flat and (to is not None or _gemm.room_beside(config, 1, out.itemsize))
    shape = _gemm.shape_of(config, a_kind, b_kind, problem.activation, flat)
    grid = triton.cdiv(out.shape[0], config.tile_m) * triton.cdiv(out.shape[1], config.tile_n)
    at_once = None if config.fast_accum else min(BLOCK.value, config.tile_k)
    _scaled_kernel[(min(grid, config.programs),)](
        x, y, *(_view(each) for each in scales), tiles.view(out), to, bias, a.shape[1], shape,
        SCALING=problem.scaling, AT_ONCE=at_once,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _view(scale: torch.Tensor) -> tiles.View:
    """View a matrix as it is, a row as a column, one number as a column with a stride of 0."""
    if scale.dim() == 2 and scale.shape[1] > 1:
        return tiles.view(scale)
    return tiles.View(scale, scale.numel(), 1, int(scale.numel() > 1), 1)
