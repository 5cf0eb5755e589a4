"""All-reduce with one byte per element on the wire: int8 or FP8, a scale for each 128 elements.

Rank r gets slice r of all ranks, quantised. It adds them in float32 in rank order, quantises the
sum and stores it to all ranks. A barrier of the programs with the same number follows each of the
two steps. An element is rounded twice, and its bits are the same on all ranks, at every grid and
config. Half the bytes of bfloat16 cross the links. collectives/_quantized.py states the error, and
docs/quantized.md says when to use the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal, trace
from ..ops.dispatch import CallOptions, call, check_contiguous, check_out, packed
from ..ops.op import Cost, Plan, World, agree, barrier_flags
from . import _quantized, _reduce
from ._quantized import GROUP, Config, space

OP = "quantized_all_reduce"
SYMMETRIC = ()


@dataclass(frozen=True)
class Problem:
    numel: int  # of each rank's tensor
    dtype: torch.dtype
    size: int  # ranks
    op: str = "sum"
    wire: torch.dtype = torch.float8_e4m3fn

    @property
    def groups(self) -> int:
        """Return the number of groups in a slice."""
        return int(triton.cdiv(_quantized.groups_of(self.numel), self.size))


def valid(problem: Problem, config: Config) -> str | None:
    if problem.op not in ("sum", "avg"):
        return f"op {problem.op!r}: expected sum or avg"
    return _quantized.refused(problem, config)


def default(problem: Problem, num_sms: int) -> Config:
    return _quantized.default(problem.groups * GROUP.value, num_sms)


def cost(problem: Problem) -> Cost:
    """Count: all slices and all sums that arrive are written and read again."""
    nbytes = problem.numel * problem.dtype.itemsize
    slices = problem.size * problem.groups * (GROUP.value + 4)
    far = 2 * slices * (problem.size - 1) // problem.size
    return Cost(3 * problem.numel, nbytes + 2 * slices, nbytes + 2 * slices, far)


def cases(size: int) -> list[Problem]:
    """Return small problems: a slice without elements, a part of a group, both kinds of bytes."""
    return [
        Problem(37, torch.float32, size, "sum", torch.int8),
        Problem(128 * size * 3 - 60, torch.bfloat16, size, "avg", torch.float8_e4m3fn),
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (_quantized.random_input(world, problem.numel, problem.dtype, seed),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the answer on every rank."""
    if parts[rank].is_meta:  # only its shape is wanted
        return parts[rank].new_empty(problem.numel)
    total = _quantized.summed(parts, problem.wire)
    total = total / problem.size if problem.op == "avg" else total
    return _quantized.expected(total, problem.wire).to(problem.dtype)


class _Boxes(NamedTuple):
    """What arrives here: bytes and scales of each rank's slice for me, and of each rank's sum."""

    parts: torch.Tensor
    part_scales: torch.Tensor
    sums: torch.Tensor
    sum_scales: torch.Tensor


class _BoxFlags(NamedTuple):
    ready: torch.Tensor  # by program and rank: its slice for me is here
    done: torch.Tensor  # by program and rank: its sum is here
    epochs: torch.Tensor  # by program: how often it has run


