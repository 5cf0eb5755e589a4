"""All-gather + GEMM without a gather: the main loop reads each block of A from its owner.

It wins where peers' memory is as near as local memory, as for ranks that share a GPU: nothing is
moved first, and nothing is staged. One descriptor of three dimensions (rank, row, column), whose
first stride is the distance between two heaps, lets it use the loop of _gemm.py. Elsewhere (AMD,
heaps that are not evenly spaced) blocks are read by pointers, peer by peer. Over a link every block
of A would cross N / tile_n times, where hbm_buffer moves it once.

Ranks that share a GPU take the blocks in the same order, rank 0's shard first, so that they read
the same ones at about the same time, from its L2 cache. Their bits are those of a GEMM with A
gathered, the same on all ranks with the same B. Ranks with a GPU each begin with their own shard
(`own_first`), so that no two of them read from one peer at a time; along K, two ranks with the same
B may then differ in the last bit. docs/fused.md has the times.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device import context, proxy, signal, tiles, trace
from ..ops.op import Plan, agree
from ..ops.passive import stand_in
from . import _aligned, _gemm, _workers
from . import all_gather_matmul_barrier as barrier
from ._call import hint_of, resident
from ._fitting import FEW_SMS, fitting
from .all_gather_matmul import Problem, cases, cost, inputs, reference, unfit

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("a",)
AUTO_ON = ("virtual",)  # `symm` may need pointers, which were not measured
_GROUP = 16  # rows of tiles: all ranks read the same A, so it pays to reuse more of B
_FARTHEST = 1 << 40  # bytes: TMA's strides are below this


@dataclass(frozen=True)
class Config(_gemm.Grid):
    own_first: bool = False  # each rank begins with its own shard, instead of all with rank 0's


def valid(problem: Problem, config: Config) -> str | None:
    return unfit(problem) or _gemm.valid_grid(config, problem.dtype)


def space(problem: Problem) -> list[Config]:
    return [
        Config(**dataclasses.asdict(each), own_first=own_first)
        for each in barrier.space(problem)
        for own_first in (False, True)
    ]


def default(problem: Problem, num_sms: int) -> Config:
    m, k = problem.shard_shape
    base = fitting(problem.m, m, problem.n, k, problem.dtype, num_sms)
    outputs = _workers.outputs(problem, base["tile_m"], base["tile_n"])
    programs = max(1, min(num_sms, outputs))
    return Config(**base, group_m=_GROUP, programs=programs, own_first=num_sms > FEW_SMS)


class _Flags(NamedTuple):
    ready: torch.Tensor  # by rank: its part of A may be read
    done: torch.Tensor  # by program and rank: it has read all that it will of this rank's A
    epochs: torch.Tensor  # by program: how often it has run


class _Shards(NamedTuple):
    """The constants of A's shards."""

    size: tl.constexpr  # ranks
    by_k: tl.constexpr  # A is sharded along K, else along M
    per_shard: tl.constexpr  # blocks along K; dividing by a variable costs 4 % of the time
    cols: tl.constexpr  # of a shard, without padding
    own_first: tl.constexpr  # see Config
    hint: tl.constexpr  # see tiles.hinted
    trace: tl.constexpr  # the clock of trace points, or 0


