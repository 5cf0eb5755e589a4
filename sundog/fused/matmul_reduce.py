"""What GEMM + reduce-scatter and GEMM + all-reduce share: the problem, and how partials travel.

Rank r has a part A_r of the columns of A and B_r of the rows of B; wanted is the sum of A_r @ B_r,
plus bias, activated. A partial, a rank's product of a tile, goes to the owner of the tile, into a
slot of its own, in the type of the input; the owner adds the slots in rank order in float32. So the
bits are those of a GEMM followed by the collective, whatever the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..collectives.call import agreed
from ..device import tiles, trace
from ..op import Plan, find
from . import gemm
from .call import Options, call, check_matrices, fitting

if TYPE_CHECKING:
    from ..world import World

__all__ = [
    "STRIP", "Config", "Constants", "Problem", "call_op", "collective", "constants", "default_of",
    "given", "inputs", "product", "send", "space", "sum_of", "total", "valid", "valid_unfused",
]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    m: int
    n: int
    k: int  # of a rank's part
    dtype: torch.dtype
    size: int  # ranks
    has_bias: bool = False
    activation: str | None = None
    out_dtype: torch.dtype | None = None  # None: as the input


@dataclass(frozen=True)
class Config(gemm.Tiles):
    programs: int = 132


def valid(problem: Problem, config: Config) -> str | None:
    if config.programs < 1:
        return f"programs {config.programs}: at least one must do the work"
    return gemm.valid(config, problem.dtype)


def valid_unfused(problem: Problem, config: Config) -> str | None:
    """Of the algorithms that round the sum before anything is added to it."""
    wanted = problem.out_dtype or problem.dtype
    if problem.has_bias or problem.activation or wanted != problem.dtype:
        return (
            f"bias, activation {problem.activation!r} or output {wanted} would come behind a sum "
            f"that is rounded to {problem.dtype}"
        )
    return valid(problem, config)


def space(problem: Problem) -> list[Config]:
    made = [
        Config(tile_m, tile_n, 64, group_m, num_stages=num_stages)
        for tile_m, tile_n in ((64, 64), (64, 128), (128, 128), (128, 256))
        for group_m in (1, 4, 8)
        for num_stages in (3, 4)
    ]
    return [config for config in made if valid(problem, config) is None]


def default_of(problem: Problem, rows: int, num_sms: int) -> Config:
    """Tiles as for a GEMM alone."""
    base = fitting(problem.m, rows, problem.n, problem.k, problem.dtype, num_sms)
    most = triton.cdiv(problem.m, base["tile_m"]) * triton.cdiv(problem.n, base["tile_n"])
    return Config(**base, programs=max(1, min(num_sms, most)))


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """A rank's parts of A and B, and the bias, which all ranks have."""
    torch.manual_seed(seed * 1000 + world.rank)
    shapes = [(problem.m, problem.k), (problem.k, problem.n)]
    made = [torch.empty(s, dtype=problem.dtype, device=world.device) for s in shapes]
    made = [tensor.random_(-2, 3) if exact else tensor.normal_() for tensor in made]
    if problem.has_bias:
        torch.manual_seed(seed)
        made.append(torch.empty_like(made[1][0]).random_(-9, 9))
    return tuple(made)


def sum_of(
    problem: Problem, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """All of the result, from all ranks' inputs; partials rounded as they travel."""
    partials = [(x.double() @ y.double()).to(problem.dtype) for x, y in zip(a, b, strict=True)]
    whole = torch.stack([partial.double() for partial in partials]).sum(0)
    if bias is not None:
        whole = whole + bias[0].double()
    if problem.activation == "silu":
        whole = torch.nn.functional.silu(whole)
    return whole.to(problem.out_dtype or problem.dtype)


def call_op(
    world: World, op: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, out_dtype: torch.dtype | None, out: torch.Tensor | None, slices: int,
    options: Options,
) -> torch.Tensor:  # fmt: skip
    """Check the tensors and run the op; a rank's result has one of `slices` slices of the rows."""
    if a.dim() != 2:
        raise ValueError(f"{op}: a of shape {tuple(a.shape)}: expected two dimensions")
    m, k = a.shape
    if m % slices:
        raise ValueError(
            f"{op}: the {m} rows of a do not split into {slices} equal slices; pad a to "
            f"{triton.cdiv(m, slices) * slices}"
        )
    dtype, shape = out_dtype or a.dtype, (m // slices, b.shape[-1])
    out = check_matrices(op, a, b, k, bias, activation, out, shape, dtype)
    problem = Problem(m, shape[1], k, a.dtype, world.size, bias is not None, activation, dtype)
    tensors = (a, b) if bias is None else (a, b, bias)
    return call(world, op, problem, tensors, out, options)


def collective(world: World, op: str, numel: int, dtype: torch.dtype) -> Plan:
    """A plan of a collective, with the algorithm and config that a call of it would choose."""
    problem = find(op).Problem(numel, dtype, world.size)
    module, config, _ = agreed(world, op, problem, Options(), ())
    made: Plan = module.plan(world, problem, config)
    return made


# Rows that are added at a time: a whole tile, of several ranks, would not fit the registers.
STRIP = tl.constexpr(16)


class Constants(NamedTuple):
    size: Any
    lanes: Any
    trace: Any  # the clock of trace points, or 0


def constants(world: World) -> Constants:
    lanes = triton.next_power_of_2(world.size)
    return Constants(*map(tl.constexpr, (world.size, lanes, world.trace)))


def given(
    problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor, slice_rows: int = 0
) -> tuple[Any, Any, gemm.Shape]:
    """The operands, and what the kernel is compiled for. A slice of A has so many rows, 0: all."""
    # A descriptor is read from multiples of 16 bytes on: not from where a slice begins, maybe.
    begins = a.stride(1) == 1 or slice_rows * a.itemsize % 16 == 0
    block = (config.tile_m, config.tile_k)
    x, a_kind = gemm.operand(a, block, config.descriptors and begins)
    y, b_kind = gemm.operand(b, (config.tile_k, config.tile_n), config.descriptors)
    return x, y, gemm.shape_of(config, a_kind, b_kind, problem.activation)


@triton.jit
def product(point, a, b, row, col, K, ctx, F, S):
    """A tile of this rank's partial, and the next trace point."""
    point = trace.begin(point, trace.COMPUTE, row, 0, trace.ALL, ctx, F.trace)
    acc = tl.zeros((S.tile_m, S.tile_n), tl.float32)
    acc = gemm.accumulate(acc, a, b, row, col, 0, tl.cdiv(K, S.tile_k), S)
    point = trace.end(point, trace.COMPUTE, row, 0, trace.ALL, ctx, F.trace)
    return point, acc


@triton.jit
def send(inbox, slot, acc, S):
    """Store a partial into a slot of an inbox, the own one or a peer's."""
    if S.a_kind == "view":
        tiles.store_product(inbox, slot * S.tile_m, 0, acc)
    else:  # not on AMD: half a tile at a time would be slower
        tiles.store(inbox, slot * S.tile_m, 0, acc)


@triton.jit
def total(inbox, index, owned, row, F, S):
    """STRIP rows, from `row` on, of the sum of all ranks' partials of an own tile, in rank order.

    The inbox has a slot per rank, of `owned` whole tiles one below the other.
    """
    acc = tl.zeros((STRIP, S.tile_n), tl.float32)
    for source in tl.static_range(F.size):
        first = (source * owned + index) * S.tile_m
        acc += tiles.load(inbox, first + row, 0, STRIP, S.tile_n).to(tl.float32)
    return acc