@triton.jit
def _send(x, boxes, program, numel, groups, ctx, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Quantise my tensor, and store slice r to rank r."""
    programs = tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    for step in range(SIZE):
        peer = (rank + step) % SIZE  # each rank begins with a different one
        place = memory.translate(boxes.parts + rank.to(tl.int64) * groups * GROUP, peer, ctx)
        table = memory.translate(boxes.part_scales + rank * groups, peer, ctx)
        first = peer * groups  # 64 bits, since a rank has
        for row in range(program * ROWS, groups, programs * ROWS):
            at = _quantized.elements(first + row, ROWS)
            values = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
            _quantized.spread((place,), (table,), values, row, groups, 1)


@triton.jit
def _add(boxes, program, groups, ctx, OP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Add what has arrived for my slice in rank order, and store the quantised sum to all ranks."""
    programs = tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    places = _reduce.everywhere(boxes.sums + rank.to(tl.int64) * groups * GROUP, rank, ctx, SIZE)
    tables = _reduce.everywhere(boxes.sum_scales + rank * groups, rank, ctx, SIZE)
    for row in range(program * ROWS, groups, programs * ROWS):
        bits, scale = _quantized.dequantised(boxes.parts, boxes.part_scales, row, groups, ROWS)
        total = bits * scale
        for peer in tl.static_range(1, SIZE):
            first = tl.cast(groups, tl.int64) * peer
            bits, scale = _quantized.dequantised(
                boxes.parts + first * GROUP, boxes.part_scales + first, row, groups, ROWS
            )
            # An explicit fma, since the compiler may otherwise round once or twice.
            total = tl.fma(bits, tl.broadcast_to(scale, bits.shape), total)
        total = _reduce.finish(total, OP, SIZE)
        _quantized.spread(places, tables, total, row, groups, SIZE)


@triton.jit
def _reduce_kernel(
    x, out, boxes, flags, ctx, numel, groups,
    OP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Reduce a slice of `groups` groups, by tiles of ROWS groups."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(flags.epochs + program) + 1
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My boxes are free: the peers' programs with this number have passed the second barrier of the
    # previous call, which mine reached after it had read the slices.
    _send(x, boxes, program, numel, groups, ctx, SIZE, ROWS)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My bytes before the flags, the peers' before my loads. My loads of the previous call's sums,
    # which the peers overwrite after this, also come before the flags.
    signal.barrier_ranks(flags.ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.COMPUTE, program, 0, trace.ALL, ctx, TRACE)
    _add(boxes, program, groups, ctx, OP, SIZE, ROWS)
    trace.end(trace.COMPUTE, program, 0, trace.ALL, ctx, TRACE)
    # My sums before the flags, the peers' before my loads. My loads of the slices, which the peers
    # overwrite in the next call, also come before the flags.
    signal.barrier_ranks(flags.done + program * SIZE, epoch, ctx, SIZE, TRACE)
    for peer in range(SIZE):
        first = tl.cast(groups, tl.int64) * peer
        for row in range(program * ROWS, groups, programs * ROWS):
            bits, scale = _quantized.dequantised(
                boxes.sums + first * GROUP, boxes.sum_scales + first, row, groups, ROWS
            )
            at = _quantized.elements(first + row, ROWS)
            is_mine = (row + tl.arange(0, ROWS) < groups)[:, None]  # not the next slice's
            value = (bits * scale).to(out.dtype.element_ty)
            tl.store(out + at, value, mask=(at < numel) & is_mine)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate boxes and flags. The plan takes any contiguous tensors; out may be x."""
    agree(world, OP, problem, config, valid(problem, config))
    shape = (problem.size, max(problem.groups, 1))
    boxes = []
    for name in ("parts", "sums"):
        boxes.append(world.empty((*shape, GROUP.value), problem.wire, f"{OP}.{name}"))
        boxes.append(world.empty(shape, torch.float32, f"{OP}.{name}_scales"))
    made = _Boxes(*boxes)
    flags = _BoxFlags(*barrier_flags(world, OP, config.programs, "ready", "done"))

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if problem.numel:
            _reduce_kernel[(config.programs,)](
                x, out, made, flags, world.ctx, problem.numel, problem.groups,
                OP=problem.op, SIZE=problem.size, ROWS=config.groups, TRACE=world.kernel_mode,
                num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, (*boxes, *flags), launch)


def quantized_all_reduce(
    world: World, x: torch.Tensor, op: str = "sum", out: torch.Tensor | None = None, *,
    wire: str | torch.dtype = "fp8", algo: str = "auto", config: Any = None,
    async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Reduce like all_reduce (sum or avg), with a byte per element on the wire.

    `wire` is "fp8" or "int8". Each 128 elements share a scale. Each rank rounds once, and the sum
    is rounded once; these errors add up. With int8 each is at most 1/254 of the largest of the
    group, with FP8 at most 1/16 of the element. `out` may be x.
    """
    x = packed(world, OP, x, explain)
    out = torch.empty_like(x) if out is None else out
    check_contiguous(OP, out=out)
    if out.data_ptr() != x.data_ptr() or (out.dtype, out.numel()) != (x.dtype, x.numel()):
        check_out(OP, x, out, x.numel())
    problem = Problem(x.numel(), x.dtype, world.size, op, _quantized.wire_of(OP, wire))
    options = CallOptions(algo, config, async_op, explain)
    return call(world, OP, problem, {"x": x, "out": out}, options)
