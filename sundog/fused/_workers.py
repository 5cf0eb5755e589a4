"""Workers: programs that multiply a sharded matrix as its shards arrive in a staging buffer.

A worker takes output tiles from a queue. For each tile it first multiplies what has arrived: its
own part of A, in place, and what flags say has been staged. Then it waits for the next flag. Once a
row is staged, this is one plain loop over K, which the compiler pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import context, local, proxy, tiles, trace
from . import _fetchers, _gemm

if TYPE_CHECKING:
    import torch

    from .all_gather_matmul import Problem

_LANES = tl.constexpr(32)  # flags that are polled together


def outputs(problem: Problem, tile_m: int, tile_n: int) -> int:
    """Count output tiles, on the host. Along M a tile has rows of one rank only."""
    rows = triton.cdiv(problem.shard_shape[0], tile_m)
    return (rows if problem.shard == "k" else problem.size * rows) * triton.cdiv(problem.n, tile_n)


def others(
    problem: Problem, config: _gemm.Tiles, b: torch.Tensor, out: torch.Tensor, beside: bool
) -> tuple[Any, str, Any]:
    """Return, on the host, what A's shards do not change: B, its kind, the output's descriptor.

    Where a shard's columns end inside a block, A reads as zero, but a descriptor of B would read on
    into the next shard, and 0 times infinity is not 0. Along M a descriptor of the output would
    write on in the same way. `beside`: in a `for` loop over tiles Triton writes one while it loads
    the next.
    """
    rows, cols = problem.shard_shape
    is_k, alone = problem.shard == "k", problem.size == 1
    whole = alone or not is_k or cols % config.tile_k == 0
    y, kind = _gemm.operand(b, (config.tile_k, config.tile_n), config.descriptors and whole)
    whole = alone or is_k or rows % config.tile_m == 0
    to = _gemm.target(out, config, b.itemsize, beside) if whole else None
    return y, kind, to


def staged_tiles(problem: Problem, config: _gemm.Tiles) -> tuple[int, int]:
    """Return rows and blocks of remote tiles."""
    m, k = problem.shard_shape
    rows, blocks = triton.cdiv(m, config.tile_m), triton.cdiv(k, config.tile_k)
    peers = problem.size - 1
    return (rows, peers * blocks) if problem.shard == "k" else (peers * rows, blocks)


def sharded(
    config: _gemm.Tiles, a: torch.Tensor, buffer: torch.Tensor
) -> tuple[_fetchers.Sharded, Any, str]:
    """Return A's own and staged shards, one descriptor if they are laid out alike, its kind."""
    block = (config.tile_m, config.tile_k)
    kind = _gemm.kind_of(a, config.descriptors)
    if a.stride() != buffer.stride()[1:] or buffer.data_ptr() % 16:
        kind = _gemm.VIEW
    # A world of one rank stages nothing, and an empty tensor has no address.
    distance = (buffer.data_ptr() - a.data_ptr()) // a.itemsize if buffer.numel() else 0
    apart, rows_apart, cols_apart = buffer.stride()
    given = _fetchers.Sharded(
        *tiles.view(a), buffer, rows_apart, cols_apart, apart, int(distance < 0)
    )
    if kind == _gemm.VIEW:
        return given, None, kind
    # Dimensions: own or staged, the other rank, and a shard. TMA takes any distance between two.
    rows = a if kind == _gemm.ROWS else a.T
    shape = [2, max(1, buffer.shape[0]), *rows.shape]
    steps = [abs(distance) or apart, apart, *rows.stride()]
    box = [1, 1, *(block if kind == _gemm.ROWS else block[::-1])]
    return given, TensorDescriptor(buffer if distance < 0 else a, shape, steps, box), kind


def multiply_nothing(problem: Problem, config: Any) -> Callable[..., torch.Tensor]:
    """Apply bias and activation to zeros, by a plain GEMM: with K = 0 nothing is fetched."""

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *given, out = rest
        bias = given[0] if given else None
        return _gemm.matmul(a, b, out, bias, problem.activation, config, config.programs)

    return launch


@triton.jit
def work(a, parts, b, out, to, bias, flags, epoch, ctx, cfg, shape):
    """Compute output tiles from the queue until it is empty."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    rows, cols = grid(a, out, cfg, shape)
    # Every program takes one ticket too many, so this is what earlier calls have taken.
    before = (epoch - 1) * (rows * cols + tl.num_programs(0))
    tile = _gemm.ticket(flags.tickets) - before
    while tile < rows * cols:
        i, j = _gemm.swizzle(tile.to(tl.int32), rows, cols, shape.group_m)
        acc = _product(a, parts, b, i, j * shape.tile_n, flags, epoch, ctx, cfg, shape)
        tile = _gemm.ticket(flags.tickets) - before  # it arrives while this tile is written
        emit(a, out, to, bias, acc, i, j * shape.tile_n, rank, cfg, shape)


@triton.jit
def grid(a, out, cfg, shape):
    """Count rows and columns of output tiles. Along M a tile has rows of one rank only."""
    rows, cols = tl.cdiv(a.rows, shape.tile_m), tl.cdiv(out.cols, shape.tile_n)
    if not cfg.by_k:
        rows *= cfg.size
    return rows, cols


@triton.jit
def emit(a, out, to, bias, acc, i, col, rank, cfg, shape):
    """Write an output tile, of row of tiles `i`. Along M rows of `rank` come first."""
    own_rows = tl.cdiv(a.rows, shape.tile_m)
    first = 0
    if not cfg.by_k:
        first = (rank + i // own_rows) % cfg.size * a.rows
    if to is None:
        part = tiles.part(out, first, a.rows)
        _gemm.emit(part, None, bias, acc, i % own_rows * shape.tile_m, col, shape)
    else:
        _gemm.emit(out, to, bias, acc, first + i % own_rows * shape.tile_m, col, shape)


@triton.jit
def _needs(a, i, cfg, shape):
    """Return an output tile's row of flags, its blocks that need none, all blocks, and flags."""
    own_rows = tl.cdiv(a.rows, shape.tile_m)
    _, blocks, groups = _fetchers.remote(a, cfg, shape)
    if cfg.by_k:
        return i, cfg.per_shard, cfg.per_shard + blocks, groups
    else:
        is_own = i < own_rows
        row, here = i - own_rows, tl.where(is_own, cfg.per_shard, 0)
        return row, here, cfg.per_shard, tl.where(is_own, 0, groups)


