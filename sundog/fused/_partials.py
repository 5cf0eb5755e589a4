"""How partials travel: what the kernels of GEMM + reduce-scatter and GEMM + all-reduce share.

A partial, a rank's product of a tile, goes to the owner of its rows, into a slot of its own, in the
type of the input; the owner adds the slots in rank order in float32. So the bits are those of a
GEMM followed by the collective, whatever the grid. Tiles know nothing of slices: one may have rows
of several owners.

All products come first, in one loop as in gemm.py, and are stored to the owners meanwhile; then
every program counts itself at all ranks, waits for all programs of all ranks, and adds its share.
A flag per tile, which an owner could act on sooner, costs more than that is worth: Triton pipelines
no loop with a barrier in it. With one the loop over K ended at every tile, and GEMM +
reduce-scatter of 4096 x 3584 x 8192 on 8 ranks of an H200 took 2563 us; now it takes 2431.

Measured and gone: owners that multiplied for their own rows last and added each such tile at once
were faster with 4096 x 4096 x 4096 (1425 us against 1445), slower with M=1024 (662 against 601),
where B was read twice. Not to be had: products stored by descriptor, as in gemm.py, and pulled by
the owners. In the same kernel nobody can say that they have arrived: after such a store Triton
waits (cp.async.bulk.wait_group.read) until its shared memory is free again, not until it is done.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import context, signal, tiles, trace
from . import _gemm
from ._matmul_reduce import Config, Problem

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "STRIP", "Constants", "add_all", "constants", "count_all", "half_of", "inbox_of", "product",
    "push", "slot", "store", "total",
]  # fmt: skip

# Rows that are added at a time: a whole tile, of several ranks, would not fit the registers.
STRIP = tl.constexpr(16)


class Constants(NamedTuple):
    size: Any
    lanes: Any
    owners: Any  # of a tile's rows, at most
    ahead: Any  # strips that are on their way at once
    trace: Any  # the clock of trace points, or 0


def constants(world: World, problem: Problem, config: Config, rows: int) -> Constants:
    """Of ranks that add `rows` rows each."""
    last = rows - math.gcd(rows, config.tile_m)  # of a slice, that a tile can begin with
    owners = min(world.size, (last + config.tile_m - 1) // max(rows, 1) + 1)
    strips = triton.cdiv(rows, STRIP.value) * triton.cdiv(problem.n, config.tile_n)
    # Through shared memory: 601 us against 606 with M=1024, and 121 against 119 with one strip.
    # Of three two are on their way, of every rank: with more than 14 that may be too much.
    nbytes = 2 * world.size * STRIP.value * config.tile_n * problem.dtype.itemsize
    ahead = 3 if strips > 2 * config.programs and nbytes <= _gemm.SHARED else 1
    lanes = triton.next_power_of_2(world.size)
    return Constants(*map(tl.constexpr, (world.size, lanes, owners, ahead, world.trace)))


def inbox_of(
    world: World, problem: Problem, rows: int, parts: int, name: str
) -> tuple[torch.Tensor, tiles.View]:
    """Memory for every rank's partials of `rows` rows, and a view of one rank's, the first.

    Rows are padded to 16 elements, for wide accesses. Two `parts`: see `half_of`.
    """
    cols = triton.cdiv(problem.n, 16) * 16
    inbox = world.empty((parts * problem.size * rows, cols), problem.dtype, name)
    return inbox, tiles.View(inbox, rows, cols, cols, 1)


@triton.jit
def half_of(inbox, epoch, F):
    """The half of an inbox that this call uses; the last call used the other.

    So nobody has to say that an inbox was read: when this rank ended the last call all ranks had
    begun it, for it waited for what they sent; so they had ended the call before, which used this.
    """
    return tiles.part(inbox, epoch % 2 * F.size * inbox.rows, inbox.rows)


@triton.jit
def slot(inbox, source):
    """What an inbox has of rank `source`."""
    return tiles.part(inbox, source * inbox.rows, inbox.rows)


@triton.jit
def product(a, b, row, col, K, S):
    """A tile of this rank's partial."""
    acc = tl.zeros((S.tile_m, S.tile_n), tl.float32)
    return _gemm.accumulate(acc, a, b, row, col, 0, tl.cdiv(K, S.tile_k), S)


