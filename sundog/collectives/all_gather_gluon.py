"""All-gather in Gluon: like push, with the layout of elements over threads written down.

A rank's tensor is a matrix whose rows hold the programs' shares side by side, so each program walks
down its own strip and all of them share the last, shorter rows. A tile is block_m rows of a strip,
laid out in one dimension: `vector` contiguous bytes a thread, rows and columns by division and
remainder. It is loaded once and stored W times, beginning with a different peer on every rank.
Flags and barriers are those of push.

On an H200 it takes as long as push: 0.984 to 1.015 times as fast in 30 of 34 rows on 2, 4 and 8
ranks, and 0.975 to 0.98 in the other four, which last 5 to 10 us (docs/measured.md). Both loops
have the same loads, stores and barriers. Before its loop this kernel has 24 instructions more (832
to 808): rows are a pitch apart, so each needs an address of its own in each destination. A call
pays that once, about 0.1 us. (sm_90, Triton 3.7.1: `sundog isa all_gather.gluon --target sm_90
--world 4 --problem numel=131072`, then `nvdisasm -c` on the cubin in Triton's cache.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import gpu_limits
from ..device import chunks, context, trace
from ..device import gluon as device
from ..ops.op import Plan, World, agree, barrier_flags
from . import _copy as words
from .all_gather import Problem, cases, cost, inputs, reference

SYMMETRIC = ("out",)
WIDE, HEAD = chunks.WIDE, chunks.HEAD
_ROW = 2048  # bytes of a row of a tile, where nothing was measured
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Config:
    block_m: int = 8  # rows of a tile
    block_n: int = _ROW  # bytes of a row
    programs: int = 16
    num_warps: int = 8
    threads_per_warp: int = 32  # 64 on AMD's CDNA
    vector: int = 16  # contiguous bytes of a thread: 8, 16, or 32, which sm_100 moves at once


def valid(problem: Problem, config: Config) -> str | None:
    if config.threads_per_warp not in (32, 64):
        return f"threads_per_warp {config.threads_per_warp}: GPUs have 32 or 64"
    if config.block_m < 1 or config.block_m & (config.block_m - 1):
        return f"block_m {config.block_m} is not a power of two"
    if config.block_n < WIDE.value or config.block_n & (config.block_n - 1):
        return f"block_n {config.block_n} is not a power of two from {WIDE.value}"
    most = gpu_limits.here().vector
    if config.vector not in (8, 16, 32) or config.vector > most:
        return (
            f"vector {config.vector}: a thread of {gpu_limits.here().arch} moves 8 to {most} bytes"
        )
    tile, threads = config.block_m * config.block_n, config.threads_per_warp * config.num_warps
    reason = words.wrong_config(words.Config(tile, config.programs, config.num_warps))
    if reason is not None:
        return reason.replace("block ", "block_m x block_n ")
    if threads > _MOST_THREADS:
        return f"{config.num_warps} warps of {config.threads_per_warp} are over {_MOST_THREADS}"
    least = max(config.vector, WIDE.value)
    if tile < threads * least:
        return f"a tile of {tile} bytes does not give {threads} threads {least} bytes each"
    return None


def space(problem: Problem) -> list[Config]:
    threads = _threads_per_warp()
    tried = (
        Config(flat.block // row, row, flat.programs, flat.num_warps, threads, vector)
        for flat in words.configs()
        for row in (1024, 4096)
        for vector in (16, 8, 32)
    )
    return [config for config in tried if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    flat, threads = words.config_for(problem.nbytes, num_sms), _threads_per_warp()
    return Config(flat.block // _ROW, _ROW, flat.programs, flat.num_warps, threads)


def _threads_per_warp() -> int:
    return gpu_limits.here().warp_size


@gluon.jit(do_not_specialize=["n"])
def _gluon_kernel(
    x, out, ready, arrived, epochs, ctx, n,
    SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    VECTOR: gl.constexpr, TRACE: gl.constexpr,
):  # fmt: skip
    program = gl.program_id(0)
    rank = gl.load(ctx + context.RANK)
    epoch = gl.load(epochs + program) + 1
    # Computed once, where my tensor goes at every rank. 64-bit, since the rank is.
    places = ()
    for step in gl.static_range(SIZE):
        there = device.translate(out + rank * n, (rank + step) % SIZE, ctx)
        places = places + (there,)  # type: ignore[assignment]
    # This rank's output is free: what read it last came before this kernel on the stream. The
    # peers' programs with this number write it only after this barrier.
    device.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, rank, ctx, TRACE)
    _copy(places, x, n, SIZE, BLOCK_M, BLOCK_N, VECTOR)
    trace.end(trace.FETCH, program, 0, rank, ctx, TRACE)
    # My tiles before the flags; all peers' tiles before whatever follows this kernel here.
    device.barrier_ranks(arrived + program * SIZE, epoch, ctx, SIZE, TRACE)
    gl.store(epochs + program, epoch)  # read by the next call on the stream


@gluon.jit
def _copy(
    dsts, src, n, COUNT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    VECTOR: gl.constexpr,
):  # fmt: skip
    """Store n words from `src` to each of COUNT `dsts`, which are equal modulo 16, as _copy.copy.

    VECTOR: contiguous bytes of a thread where all pointers, and n words, are multiples of 16 bytes;
    0 where they are not. Orders nothing.
    """
    nbytes: gl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    if VECTOR:
        PER: gl.constexpr = VECTOR // nbytes
        COLUMNS: gl.constexpr = BLOCK_N // nbytes
        body = n // (WIDE // nbytes) * (WIDE // nbytes)  # with a divisor known when compiled
        place = gl.arange(0, BLOCK_M * COLUMNS, device.lane_layout(PER, gl.num_warps()))
        pitch = gl.num_programs(0).to(gl.int64) * COLUMNS  # a row of the matrix
        inside = place // COLUMNS * pitch + place % COLUMNS
        for start in range(gl.program_id(0).to(gl.int64) * COLUMNS, body, BLOCK_M * pitch):
            at = start + inside
            source = gl.multiple_of(gl.max_contiguous(src + at, WIDE // nbytes), WIDE)
            tile = gl.load(source, mask=at < body)
            for i in gl.static_range(COUNT):
                # On the tile, not on its base: a hint on a function's argument is lost.
                there = gl.max_contiguous(dsts[i] + at, WIDE // nbytes)
                gl.store(gl.multiple_of(there, WIDE), tile, mask=at < body)
    else:
        head, skew, count = chunks.span(dsts[0], src, n)
        if gl.program_id(0) == gl.num_programs(0) - 1:
            _copy_ends(dsts, src, n, head, count, COUNT)
        # Half as many bytes as above, since each chunk is two loads and takes more registers.
        _copy_chunks(dsts, src, head, skew, count, COUNT, BLOCK_M * BLOCK_N // WIDE // 2)


@gluon.jit
def _copy_chunks(dsts, src, head, skew, count, COUNT: gl.constexpr, TILE: gl.constexpr):
    """Do as chunks.load and chunks.store, in a layout that gives a thread whole chunks."""
    nbytes: gl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    pairs: gl.constexpr = device.pair_layout(gl.num_warps())
    chunk = gl.arange(0, TILE, device.slice_layout(1, pairs))
    word = gl.expand_dims(gl.arange(0, 2, device.slice_layout(0, pairs)), 0)
    words = (src + head - skew // nbytes).to(gl.pointer_type(gl.uint64))
    bits, is_far = (skew % 8 * 8).to(gl.uint64), skew >= 8
    first = gl.program_id(0).to(gl.int64) * TILE
    for start in range(first, count, gl.num_programs(0).to(gl.int64) * TILE):
        at = gl.expand_dims(start + chunk, 1) * 2 + word
        mask = at < 2 * count
        # On the tile, not on its base: a hint on a function's argument is lost.
        here = gl.multiple_of(gl.max_contiguous(words + at, (1, 2)), (16, 16))
        after = gl.multiple_of(gl.max_contiguous(words + 2 + at, (1, 2)), (16, 16))
        a, b = gl.split(gl.load(here, mask=mask))
        c, d = gl.split(gl.load(after, mask=mask & (skew > 0), other=0))
        middle = gl.where(is_far, c, b)
        low = chunks._shift(gl.where(is_far, b, a), middle, bits)
        high = chunks._shift(middle, gl.where(is_far, d, c), bits)
        tile = gl.convert_layout(gl.join(low, high), pairs)
        for i in gl.static_range(COUNT):
            there = (dsts[i] + head).to(gl.pointer_type(gl.uint64)) + at
            gl.store(gl.multiple_of(gl.max_contiguous(there, (1, 2)), (16, 16)), tile, mask=mask)


@gluon.jit
def _copy_ends(dsts, src, n, head, count, COUNT: gl.constexpr):
    """Copy the words before and after the chunks, as chunks.ends has them."""
    PER: gl.constexpr = WIDE // (src.dtype.element_ty.primitive_bitwidth // 8)
    lane = gl.arange(0, 16 * PER, device.lane_layout(1, gl.num_warps()))
    at = gl.where(lane < HEAD * PER, lane, head + count * PER + lane - HEAD * PER)
    mask = gl.where(lane < HEAD * PER, lane < head, at < n)
    tile = gl.load(src + at, mask=mask)
    for i in gl.static_range(COUNT):
        gl.store(dsts[i] + at, tile, mask=mask)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any contiguous x, only read here, and a symmetric out."""
    refused = valid(problem, config) or _wrong_warps(world, config)
    agree(world, "all_gather.gluon", problem, config, refused)
    flags = barrier_flags(world, "all_gather", config.programs, "ready", "arrived")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if problem.numel:
            (source, target), aligned = words.as_words(problem.nbytes, x, out)
            _gluon_kernel[(config.programs,)](
                source, target, *flags, world.ctx, source.numel(),
                SIZE=problem.size, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
                VECTOR=config.vector * aligned, TRACE=world.kernel_mode,
                num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)


def _wrong_warps(world: World, config: Config) -> str | None:
    """Return why the layout does not suit this GPU, or None. The simulator takes both kinds."""
    if world.device.type == "cpu":
        return None
    here, asked = torch.cuda.get_device_properties(world.device), config.threads_per_warp
    if asked == here.warp_size:
        return None
    return f"threads_per_warp {asked}, but a warp of {here.name} has {here.warp_size}"
