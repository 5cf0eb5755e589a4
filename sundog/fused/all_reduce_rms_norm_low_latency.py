"""All-reduce and RMSNorm, low latency: one shot in which every word carries its own flag.

As all_reduce.low_latency: a word of 64 bits holds up to 4 bytes of data and the epoch, so a reader
that sees the epoch has the data. A program sends all its rows, then waits for each and normalises
it. Every byte crosses as two: for a few rows only. Nobody touches a peer's tensors: they may lie
anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..collectives import _reduce, _words
from ..device import context, signal, trace
from ..ops.op import Plan, agree
from . import _rms_norm
from . import all_reduce_rms_norm as norm
from .all_reduce_rms_norm import (
    OP,
    Config,
    Problem,
    cases,
    cost,
    default,
    gaps,
    inputs,
    reference,
    space,
    split,
)

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ()
LARGEST = 128 << 10  # bytes of x: every one crosses as two, to all ranks
_WARPS = 8  # at most: a thread may then hold all 255 registers
_WORDS = 32  # that a thread holds, of all ranks: 64 registers, and as many while it polls


def valid(problem: Problem, config: Config) -> str | None:
    nbytes = problem.tokens * problem.hidden * problem.dtype.itemsize
    if nbytes > LARGEST:
        return f"low_latency of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    return norm.valid(problem, config)


@triton.jit
def _low_latency_kernel(
    x, given, out, boxes, epochs, ctx, tokens, stride, cfg, PER: tl.constexpr, CHUNK: tl.constexpr
):
    """`boxes`: of two epochs, for every rank, `stride` words. PER: elements in a word.

    CHUNK: elements of a row that are waited for at once.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program) + 1
    # Nobody looks at these boxes any more: the last but one call's, whose words every peer's
    # program with this number had seen before it sent those of the last call, which I have seen.
    half = boxes + (epoch % 2) * cfg.size * stride
    trace.begin(trace.SIGNAL, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    for number in range(program, tokens, programs):
        token = tl.minimum(number, tokens - 1)  # always `number`: see two_shot
        for start in tl.static_range(0, cfg.padded, CHUNK):
            box = half + (token * cfg.padded + start) // PER
            _send(x, box, token, start, stride, epoch, ctx, cfg, PER, CHUNK)
    trace.begin(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    for number in range(program, tokens, programs):
        token = tl.minimum(number, tokens - 1)
        totals, starts = (), ()
        for start in tl.static_range(0, cfg.padded, CHUNK):
            box = half + (token * cfg.padded + start) // PER
            words = _receive(x, box, token, start, stride, epoch, ctx, cfg, PER, CHUNK)
            totals = totals + (_sum(words, x.dtype.element_ty, cfg.size, PER),)  # type: ignore[assignment]
            starts = starts + (start,)  # type: ignore[assignment]
        _rms_norm.finish_row(totals, starts, token, _rms_norm.here(out), given, cfg, 1)
    trace.end(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _chunk_of(x, token, start, epoch, cfg, PER: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk of a row as words of PER neighbours, and which of them have data."""
    column = start + tl.arange(0, CHUNK)
    row = x + token.to(tl.int64) * cfg.hidden
    bits = _words.bits(tl.load(row + column, mask=column < cfg.hidden, other=0))
    if PER == 2:
        low, high = tl.split(tl.reshape(bits, (CHUNK // 2, 2)))
        bits = low | high << 16
    return (epoch << _words.BITS) | bits, start + PER * tl.arange(0, CHUNK // PER) < cfg.hidden


@triton.jit
def _send(
    x, box, token, start, stride, epoch, ctx, cfg, PER: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Store a chunk's words into every peer's box for this rank."""
    rank = tl.load(ctx + context.RANK)
    word, inside = _chunk_of(x, token, start, epoch, cfg, PER, CHUNK)
    for peer in tl.static_range(cfg.size):
        # Relaxed: data and epoch are one word, and nothing else is published by it.
        place = signal.translate(box, peer, ctx) + rank * stride + tl.arange(0, CHUNK // PER)
        signal.set_words(place, word, inside & (peer != rank), cfg.trace)


@triton.jit
def _receive(
    x, box, token, start, stride, epoch, ctx, cfg, PER: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Every rank's words of a chunk, once all are there; mine need no box."""
    rank = tl.load(ctx + context.RANK)
    word, inside = _chunk_of(x, token, start, epoch, cfg, PER, CHUNK)
    words = ()
    for peer in tl.static_range(cfg.size):
        is_awaited = inside & (peer != rank)
        words = words + (tl.where(is_awaited, (epoch - 1) << _words.BITS, word),)  # type: ignore[assignment]
    return _words.wait_words(words, box + tl.arange(0, CHUNK // PER), stride, epoch, ctx, cfg.size)


@triton.jit
def _sum(words, DTYPE: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr):
    """The elements of the words, added over the ranks in their order."""
    total = _sum_part(words, 0, DTYPE, SIZE)
    if PER == 2:
        total = tl.interleave(total, _sum_part(words, 1, DTYPE, SIZE))
    return total


@triton.jit
def _sum_part(words, part: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """One element of each word."""
    total = _reduce.widen(_words.element(words[0], part, DTYPE))
    for peer in tl.static_range(1, SIZE):
        total = _reduce.combine(
            total, _reduce.widen(_words.element(words[peer], part, DTYPE)), "sum"
        )
    return total.to(DTYPE)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate boxes for two epochs. The plan takes any contiguous tensors."""
    agree(world, f"{OP}.low_latency", problem, config, valid(problem, config))
    block = _rms_norm.block_of(problem.hidden)
    num_warps = min(_rms_norm.warps_of(problem.hidden), _WARPS)
    per = 2 if problem.dtype.itemsize == 2 else 1
    stride = problem.tokens * _rms_norm.padded_of(problem.hidden) // per
    boxes = world.signals((2, problem.size, stride), f"{OP}.boxes")
    epochs = world.signals(config.programs, f"{OP}.epochs")
    world.barrier()  # everybody's boxes are empty before the first word
    words = max(_WORDS // triton.next_power_of_2(problem.size), 1)  # of each rank
    chunk = _chunk(block, num_warps, words * per)
    between = gaps(problem)

    def launch(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *alike, out = rest
        constants = _rms_norm.constants(problem, world.kernel_mode)
        for gap in between:
            out[gap].zero_()
        _low_latency_kernel[(config.programs,)](
            x, _rms_norm.given(problem, tuple(alike)), split(problem, out), boxes, epochs,
            world.ctx, problem.tokens, stride, constants, PER=per, CHUNK=chunk, num_warps=num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (boxes, epochs), launch)


def _chunk(block: int, num_warps: int, elements: int) -> int:
    """Elements of a chunk, `elements` a thread: its words of all ranks stay in its registers."""
    return int(min(block, max(32 * num_warps * elements, 2 * _rms_norm.GROUP.value)))