@triton.jit
def push(a, b, inbox, M, N, K, ctx, F, S):
    """Multiply this program's tiles and store them to the owners.

    Nothing in the loop signals or waits, so that Triton makes one pipelined loop of two.
    """
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    away = tiles.distances(ctx, F.lanes)
    rows, cols = tl.cdiv(M, S.tile_m), tl.cdiv(N, S.tile_n)
    first = (rank + 1) * inbox.rows // S.tile_m  # each rank begins with another owner
    trace.begin(trace.COMPUTE, program, 0, rank, ctx, F.trace)
    for n in tl.range(program, rows * cols, tl.num_programs(0), flatten=S.flat):
        i, j = _gemm.swizzle(n, rows, cols, S.group_m)
        row, col = (first + i) % rows * S.tile_m, j * S.tile_n
        acc = product(a, b, row, col, K, S)
        for step in tl.static_range(F.owners):
            owner = row // inbox.rows + step
            there = slot(tiles.of_rank(inbox, owner, away), rank)
            if F.owners == 1:
                store(there, row - owner * inbox.rows, col, acc, S)
            else:
                _store_rows(there, row - owner * inbox.rows, col, acc, owner < F.size)
    trace.end(trace.COMPUTE, program, 0, rank, ctx, F.trace)


@triton.jit
def store(matrix, row, col, acc, S):
    """Store a product."""
    if S.a_kind == "view":
        tiles.store_product(matrix, row, col, acc)
    else:  # not on AMD: half a tile at a time would be slower
        tiles.store(matrix, row, col, acc)


@triton.jit
def _store_rows(matrix, row, col, tile, is_rank):
    """As tiles.store, but the tile may begin above the matrix, and there may be no such rank."""
    ROWS: tl.constexpr = tile.shape[0]
    COLS: tl.constexpr = tile.shape[1]
    below = row + tl.arange(0, ROWS)[:, None] >= 0
    mask = tiles.inside(matrix, row, col, ROWS, COLS) & below & is_rank
    value = tile.to(matrix.ptr.dtype.element_ty)
    tl.store(tiles.at(matrix, row, col, ROWS, COLS), value, mask=mask)


@triton.jit
def count_all(counts, epoch, ctx, F):
    """Add one to `counts[my rank]` at every rank, after all that this program did before.

    As signal.signal_all, for all programs of a rank at once: a program that waits until there are
    epoch * programs sees what every one of them did before.
    """
    value = epoch * tl.num_programs(0)
    trace.begin(trace.SIGNAL, counts, value, trace.ALL, ctx, F.trace)
    lane = tl.arange(0, F.lanes)
    there = signal._translate_all(counts, lane, F.size, ctx)
    tl.debug_barrier()  # all warps' earlier stores before the lanes' releases
    one = tl.full((F.lanes,), 1, tl.int64)
    tl.atomic_add(there, one, mask=lane < F.size, sem="release", scope="sys")


@triton.jit
def total(inbox, row, col, rows, F, S):
    """STRIP rows of the sum of all ranks' partials, of slots of which `rows` rows are filled.

    In rank order, beginning with rank 0's, as the collectives add.
    """
    parts = ()
    for source in tl.static_range(F.size):  # all loads first: they wait for memory together
        here = tiles.part(inbox, source * inbox.rows, rows)
        parts = parts + (tiles.load(here, row, col, STRIP, S.tile_n),)
    acc = parts[0].to(tl.float32)
    for source in tl.static_range(1, F.size):
        acc += parts[source].to(tl.float32)
    return acc


@triton.jit
def add_all(out, bias, inbox, ctx, F, S):
    """Add this program's share of what is in the inbox, into `out`."""
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    strips, cols = tl.cdiv(out.rows, STRIP), tl.cdiv(out.cols, S.tile_n)
    trace.begin(trace.FETCH, program, 0, rank, ctx, F.trace)
    for n in tl.range(program, strips * cols, tl.num_programs(0), num_stages=F.ahead):
        row, col = n // cols * STRIP, n % cols * S.tile_n
        acc = total(inbox, row, col, out.rows, F, S)
        tiles.store(out, row, col, _gemm.finish(bias, acc, col, out.cols, S))
    trace.end(trace.FETCH, program, 0, rank, ctx, F.trace)