@triton.jit
def _direct_kernel(a, parts, b, out, to, bias, flags, ctx, cfg, shape):
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(flags.epochs + program) + 1
    if program == 0:
        # My A is complete: it was written before this kernel on the stream. The peers' programs
        # read it only after they have seen this.
        signal.signal_all(flags.ready, epoch, ctx, cfg.size, cfg.trace)
    # The peers' A is complete, as program 0 of each peer signals.
    signal.wait_all(flags.ready, epoch, ctx, cfg.size, cfg.trace)
    if shape.a_kind != "view":
        proxy.fence()  # what the peers wrote, before my loads by descriptor
    away = tiles.distances(ctx, cfg.size)
    rows, cols = _workers.grid(a, out, cfg, shape)
    first = rank if cfg.own_first else 0
    trace.begin(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)
    for tile in tl.range(program, rows * cols, tl.num_programs(0), flatten=shape.flat):
        i, j = _gemm.swizzle(tile, rows, cols, shape.group_m)
        acc = tl.zeros((shape.tile_m, shape.tile_n), tl.float32)
        acc = _multiply(acc, a, parts, b, i, j * shape.tile_n, first, away, cfg, shape)
        _workers.emit(a, out, to, bias, acc, i, j * shape.tile_n, first, cfg, shape)
    trace.end(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)
    # My loads of the peers' A before the flags: they may overwrite it when their kernel has ended.
    done = flags.done + program * cfg.size
    signal.barrier_ranks(done, epoch, ctx, cfg.size, cfg.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _multiply(acc, a, parts, b, i, col, first, away, cfg, shape):
    """Return acc + A @ B over all blocks of row of tiles `i`, from rank `first`'s shard on."""
    per_peer = tl.cdiv(a.rows, shape.tile_m)
    row, owner = i % per_peer * shape.tile_m, i // per_peer
    if shape.a_kind == "view":
        for step in range(0 if cfg.by_k else owner, cfg.size if cfg.by_k else owner + 1):
            peer = (first + step) % cfg.size
            there = tiles.of_rank(tiles.hinted(a, cfg.hint), peer, away)
            for k in tl.range(cfg.per_shard):
                x = tiles.load(there, row, k * shape.tile_k, shape.tile_m, shape.tile_k)
                y = _workers.block_of_b(b, a, peer, k, col, 0, cfg, shape)
                acc = tl.dot(x, y, acc, input_precision="ieee")
    else:
        for block in tl.range(cfg.per_shard * cfg.size if cfg.by_k else cfg.per_shard):
            step, k = owner, block
            if cfg.by_k:
                step, k = block // cfg.per_shard, block % cfg.per_shard
            peer = (first + step) % cfg.size if cfg.own_first else step
            x = _described(parts, peer, row, k * shape.tile_k, shape)
            y = _workers.block_of_b(b, a, peer, k, col, 0, cfg, shape)
            acc = tl.dot(x, y, acc, input_precision="ieee")
    return acc


@triton.jit
def _described(parts, peer, row, k, shape):
    """Load a block of a rank's A, by the descriptor of all ranks'."""
    if shape.a_kind == "rows":
        return parts.load([peer, row, k]).reshape(shape.tile_m, shape.tile_k)
    else:
        return parts.load([peer, k, row]).reshape(shape.tile_k, shape.tile_m).T


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric a, any b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "all_gather_matmul.direct", problem, config, refused)
    flags = _Flags(
        world.signals(problem.size, "all_gather_matmul.ready"),
        world.signals((config.programs, problem.size), "all_gather_matmul.done"),
        world.signals(config.programs, "all_gather_matmul.epochs"),
    )
    name = "all_gather_matmul.aligned"
    room = _aligned.room_for(world, problem.shard_shape, problem.dtype, config, name)
    rooms = _aligned.Rooms(world, config, config.programs)
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *given, out = rest
        # Peers read the copy; my kernel, which follows it, signals that it is there.
        a = _aligned.aligned(a, room, config, config.programs)
        [b] = rooms.wide(b)  # on a passive rank too: all launch the same number of kernels
        if world.passive:
            stand_in(world, *flags)
            return out
        bias = given[0] if given else None
        _direct_kernel[(config.programs,)](
            *arguments(problem, config, a, b, out, bias, flags, world),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return out

    spaces = (*flags,) if room is None else (*flags, room)
    return Plan(world, problem, config, spaces, launch)


def arguments(
    problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    bias: torch.Tensor | None, flags: _Flags, world: World,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments; `isa` and the tests compile what a plan launches."""
    parts, a_kind = _all_ranks(config, a, world)
    y, b_kind, to = _workers.others(problem, config, b, out, beside=True)
    shards = _gemm.constants(
        _Shards, size=problem.size, by_k=problem.shard == "k",
        per_shard=triton.cdiv(a.shape[1], config.tile_k), cols=problem.shard_shape[1],
        own_first=config.own_first, hint=hint_of(a), trace=world.kernel_mode,
    )  # fmt: skip
    flat = to is not None or _gemm.room_beside(config, a.itemsize, out.itemsize)
    shape = _gemm.shape_of(config, a_kind, b_kind, problem.activation, flat)
    return tiles.view(a), parts, y, tiles.view(out), to, bias, flags, world.ctx, shards, shape


def _all_ranks(config: Config, a: torch.Tensor, world: World) -> tuple[Any, str]:
    """Return a descriptor of all ranks' A, if they are evenly spaced, and its kind."""
    block = (config.tile_m, config.tile_k)
    kind, apart = _gemm.kind_of(a, config.descriptors), world.rank_stride
    if kind == _gemm.VIEW or apart is None or apart % 16 or apart >= _FARTHEST:
        return None, _gemm.VIEW
    first = world.peer(a, 0)
    rows = first if kind == _gemm.ROWS else first.T
    box = block if kind == _gemm.ROWS else block[::-1]
    strides = [apart // a.itemsize, *rows.stride()]
    return TensorDescriptor(first, [world.size, *rows.shape], strides, [1, *box]), kind