@triton.jit
def _product(a, parts, b, i, col, flags, epoch, ctx, cfg, shape):
    """Compute an output tile in row of tiles `i`: all blocks along K as they arrive."""
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    _, _, total, _ = _needs(a, i, cfg, shape)
    acc = tl.zeros((shape.tile_m, shape.tile_n), tl.float32)
    end = 0
    while end < total:
        begin = end
        end = _available(a, i, begin, flags, epoch, ctx, cfg, shape)
        trace.begin(trace.COMPUTE, i, 0, rank, ctx, cfg.trace)
        acc = _multiply(acc, a, parts, b, i, col, begin, end, rank, cfg, shape)
        trace.end(trace.COMPUTE, i, 0, rank, ctx, cfg.trace)
    return acc


@triton.jit
def _available(a, i, begin, flags, epoch, ctx, cfg, shape):
    """Wait for the next block of an output tile; return up to which one it can be multiplied."""
    groups = _fetchers.remote(a, cfg, shape)[2]
    row, here, total, wanted = _needs(a, i, cfg, shape)
    group = tl.maximum(begin - here, 0) // cfg.per_flag
    first = flags.staged + row * groups + group
    if cfg.size > 1:
        # The fetchers' stores before my loads, of all that has arrived.
        group += _fetchers.arrived(first, wanted - group, epoch, cfg.scope, _LANES)
    end = tl.minimum(here + group * cfg.per_flag, total)
    if end == begin:
        # The fetcher's stores before my loads of what this flag stands for.
        local.wait(first, epoch, ctx, cfg.trace, cfg.scope)
        end = tl.minimum(begin + cfg.per_flag, total)
    if shape.a_kind != "view":
        proxy.fence()  # and before my loads by descriptor
    return end


@triton.jit
def _multiply(acc, a, parts, b, i, col, begin, end, rank, cfg, shape):
    """acc + A @ B, blocks `begin` to `end`."""
    if shape.a_kind == "view":
        own_rows = tl.cdiv(a.rows, shape.tile_m)
        here = tl.minimum(end, cfg.per_shard) if cfg.by_k else tl.where(i < own_rows, end, 0)
        row = i % own_rows * shape.tile_m
        for block in tl.range(begin, here):
            x = tiles.load(a, row, block * shape.tile_k, shape.tile_m, shape.tile_k)
            y = block_of_b(b, a, 0, block, col, rank, cfg, shape)
            acc = tl.dot(x, y, acc, input_precision="ieee")
        begin = tl.maximum(begin, here)
    for block in tl.range(begin, end):
        x, y = _blocks(a, parts, b, i, block, col, rank, cfg, shape)
        acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _blocks(a, parts, b, i, block, col, rank, cfg, shape):
    """Load a block of A, of a staged shard by pointers, and the block of B that it is multiplied
    by. Along K every shard has its own blocks."""
    own_rows = tl.cdiv(a.rows, shape.tile_m)
    row, step, k = i % own_rows * shape.tile_m, i // own_rows, block
    if cfg.by_k:
        step, k = block // cfg.per_shard, block % cfg.per_shard
    if shape.a_kind == "view":
        staged = _fetchers.staged_part(a, step - 1)
        x = tiles.load(staged, row, k * shape.tile_k, shape.tile_m, shape.tile_k)
    else:
        x = _described(a, parts, step, row, k * shape.tile_k, shape)
    return x, block_of_b(b, a, step, k, col, rank, cfg, shape)


@triton.jit
def _described(a, parts, step, row, k, shape):
    """Load a block of the rank that is `step` after this one, by the descriptor of all."""
    which = tl.where(step == 0, a.own_at, 1 - a.own_at)
    other = tl.maximum(step - 1, 0)
    if shape.a_kind == "rows":
        return parts.load([which, other, row, k]).reshape(shape.tile_m, shape.tile_k)
    else:
        return parts.load([which, other, k, row]).reshape(shape.tile_k, shape.tile_m).T


@triton.jit
def block_of_b(b, a, step, block, col, rank, cfg, shape):
    """Load B's block for a block of the rank `step` after `rank`. Along K, B has rows for each."""
    k = block * shape.tile_k
    if not cfg.by_k or cfg.size == 1:
        return _gemm.block_of(b, k, col, shape.b_kind, shape.tile_k, shape.tile_n)
    first = (rank + step) % cfg.size * cfg.cols
    if shape.b_kind == "view":  # a part: the next shard's rows read as zero
        return tiles.load(tiles.part(b, first, cfg.cols), k, col, shape.tile_k, shape.tile_n)
    else:
        return _gemm.block_of(b, first + k, col, shape.b_kind, shape.tile_k, shape.tile_n)
