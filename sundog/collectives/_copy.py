"""Move bytes of every dtype as integers, 16 bytes at a time wherever the destination allows it.

Ops that only move data treat it as words: the widest integers, of at most 32 bits, that divide all
sizes and addresses. So one kernel serves float8, bool and float64 alike. A span of words has three
parts:

    head      up to the first cache line of its destination that begins in it
    chunks    whole 16 bytes: wide loads and stores, shifted where the source has another alignment
    tail      the rest

Offsets are 64-bit: a tensor may have more than 2^31 elements. `plan_spans` plans the ops in which
every rank writes a span of its tensor to each peer: all-to-all, scatter and broadcast. `plan_pull`
plans those in which it loads one from each peer: all-gather and all-to-all by pull.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..device import chunks, context, memory, signal, trace
from ..device.chunks import WIDE
from ..ops.op import Plan, World, barrier_flags


@dataclass(frozen=True)
class Moved:
    """What is asked of an op that moves data. What `numel` counts, each op says."""

    numel: int
    dtype: torch.dtype
    size: int  # ranks

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


_KINDS = (torch.int32, torch.uint8, torch.int16, torch.uint8)  # by the last two bits of an address
_LEAST_TILE, _LARGEST_TILE, _PER_THREAD = 4096, 32768, 64  # bytes
_LONGEST_TILE = 1 << 19
_ROW = tl.constexpr(4)  # words of the table per peer: the fields of Span


@dataclass(frozen=True)
class Config:
    """Tiles and programs of an op that moves data."""

    block: int = 16384  # bytes of a tile
    programs: int = 16
    num_warps: int = 8


def wrong_config(config: Config) -> str | None:
    if config.block & (config.block - 1) or not WIDE.value <= config.block <= _LONGEST_TILE:
        return f"block {config.block} is not a power of two from {WIDE.value} to {_LONGEST_TILE}"
    if config.programs < 1:
        return f"programs {config.programs}: at least one must do the work"
    if config.num_warps not in (1, 2, 4, 8, 16, 32):
        return f"num_warps {config.num_warps} is not a power of two from 1 to 32"
    return gpu_limits.here().refuse_warps(config.num_warps)


def configs() -> list[Config]:
    """List what a tuner may try: every thread has 32 to 256 bytes in flight."""
    return [
        Config(block, programs, num_warps)
        for block in (4096, 8192, 16384, 32768, 65536)
        for programs in (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
        for num_warps in (4, 8, 16)
        if 32 <= block // (gpu_limits.here().warp_size * num_warps) <= 256
    ]


def config_for(nbytes: int, num_sms: int) -> Config:
    """Choose without measurements: at most a program per tile and SM, since all wait at once."""
    share = triton.next_power_of_2(triton.cdiv(max(nbytes, 1), num_sms))
    block = min(max(share, _LEAST_TILE), _LARGEST_TILE)
    tiles = triton.cdiv(max(nbytes, 1), block)
    threads = gpu_limits.here().warp_size * _PER_THREAD
    return Config(block, min(tiles, num_sms), max(block // threads, 1))


def valid(problem: Any, config: Config) -> str | None:
    return wrong_config(config)


def space(problem: Any) -> list[Config]:
    return configs()


def default(problem: Any, num_sms: int) -> Config:
    return config_for(problem.nbytes, num_sms)


def as_words(nbytes: int, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
    """View flat tensors as words; also return whether everything is a multiple of 16 bytes.

    `nbytes` is the bitwise or of all sizes and offsets that the kernel will use.
    """
    for tensor in tensors:
        nbytes |= tensor.data_ptr()
    kind = _KINDS[nbytes & 3]
    try:
        return [tensor.view(kind) for tensor in tensors], nbytes % WIDE.value == 0
    except RuntimeError:  # torch checks strides and storage offsets, not addresses
        return _odd_words(nbytes, tensors)


def _odd_words(nbytes: int, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Do as `as_words` for empty tensors, one element with a stride, storage at an odd address."""
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    for tensor in flat:
        nbytes |= int(tensor.storage_offset()) * tensor.itemsize
    kind = _KINDS[nbytes & 3]
    return [tensor.view(kind) for tensor in flat], nbytes % WIDE.value == 0


