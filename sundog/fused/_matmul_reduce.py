"""What GEMM + reduce-scatter and GEMM + all-reduce share.

Rank r has a part A_r of the columns of A and a part B_r of the rows of B. The result is the sum of
A_r @ B_r, plus bias, activated. A partial, a rank's product of a tile, goes to the owner of its
rows, into its own slot, in the type of the input. The owner adds the slots in rank order in
float32, so the bits are those of a GEMM followed by the collective, whatever the grid. Tiles do not
follow slices: one may have rows of several owners.

All products come first, in one loop as in _gemm.py, and are stored to the owners meanwhile. Then
every program adds one to a count at all ranks, waits for all programs of all ranks, and adds its
share of the partials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..device import chunks, context, signal, tiles, trace
from ..ops.dispatch import CallOptions
from ..ops.op import Plan
from . import _aligned, _gemm
from ._call import by_rows, call_matrices, check_matrices, check_tensors
from ._fitting import fitting

if TYPE_CHECKING:
    from ..world.world import World


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
class Config(_gemm.Grid):
    """Its type says which algorithms take it."""


def valid(problem: Problem, config: Config) -> str | None:
    return _gemm.unfit(problem) or _gemm.valid_grid(config, problem.dtype)


def uneven(problem: Problem) -> str | None:
    """Return why the rows can't be scattered, or None."""
    even = problem.m % problem.size == 0
    return None if even else f"m {problem.m} does not divide by {problem.size} ranks"


_TRIED = tuple(
    (*tile, 8, num_stages)
    for tile in ((64, 64), (64, 128), (128, 128), (128, 256))
    for num_stages in (3, 4)
)


