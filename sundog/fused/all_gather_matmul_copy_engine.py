"""All-gather + GEMM where the copy engine fetches: no SM copies, and no kernel reads a link.

    the caller's stream    begin: all ranks' A may be read     multiply        then what follows
    another stream                      rows, words, rows, words, ...   end: all have read

For each run of rows the host puts two copies on the other stream: the peers' rows into the staging
buffer, then an epoch into the words of these rows. Workers wait for the words as those of
hbm_buffer wait for fetchers' flags (_workers.py). docs/memory_model.md says what a copy orders.

The epoch is copied from memory that `_begin_kernel` advances, so that a graph has no constant epoch
and every replay waits for its own copies. By default one SM stays free: torch copies within one GPU
by a kernel, which the workers that wait for it must not keep out. Runs grow at first, so that
workers begin soon, and shrink at the end, where what arrives last is multiplied last, but never
below what one wave of workers multiplies. It adds in the order of hbm_buffer, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import signal, tiles
from ..ops.op import Plan, agree
from . import _aligned, _gemm, _workers
from ._call import resident
from ._fitting import fitting
from .all_gather_matmul import Problem, cases, cost, inputs, reference, unfit

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("a",)
AUTO_ON: tuple[str, ...] = ()  # where it was measured: nowhere yet
ACCEPT = {
    "_signal_lanes: tl.debug_barrier(): dropped": "no kernel of this op stores a tile before it "
    "signals: what it publishes came before it on the stream",
    "_wait_tile: tl.debug_barrier(): dropped": "after a wait for the ranks only the end of the "
    "kernel follows, which is the end of all its threads",
}
_SIDE = 2  # the copies of stream 0 are on stream 2, those of stream 1 on stream 3
_RUN = 16 << 20  # bytes of a copy: each takes about 4 us besides its bytes (H200, PCIe)


@dataclass(frozen=True)
class Config(_gemm.Grid):
    run: int = 8  # rows of tiles that are copied together, at most


def valid(problem: Problem, config: Config) -> str | None:
    if config.run < 1:
        return f"run {config.run}: at least one row of tiles is copied at a time"
    return unfit(problem) or _gemm.valid_grid(config, problem.dtype)


def space(problem: Problem) -> list[Config]:
    made = [
        Config(**tile, group_m=group_m, run=run, programs=131)
        for tile in _gemm.tried((64, 128, 4, 5), (128, 128, 4, 4), (128, 256, 8, 3))
        for group_m in (4, 8)
        for run in (1, 2, 4, 8, 16, 32)
    ]
    return [config for config in made if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    """Copy up to 16 MiB at once, and in at least four runs."""
    m, k = problem.shard_shape
    config = Config(**fitting(problem.m, m, problem.n, k, problem.dtype, num_sms))
    row = config.tile_m * k * problem.dtype.itemsize
    most = _workers.staged_tiles(problem, config)[0] // 4
    outputs = _workers.outputs(problem, config.tile_m, config.tile_n)
    programs = max(1, min(num_sms - 1, outputs))
    return replace(config, run=max(1, min(_RUN // max(row, 1), most)), programs=programs)


class _Arrivals(NamedTuple):
    """The constants of the waits, named like those of _fetchers.Fetch."""

    size: tl.constexpr
    by_k: tl.constexpr
    per_shard: tl.constexpr
    cols: tl.constexpr
    per_flag: tl.constexpr
    scope: tl.constexpr
    trace: tl.constexpr


class _Flags(NamedTuple):
    """Epochs by which the ranks, and the copies and the workers of one, wait for each other."""

    ready: torch.Tensor  # by rank: its part of A may be read
    done: torch.Tensor  # by rank: it has read all that it will of this rank's A
    staged: torch.Tensor  # by row of tiles: it is in the staging buffer
    tickets: torch.Tensor  # how many output tiles were asked for, by all calls
    epochs: torch.Tensor  # how often the op has run, a copy for each row of tiles of a run


@triton.jit
def _begin_kernel(flags, ctx, SIZE: tl.constexpr, WORDS: tl.constexpr, TRACE: tl.constexpr):
    epoch = tl.load(flags.epochs) + 1
    # My A is complete, since all earlier work on the stream has ended; so are the peers', for the
    # copies.
    signal.barrier_ranks(flags.ready, epoch, ctx, SIZE, TRACE)
    # Read by the copies, which an event orders after this kernel, and by the workers, which follow
    # on the stream.
    tl.store(flags.epochs + tl.arange(0, WORDS), tl.zeros((WORDS,), tl.int64) + epoch)


@triton.jit
def _end_kernel(flags, ctx, SIZE: tl.constexpr, TRACE: tl.constexpr):
    # My copies of the peers' A came before on this stream. The peers may overwrite it when their
    # other stream, which waits for this, has joined.
    signal.barrier_ranks(flags.done, tl.load(flags.epochs), ctx, SIZE, TRACE)


@triton.jit
def _multiply_kernel(a, parts, b, out, to, bias, flags, ctx, cfg, shape):
    epoch = tl.load(flags.epochs)
    _workers.work(a, parts, b, out, to, bias, flags, epoch, ctx, cfg, shape)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the staging buffer. The plan takes a symmetric a, any b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "all_gather_matmul.copy_engine", problem, config, refused)
    if problem.k == 0:
        return Plan(world, problem, config, (), _workers.multiply_nothing(problem, config))
    rows, cols = problem.shard_shape
    width = _aligned.padded(cols, problem.dtype.itemsize, config.descriptors)
    room = world.empty((rows, width), problem.dtype, "all_gather_matmul.aligned")
    buffer = world.empty(
        (problem.size - 1, rows, width), problem.dtype, "all_gather_matmul.staging"
    )
    flags = _flags(world, problem, config)
    rooms = _aligned.Rooms(world, config, config.programs)
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *given, out = rest
        constants = {"SIZE": problem.size, "TRACE": world.kernel_mode, "num_warps": 1}
        a = _aligned.dense(a, room, config.programs)  # peers copy whole rows of it
        [b] = rooms.wide(b)
        _begin_kernel[(1,)](flags, world.ctx, WORDS=flags.epochs.numel(), **constants)
        begun = world.record_event()
        # The copies are enqueued first: CUDA does not know that the workers wait for them, and
        # where it runs one after the other, it keeps this order.
        with world.stream(_SIDE + world.stream_number):
            world.wait_event(begun)
            if not world.passive:
                _fetch(world, problem, config, a, buffer, flags)
            _end_kernel[(1,)](flags, world.ctx, **constants)
            ended = world.record_event()
        if not world.passive:
            bias = given[0] if given else None
            _multiply_kernel[(config.programs,)](
                *arguments(problem, config, a, buffer, b, out, bias, flags, world),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
            )
        world.wait_event(ended)
        return out

    return Plan(world, problem, config, (*flags, buffer, room), launch)


def _flags(world: World, problem: Problem, config: Config) -> _Flags:
    rows, _ = _workers.staged_tiles(problem, config)
    words = triton.next_power_of_2(min(config.run, max(rows, 1)))
    sizes = dict(ready=problem.size, done=problem.size, staged=rows, tickets=1, epochs=words)
    return _Flags(**{n: world.signals(s, f"all_gather_matmul.{n}") for n, s in sizes.items()})


def _fetch(
    world: World, problem: Problem, config: Config, a: torch.Tensor, buffer: torch.Tensor,
    flags: _Flags,
) -> None:  # fmt: skip
    """Put copies on the current stream: rows of the peers' A, then the words of these rows."""
    peers = [(world.rank + step) % problem.size for step in range(1, problem.size)]
    theirs = [world._backend.copied_from(world.peer(a, peer), peer) for peer in peers]
    wave = config.programs // max(triton.cdiv(problem.n, config.tile_n), 1)
    for first, last in runs(_workers.staged_tiles(problem, config)[0], config.run, wave):
        for step, begin, end in _pieces(problem, config, first, last):
            buffer[step, begin:end].copy_(theirs[step][begin:end], non_blocking=True)
        # The rows before their words: copies on one stream run one after the other.
        flags.staged[first:last].copy_(flags.epochs[: last - first], non_blocking=True)