def random_tensor(
    world: World, numel: int, dtype: torch.dtype, seed: int, exact: bool = True
) -> torch.Tensor:
    """Return a symmetric input, different on every rank, without NaN, which differs from itself.

    It has whole numbers if `exact`, else normally distributed ones, for timing.
    """
    if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64) and not exact:
        torch.manual_seed(seed * 1000 + world.rank)
        return world.empty((numel,), dtype, "x").normal_()
    generator = torch.Generator(world.device).manual_seed(seed * 1000 + world.rank)
    values = torch.randint(-99, 99, (numel,), generator=generator, device=world.device)
    return world.empty((numel,), dtype, "x").copy_(values.to(dtype))


@triton.jit
def copy(
    dsts, src, n, part, parts, COUNT: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store this program's part of n words from `src` to each of COUNT `dsts`.

    `dsts` is a tuple of pointers that are equal modulo 16. A tile has BLOCK bytes. ALIGNED: all
    pointers, and n words, are multiples of 16 bytes. Orders nothing.
    """
    nbytes: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    if ALIGNED:
        _copy_aligned(dsts, src, n, part, parts, COUNT, BLOCK)
    else:
        head, skew, count = chunks.span(dsts[0], src, n)
        if part == parts - 1:
            _copy_ends(dsts, src, n, head, count, COUNT, WIDE // nbytes)
        # Each chunk is two loads. With several destinations half as many fit into the registers;
        # with one the whole tile does (all-to-all of 12,223,399 bfloat16: 992 us, half 1,212).
        PARTS: tl.constexpr = 2 if COUNT > 1 and BLOCK > WIDE else 1
        TILE: tl.constexpr = BLOCK // WIDE // PARTS
        for start in range(part.to(tl.int64) * TILE, count, parts * TILE):
            chunk = start + tl.arange(0, TILE)
            tile = chunks.load(src + head, skew, chunk, chunk < count)
            for i in tl.static_range(COUNT):
                chunks.store(dsts[i] + head, tile, chunk, chunk < count)


@triton.jit
def _copy_aligned(dsts, src, n, part, parts, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    nbytes: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    PER: tl.constexpr = WIDE // nbytes
    TILE: tl.constexpr = BLOCK // nbytes
    body = n // PER * PER  # the same, with a divisor that the compiler knows
    for start in range(part.to(tl.int64) * TILE, body, parts * TILE):
        at = start + tl.arange(0, TILE)
        tile = tl.load(tl.multiple_of(src + at, WIDE), mask=at < body)
        for i in tl.static_range(COUNT):
            # On the tile, not on its base: a hint on a function's argument is lost.
            tl.store(tl.multiple_of(dsts[i] + at, WIDE), tile, mask=at < body)


@triton.jit
def _copy_ends(dsts, src, n, head, count, COUNT: tl.constexpr, PER: tl.constexpr):
    at, mask = chunks.ends(head, count, n, PER)
    tile = tl.load(src + at, mask=mask)
    for i in tl.static_range(COUNT):
        tl.store(dsts[i] + at, tile, mask=mask)


@dataclass(frozen=True)
class Span:
    """What one rank sends to one peer and gets from it, in bytes."""

    start: int  # in x
    place: int  # in the peer's out
    nbytes: int
    received: int


def wrong_programs(config: Config, size: int) -> str | None:
    if config.programs > size and config.programs % size:
        return f"programs {config.programs} do not divide among {size} peers"
    return wrong_config(config)


def default_config(nbytes: int, size: int, num_sms: int) -> Config:
    """Choose for `nbytes` to each peer: several programs per peer, or several peers per program."""
    each = config_for(nbytes, max(num_sms // size, 1))
    return dataclasses.replace(each, programs=min(each.programs * size, num_sms))


def valid_spans(problem: Any, config: Config) -> str | None:
    return wrong_programs(config, problem.size)


def space_spans(problem: Any) -> list[Config]:
    return [config for config in configs() if valid_spans(problem, config) is None]


def default_spans(problem: Any, num_sms: int) -> Config:
    return default_config(problem.nbytes, problem.size, num_sms)


@triton.jit(do_not_specialize=["parts"])
def _spans_kernel(
    x, out, table, ready, arrived, epochs, ctx, parts,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Serve one peer at a time, a different one on every rank. Where nothing is sent, nobody waits.
    `table` has a Span per peer. `parts` programs share what goes to a peer; their number follows
    the size, so it is not a constant: a serving loop would never stop compiling.
    """
    nbytes: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    rank = tl.load(ctx + context.RANK)
    part = tl.program_id(0) % parts
    for step in range(tl.program_id(0) // parts, SIZE, tl.num_programs(0) // parts):
        flag = step * parts + part
        epoch = tl.load(epochs + flag) + 1
        peer = (rank + step) % SIZE  # I write there, with this flag
        writer = (rank + SIZE - step) % SIZE  # and this one here, with the same
        num_sent = tl.load(table + peer * _ROW + 2) // nbytes
        num_received = tl.load(table + writer * _ROW + 3)
        if num_received > 0:
            # This rank's output is free: what read it last came before this kernel on the stream.
            signal.signal(ready + flag, writer, epoch, ctx, TRACE)
        if num_sent > 0:
            # The peer's output is free.
            signal.wait(ready + flag, peer, epoch, ctx, TRACE)
            src = x + tl.load(table + peer * _ROW) // nbytes
            dst = memory.translate(out + tl.load(table + peer * _ROW + 1) // nbytes, peer, ctx)
            trace.begin(trace.FETCH, step, 0, peer, ctx, TRACE)
            copy((dst,), src, num_sent, part, parts, 1, BLOCK, ALIGNED)
            trace.end(trace.FETCH, step, 0, peer, ctx, TRACE)
            # My words before the flag.
            signal.signal(arrived + flag, peer, epoch, ctx, TRACE)
        if num_received > 0:
            # The writer's words before whatever follows this kernel here.
            signal.wait(arrived + flag, writer, epoch, ctx, TRACE)
        tl.store(epochs + flag, epoch)  # read by the next call on the stream


def plan_spans(world: World, op: str, problem: Any, config: Config, spans: Sequence[Span]) -> Plan:
    """Allocate flags. The plan takes any x, read here only, and a symmetric out."""
    size = world.size
    parts = max(config.programs // size, 1)
    flags = [world.signals(size * parts, f"{op}.{name}") for name in ("ready", "arrived", "epochs")]
    rows = [dataclasses.astuple(span) for span in spans]
    table = torch.tensor(rows, dtype=torch.int64, device=world.device)
    unit = 0
    for row in rows:
        for number in row:
            unit |= number
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if unit:
            (source, target), aligned = as_words(unit, x, out)
            _spans_kernel[(config.programs,)](
                source, target, table, *flags, world.ctx, parts,
                SIZE=size, BLOCK=config.block, ALIGNED=aligned,
                TRACE=world.kernel_mode, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)


@triton.jit(do_not_specialize=["n", "start"])
def _pull_kernel(
    x, out, ready, done, epochs, ctx, n, start,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Load n words from each peer, whose x has them from word `start` on."""
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    # My tensor was written before this kernel on the stream; the peers read it after this.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    for step in tl.static_range(SIZE):
        peer = (rank + step) % SIZE
        src = memory.translate(x + start, peer, ctx)
        trace.begin(trace.FETCH, program, 0, peer, ctx, TRACE)
        copy((out + peer * n,), src, n, program, tl.num_programs(0), 1, BLOCK, ALIGNED)
        trace.end(trace.FETCH, program, 0, peer, ctx, TRACE)
    # My loads before the flags: whatever follows this kernel on a peer may overwrite its tensor.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan_pull(world: World, op: str, problem: Any, config: Config, parts: int) -> Plan:
    """Allocate flags. The plan takes a symmetric x, and any contiguous out.

    x has `parts` parts. Each rank gets one of them, or all get the only one.
    """
    flags = barrier_flags(world, op, config.programs, "ready", "done")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not problem.numel:
            return out
        if world.passive:
            from ..ops.passive import stand_in  # only over a link

            stand_in(world, *flags)
            return out
        (source, target), aligned = as_words(problem.nbytes, x, out)
        n = source.numel() // parts
        _pull_kernel[(config.programs,)](
            source, target, *flags, world.ctx, n, world.rank % parts * n,
            SIZE=problem.size, BLOCK=config.block, ALIGNED=aligned,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
