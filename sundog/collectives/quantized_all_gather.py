"""All-gather with one byte per element on the wire: int8 or FP8, a scale for each 128 elements.

Every rank quantises its tensor and stores bytes and scales to all ranks. After one barrier of the
programs with the same number, each rank restores what has arrived, its own part too, so the bits
are the same everywhere. Half the bytes of bfloat16 cross the links. The result is not exact:
collectives/_quantized.py states the error, and docs/quantized.md says when to use the op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import context, signal, trace
from ..ops.dispatch import CallOptions, call, check_out, packed
from ..ops.op import Cost, Plan, World, agree, barrier_flags
from . import _quantized, _reduce
from ._quantized import GROUP, Config, space

OP = "quantized_all_gather"
SYMMETRIC = ()


@dataclass(frozen=True)
class Problem:
    numel: int  # of each rank's input
    dtype: torch.dtype
    size: int  # ranks
    wire: torch.dtype = torch.float8_e4m3fn

    @property
    def groups(self) -> int:
        return _quantized.groups_of(self.numel)

    @property
    def wire_bytes(self) -> int:
        return self.groups * (GROUP.value + 4)


def valid(problem: Problem, config: Config) -> str | None:
    return _quantized.refused(problem, config)


def default(problem: Problem, num_sms: int) -> Config:
    return _quantized.default(problem.numel, num_sms)


def cost(problem: Problem) -> Cost:
    """Count: everything that arrives is written, and read again to be restored."""
    nbytes, sent = problem.numel * problem.dtype.itemsize, problem.wire_bytes
    size = problem.size
    return Cost(
        problem.numel * size, nbytes + size * sent, size * (nbytes + sent), (size - 1) * sent
    )


def cases(size: int) -> list[Problem]:
    """Return small problems: less than a group, a part of a group, both kinds of bytes."""
    return [
        Problem(37, torch.float32, size, torch.int8),
        Problem(2200, torch.bfloat16, size, torch.float8_e4m3fn),
        Problem(1024, torch.float16, size, torch.int8),
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (_quantized.random_input(world, problem.numel, problem.dtype, seed),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the answer on every rank: all ranks' inputs, as a byte per element keeps them."""
    if parts[rank].is_meta:  # only its shape is wanted
        return parts[rank].new_empty(problem.size * problem.numel)
    return torch.cat([_quantized.expected(x, problem.wire) for x in parts]).to(problem.dtype)


@triton.jit
def _gather_kernel(
    x, out, wire, scales, flags, epochs, ctx, numel, groups,
    SIZE: tl.constexpr, ROWS: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Store bytes and scales to all ranks, then restore what arrived, by tiles of ROWS groups."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    half = (epoch % 2) * SIZE * groups  # late peers still read the other half
    places = _reduce.everywhere(wire + (half + rank * groups) * GROUP, rank, ctx, SIZE)
    tables = _reduce.everywhere(scales + half + rank * groups, rank, ctx, SIZE)
    trace.begin(trace.FETCH, program, 0, rank, ctx, TRACE)
    for row in range(program * ROWS, groups, programs * ROWS):
        at = _quantized.elements(row, ROWS)
        values = tl.load(x + at, mask=at < numel, other=0.0).to(tl.float32)
        _quantized.spread(places, tables, values, row, groups, SIZE)
    trace.end(trace.FETCH, program, 0, rank, ctx, TRACE)
    # My bytes before the flags, the peers' before my loads. My loads of the previous call also come
    # before the flags, so that the next call may store to the half that they read.
    signal.barrier_ranks(flags + program * SIZE, epoch, ctx, SIZE, TRACE)
    for step in range(SIZE):
        peer = (rank + step) % SIZE
        first = half + peer * groups
        for row in range(program * ROWS, groups, programs * ROWS):
            bits, scale = _quantized.dequantised(
                wire + first * GROUP, scales + first, row, groups, ROWS
            )
            at = _quantized.elements(row, ROWS)
            value = (bits * scale).to(out.dtype.element_ty)
            tl.store(out + peer * numel + at, value, mask=at < numel)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate two halves for what arrives, and flags. The plan takes any contiguous tensors."""
    agree(world, OP, problem, config, valid(problem, config))
    shape = (2, problem.size, max(problem.groups, 1))
    wire = world.empty((*shape, GROUP.value), problem.wire, f"{OP}.wire")
    scales = world.empty(shape, torch.float32, f"{OP}.scales")
    flags, epochs = barrier_flags(world, OP, config.programs, "flags")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if problem.numel:
            _gather_kernel[(config.programs,)](
                x, out, wire, scales, flags, epochs, world.ctx, problem.numel, problem.groups,
                SIZE=problem.size, ROWS=config.groups, TRACE=world.kernel_mode,
                num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, (wire, scales, flags, epochs), launch)


def quantized_all_gather(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None, *,
    wire: str | torch.dtype = "fp8", algo: str = "auto", config: Any = None,
    async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Gather bfloat16, float16 or float32 like all_gather, with a byte per element on the wire.

    `wire` is "fp8" or "int8". Each 128 elements share a scale. With int8 an element is off by at
    most 1/254 of the largest of its group, with FP8 by at most 1/16 of itself.
    """
    x = packed(world, OP, x, explain)
    if out is None:
        shape = (world.size * x.shape[0], *x.shape[1:]) if x.dim() else (world.size,)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    check_out(OP, x, out, world.size * x.numel())
    problem = Problem(x.numel(), x.dtype, world.size, _quantized.wire_of(OP, wire))
    options = CallOptions(algo, config, async_op, explain)
    return call(world, OP, problem, {"x": x, "out": out}, options)