def space(problem: Problem) -> list[Config]:
    made = [
        Config(**tile, group_m=group_m) for tile in _gemm.tried(*_TRIED) for group_m in (1, 4, 8)
    ]
    return [config for config in made if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    """Choose tiles as for a GEMM alone."""
    base = fitting(problem.m, problem.m, problem.n, problem.k, problem.dtype, num_sms)
    most = triton.cdiv(problem.m, base["tile_m"]) * triton.cdiv(problem.n, base["tile_n"])
    return Config(**base, programs=max(1, min(num_sms, most)))


def slice_rows(problem: Problem) -> int:
    """Count the rows of the result that a rank adds. The last ranks may have fewer."""
    return triton.cdiv(problem.m, problem.size)


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Make a rank's parts of A and B, and the bias, which all ranks have."""
    torch.manual_seed(seed * 1000 + world.rank)
    shapes = [(problem.m, problem.k), (problem.k, problem.n)]
    made = [torch.empty(s, dtype=problem.dtype, device=world.device) for s in shapes]
    made = [tensor.random_(-2, 3) if exact else tensor.normal_() for tensor in made]
    if problem.has_bias:
        torch.manual_seed(seed)
        made.append(torch.empty_like(made[1][0]).random_(-9, 9))
    return tuple(made)


def sum_of(
    problem: Problem, a: list[torch.Tensor], b: list[torch.Tensor], bias: list[torch.Tensor] | None
) -> torch.Tensor:
    """Return all of the result, from all ranks' inputs, with partials rounded as they travel."""
    partials = [(x.double() @ y.double()).to(problem.dtype) for x, y in zip(a, b, strict=True)]
    whole = torch.stack([partial.double() for partial in partials]).sum(0)
    if bias is not None:
        whole = whole + bias[0].double()
    if problem.activation == "silu":
        whole = torch.nn.functional.silu(whole)
    return whole.to(problem.out_dtype or problem.dtype)


def call_op(
    world: World, op: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, out_dtype: torch.dtype | None, out: torch.Tensor | None,
    options: CallOptions, times: int = 1, slices: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Check the tensors and run the op. Its result has `times / slices` as many rows as a."""
    if isinstance(a, torch.Tensor) and a.dim() > 2:

        def run(rows: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
            more = (bias, activation, out_dtype, room, options, times, slices)
            return call_op(world, op, rows, b, *more)

        return by_rows(world, op, a, out, options.explain, run, times, slices)
    check_tensors(world, op, a=a, b=b, bias=bias, out=out)
    if a.dim() != 2:
        raise ValueError(f"{op}: a of shape {tuple(a.shape)}: expected two dimensions")
    m, k = a.shape
    if m % slices:
        raise ValueError(
            f"{op}: the {m} rows of a do not split into {slices} equal slices; pad a to "
            f"{triton.cdiv(m, slices) * slices}"
        )
    dtype = out_dtype or a.dtype
    out = check_matrices(op, a, b, k, bias, activation, out, m * times // slices, dtype)
    problem = Problem(m, b.shape[1], k, a.dtype, world.size, bias is not None, activation, dtype)
    return call_matrices(world, op, problem, a, b, bias, out, options)


def given(
    problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor
) -> tuple[Any, Any, _gemm.Shape]:
    """Return the operands, and what the kernel is compiled for."""
    x, a_kind = _gemm.operand(a, (config.tile_m, config.tile_k), config.descriptors)
    y, b_kind = _gemm.operand(b, (config.tile_k, config.tile_n), config.descriptors)
    flat = _gemm.room_beside(config, a.itemsize, a.itemsize)
    return x, y, _gemm.shape_of(config, a_kind, b_kind, problem.activation, flat)


# the kernels

# Rows that are added at a time: whole tiles of several ranks would not fit the registers.
_STRIP = 16


class Constants(NamedTuple):
    """The constants that the kernels are compiled for, besides _gemm.Shape."""

    size: tl.constexpr  # ranks
    owners: tl.constexpr  # of a tile's rows, at most
    strip: tl.constexpr  # rows that are added at a time
    ahead: tl.constexpr  # strips that are in flight at once
    trace: tl.constexpr  # the clock of trace points, or 0


def constants(world: World, problem: Problem, config: Config, rows: int) -> Constants:
    """Return the constants of ranks that add `rows` rows each."""
    last = rows - math.gcd(rows, config.tile_m)  # last row of a slice to begin a tile
    owners = min(world.size, (last + config.tile_m - 1) // max(rows, 1) + 1)
    per_row = config.tile_n * problem.dtype.itemsize
    here = gpu_limits.here()
    # More where a thread would have less than 16 bytes: warps of AMD are twice as wide.
    strip = max(_STRIP, chunks.WIDE.value * here.warp_size * config.num_warps // per_row)
    strips = triton.cdiv(rows, strip) * triton.cdiv(problem.n, config.tile_n)
    # Through shared memory: 601 us instead of 606 with M=1024, and 121 instead of 119 with one
    # strip. Of three strips, two are in flight from every rank: with more than 14 ranks that may be
    # too much.
    fits = 2 * world.size * strip * per_row <= here.shared
    ahead = 3 if strips > 2 * config.programs and fits else 1
    return _gemm.constants(
        Constants, size=world.size, owners=owners, strip=strip, ahead=ahead,
        trace=world.kernel_mode,
    )  # fmt: skip


class InboxFlags(NamedTuple):
    """Epochs by which the programs of a call, on all ranks, wait for each other."""

    # By rank: how often its programs have sent all their partials, over all calls. See count_all.
    sent: torch.Tensor
    epochs: torch.Tensor  # by program: how often it has run


def flags_of(world: World, problem: Problem, config: Config, op: str) -> InboxFlags:
    sent = world.signals(problem.size + 1, f"{op}.sent")
    return InboxFlags(sent, world.signals(config.programs, f"{op}.epochs"))


def plan_inbox(
    world: World, op: str, problem: Problem, config: Config, kernel: Any, flags: Any, rows: int,
    parts: int,
) -> Plan:  # fmt: skip
    """Plan a kernel that sends partials to an inbox, with `rows` rows per rank, and adds them.

    Rows are padded to 16 elements, for wide accesses. With two `parts`, see half_of.
    """
    cols = triton.cdiv(problem.n, 16) * 16
    inbox = world.empty((parts * problem.size * rows, cols), problem.dtype, f"{op}.inbox")
    view = tiles.View(inbox, rows, cols, cols, 1)  # of the first rank's partials
    world.barrier()  # every rank's flags are zero before the first signal
    rooms = _aligned.Rooms(world, config, config.programs)

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        x, y, shape = given(problem, config, *rooms.wide(a, b))
        kernel[(config.programs,)](
            x, y, tiles.view(out), added[0] if added else None, view, flags, world.ctx, problem.k,
            constants(world, problem, config, rows), shape,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (*flags, inbox), launch)


@triton.jit
def half_of(inbox, epoch, cfg):
    """Return the half of an inbox that this call uses; the last call used the other one.

    So no rank has to signal that an inbox was read. When this rank ended the last call, it had
    waited for what all ranks sent in it, so all had begun it. So they had ended the call before
    that one, which used this half.
    """
    return tiles.part(inbox, epoch % 2 * cfg.size * inbox.rows, inbox.rows)


@triton.jit
def slot(inbox, source):
    """Return the slot of rank `source` in an inbox."""
    return tiles.part(inbox, source * inbox.rows, inbox.rows)


@triton.jit
def product(a, b, row, col, K, shape):
    """Compute a tile of this rank's partial."""
    acc = tl.zeros((shape.tile_m, shape.tile_n), tl.float32)
    return _gemm.accumulate(acc, a, b, row, col, 0, tl.cdiv(K, shape.tile_k), shape)


@triton.jit
def push(a, b, inbox, M, N, K, ctx, cfg, shape):
    """Multiply this program's tiles and store them to the owners.

    Nothing in the loops signals or waits, so Triton makes them one pipelined loop.
    """
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    away = tiles.distances(ctx, cfg.size)
    rows, cols = tl.cdiv(M, shape.tile_m), tl.cdiv(N, shape.tile_n)
    first = (rank + 1) * inbox.rows // shape.tile_m  # each rank begins with a different owner
    trace.begin(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)
    for n in tl.range(program, rows * cols, tl.num_programs(0), flatten=shape.flat):
        i, j = _gemm.swizzle(n, rows, cols, shape.group_m)
        row, col = (first + i) % rows * shape.tile_m, j * shape.tile_n
        acc = product(a, b, row, col, K, shape)
        for step in tl.static_range(cfg.owners):
            owner = row // inbox.rows + step
            there = slot(tiles.of_rank(inbox, owner, away), rank)
            if cfg.owners == 1:
                store(there, row - owner * inbox.rows, col, acc, shape)
            else:
                _store_rows(there, row - owner * inbox.rows, col, acc, owner < cfg.size)
    trace.end(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)


@triton.jit
def store(matrix, row, col, acc, shape):
    """Store a product."""
    if shape.a_kind == "view":
        tiles.store_product(matrix, row, col, acc)
    else:  # not on AMD: half a tile at a time would be slower
        tiles.store(matrix, row, col, acc)


@triton.jit
def _store_rows(matrix, row, col, tile, is_rank):
    """Do as tiles.store, but the tile may begin above the matrix, or the rank may not exist."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    below = row + tl.arange(0, ROWS)[:, None] >= 0
    mask = tiles.inside(matrix, row, col, ROWS, COLS) & below & is_rank
    value = tile.to(matrix.ptr.dtype.element_ty)
    tl.store(tiles.at(matrix, row, col, ROWS, COLS), value, mask=mask)


@triton.jit
def count_all(counts, epoch, ctx, cfg):
    """Add one to `counts[my rank]` at every rank, after all that this program did before.

    Like signal.signal_all, for all programs of a rank at once: a program that waits for epoch *
    programs sees what each of them did before. Where signals are stores, the programs count in a
    word of this rank, `counts[size]`, and the last one stores the number.
    """
    value = epoch * tl.num_programs(0)
    trace.begin(trace.SIGNAL, counts, value, trace.ALL, ctx, cfg.trace)
    LANES: tl.constexpr = triton.next_power_of_2(cfg.size)
    lane = tl.arange(0, LANES)
    tl.debug_barrier()  # all warps' earlier stores before the releases
    if cfg.trace < signal.STORE:
        there = signal._translate_all(counts, lane, cfg.size, ctx)
        one = tl.full((LANES,), 1, tl.int64)
        tl.atomic_add(there, one, mask=lane < cfg.size, sem="release", scope="sys")
    else:
        # Releases what this program did to the last one, which acquires it and releases everything.
        one = tl.full((), 1, tl.int64)
        before = tl.atomic_add(counts + cfg.size, one, sem="acq_rel", scope="gpu")
        if before + 1 == value:
            signal._signal_lanes(counts, lane, value, ctx, cfg.trace)


@triton.jit
def total(inbox, row, col, rows, cfg, shape):
    """Return `cfg.strip` rows of the sum of all ranks' partials, from slots with `rows` rows.

    Partials are added in rank order, beginning with rank 0's, as in the collectives.
    """
    parts = ()
    for source in tl.static_range(cfg.size):  # all loads first, to be in flight together
        here = tiles.part(inbox, source * inbox.rows, rows)
        parts = parts + (tiles.load(here, row, col, cfg.strip, shape.tile_n),)
    acc = parts[0].to(tl.float32)
    for source in tl.static_range(1, cfg.size):
        acc += parts[source].to(tl.float32)
    return acc


@triton.jit
def add_all(out, bias, inbox, ctx, cfg, shape):
    """Add this program's share of the inbox into `out`."""
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    strips, cols = tl.cdiv(out.rows, cfg.strip), tl.cdiv(out.cols, shape.tile_n)
    trace.begin(trace.FETCH, program, 0, rank, ctx, cfg.trace)
    for n in tl.range(program, strips * cols, tl.num_programs(0), num_stages=cfg.ahead):
        row, col = n // cols * cfg.strip, n % cols * shape.tile_n
        acc = total(inbox, row, col, out.rows, cfg, shape)
        tiles.store(out, row, col, _gemm.finish(bias, acc, col, out.cols, shape))
    trace.end(trace.FETCH, program, 0, rank, ctx, cfg.trace)