def runs(rows: int, most: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield which rows of tiles are copied together: first `least` rows, then twice as many each
    time up to `most`, and at the end half of what is left."""
    first, least = 0, max(1, min(least, most))
    grown = least
    while first < rows:
        last = min(first + max(least, min(grown, (rows - first) // 2)), rows)
        yield first, last
        first, grown = last, min(2 * grown, most)


def _pieces(
    problem: Problem, config: Config, first: int, last: int
) -> Iterator[tuple[int, int, int]]:
    """Yield, for a run of rows of tiles, their places in the staging buffer and rows of a shard."""
    rows, others = problem.shard_shape[0], problem.size - 1
    if problem.shard == "k":  # a row of tiles has parts of all peers
        yield from ((step, first * config.tile_m, last * config.tile_m) for step in range(others))
        return
    per_shard = triton.cdiv(rows, config.tile_m)
    for step in range(first // per_shard, triton.cdiv(last, per_shard)):
        begin = max(first - step * per_shard, 0) * config.tile_m
        yield step, begin, min((last - step * per_shard) * config.tile_m, rows)


def arguments(
    problem: Problem, config: Config, a: torch.Tensor, buffer: torch.Tensor, b: torch.Tensor,
    out: torch.Tensor, bias: torch.Tensor | None, flags: _Flags, world: World,
) -> tuple:  # fmt: skip
    """Return the kernel's arguments: the tests compile what a plan launches."""
    given, parts, a_kind = _workers.sharded(config, a, buffer)
    y, b_kind, to = _workers.others(problem, config, b, out, beside=False)
    shape = _gemm.shape_of(config, a_kind, b_kind, problem.activation)
    arrivals = _gemm.constants(
        _Arrivals, size=problem.size, by_k=problem.shard == "k",
        per_shard=triton.cdiv(a.shape[1], config.tile_k), cols=problem.shard_shape[1],
        per_flag=max(1, _workers.staged_tiles(problem, config)[1]), scope="sys",
        trace=world.kernel_mode,
    )  # fmt: skip
    return given, parts, y, tiles.view(out), to, bias, flags, world.ctx, arrivals, shape
