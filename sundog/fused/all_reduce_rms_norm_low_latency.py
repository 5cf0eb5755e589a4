"""All-reduce and RMSNorm, low latency: two shots in which every word carries its own flag.

As all_reduce.low_latency: a word of 64 bits holds up to 4 bytes of data and the epoch, so a reader
that sees the epoch has the data. A row is as many parts as there are ranks, and a rank owns one of
them. Every rank sends the owner its part; the owner adds them, and the residual, and sends the sum
to all, who normalise the row. One program does that for a row. In one shot it would have to send
and read the rows of all ranks, and its SM takes longer for those than a second message does.
Nobody touches a peer's tensors: they may lie anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .. import gpu_limits
from ..collectives import _reduce, _words
from ..device import context, signal, trace
from ..ops.op import Plan, agree
from . import _rms_norm
from . import all_reduce_rms_norm as norm
from .all_reduce_rms_norm import (
    OP,
    Problem,
    cases,
    cost,
    inputs,
    planned,
    programs_of,
    reference,
)

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
LARGEST = 256 << 10  # bytes of x: every one crosses as two, twice
_WARPS = 8  # at most: a thread may then hold all 255 registers
_WORDS = 32  # that a thread holds of a row: 64 registers, and as many while it polls


@dataclass(frozen=True)
class Config(norm.Config):
    poll: str = "load"  # or "atomic": see _words.POLLS


def valid(problem: Problem, config: Config) -> str | None:
    nbytes = problem.tokens * problem.hidden * problem.dtype.itemsize
    if nbytes > LARGEST:
        return f"low_latency of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    words = problem.size * _block(problem) // _per(problem)
    if words > 32 * _WARPS * _WORDS:
        return f"low_latency of rows of {problem.hidden} elements: too many words; use one_shot"
    if config.poll not in _words.POLLS:
        return f"poll {config.poll!r}: expected one of {', '.join(_words.POLLS)}"
    return norm.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    return [Config(programs, poll) for programs in _rms_norm.PROGRAMS for poll in _words.POLLS]


def default(problem: Problem, num_sms: int) -> Config:
    return Config(norm.default(problem, num_sms).programs)


def _block(problem: Problem) -> int:
    """Count a part's elements: the owner's, a power of two. The last ranks may own nothing."""
    share = triton.next_power_of_2(triton.cdiv(problem.hidden, problem.size))
    return int(max(share, _rms_norm.GROUP.value))


def _per(problem: Problem) -> int:
    """Count the elements in a word."""
    return 2 if problem.dtype.itemsize == 2 else 1


@triton.jit
def _low_latency_kernel(
    x, given, out, boxes, epochs, ctx, tokens, cfg, PER: tl.constexpr, POLL: tl.constexpr
):
    """`boxes`: for every rank, what it sends me of my part; then for every owner, its sum.

    One set of boxes serves all calls. An owner reads my words before it sends me its sum, and I
    wait for that before I send again; it sends the next sum after it has my next words, which I
    send when I have read the last one.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    # These loads wait for memory together: none needs what another one brings.
    epoch = tl.load(epochs + program) + 1
    rank = tl.load(ctx + context.RANK)
    theirs = ()
    for peer in tl.static_range(cfg.size):
        theirs = theirs + (signal.translate(boxes, peer, ctx),)  # type: ignore[assignment]
    row = _rms_norm.fetch_row(x, program, tokens, cfg)
    trace.begin(trace.SIGNAL, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    for token in range(program, tokens, programs):
        _send_parts(row, theirs, rank, token, tokens, epoch, cfg, PER)
        row = _rms_norm.fetch_row(x, token + programs, tokens, cfg)
    trace.begin(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    for token in range(program, tokens, programs):
        added = _add_part(given, boxes, rank, token, tokens, epoch, ctx, cfg, PER, POLL)
        _send_sum(added, theirs, rank, token, tokens, epoch, cfg, PER)
    for token in range(program, tokens, programs):
        words = _receive_row(boxes, token, tokens, epoch, ctx, cfg, PER, POLL)
        row = _unpack(words, x.dtype.element_ty, cfg, PER)
        _rms_norm.finish_row(row, token, _rms_norm.here(out), given, cfg, 1)
    trace.end(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _send_parts(row, theirs, rank, token, tokens, epoch, cfg, PER: tl.constexpr):
    """Store each part of a row of x into its owner's box for this rank."""
    for owner in tl.static_range(len(row)):
        place = _box(theirs[owner], rank, token, tokens, cfg, PER)
        inside = _inside(owner, cfg, PER)
        # Relaxed: data and epoch are one word, and nothing else is published by it.
        signal.set_words(place, _pack(row[owner], epoch, cfg, PER), inside, cfg.trace)


@triton.jit
def _add_part(
    given, boxes, rank, token, tokens, epoch, ctx, cfg, PER: tl.constexpr, POLL: tl.constexpr
):
    """Add my part of a row from all ranks, once it is there, plus bias, plus residual."""
    column = rank * cfg.block + tl.arange(0, cfg.block)
    at = token.to(tl.int64) * cfg.hidden + column
    residual = tl.load(given.residual + at, mask=column < cfg.hidden, other=0.0)
    words = ()
    for _ in tl.static_range(cfg.size):
        words = words + (_awaited(_inside(rank, cfg, PER), epoch),)  # type: ignore[assignment]
    first, stride = _box(boxes, 0, token, tokens, cfg, PER), tokens * (cfg.block // PER)
    words = _words.wait_words(words, first, stride, epoch, ctx, cfg.size, POLL)
    total = _sum(words, residual.dtype, cfg.size, PER)
    return _rms_norm.add(total, residual, given.bias, rank * cfg.block, cfg)


@triton.jit
def _send_sum(added, theirs, rank, token, tokens, epoch, cfg, PER: tl.constexpr):
    """Store my part of the new residual into all ranks' boxes for my sums."""
    word = _pack(added, epoch, cfg, PER)
    for peer in tl.static_range(cfg.size):
        place = _box(theirs[peer], cfg.size + rank, token, tokens, cfg, PER)
        # Relaxed, as above.
        signal.set_words(place, word, _inside(rank, cfg, PER), cfg.trace)


@triton.jit
def _receive_row(boxes, token, tokens, epoch, ctx, cfg, PER: tl.constexpr, POLL: tl.constexpr):
    """Wait for the words of a row of the new residual, which the owners send."""
    OWNERS: tl.constexpr = cfg.padded // cfg.block
    words = ()
    for owner in tl.static_range(OWNERS):
        words = words + (_awaited(_inside(owner, cfg, PER), epoch),)  # type: ignore[assignment]
    first, stride = _box(boxes, cfg.size, token, tokens, cfg, PER), tokens * (cfg.block // PER)
    return _words.wait_words(words, first, stride, epoch, ctx, OWNERS, POLL)


@triton.jit
def _unpack(words, DTYPE: tl.constexpr, cfg, PER: tl.constexpr):
    """Return the parts of a row that the words hold."""
    parts = ()
    for owner in tl.static_range(cfg.padded // cfg.block):
        part = _words.element(words[owner], 0, DTYPE)
        if PER == 2:
            part = tl.interleave(part, _words.element(words[owner], 1, DTYPE))
        parts = parts + (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def _box(boxes, sender, token, tokens, cfg, PER: tl.constexpr):
    """Return where a sender's words of one part of a row are."""
    WORDS: tl.constexpr = cfg.block // PER
    return boxes + (sender * tokens + token) * WORDS + tl.arange(0, WORDS)


@triton.jit
def _inside(owner, cfg, PER: tl.constexpr):
    """Return which words of an owner's part have data."""
    return owner * cfg.block + PER * tl.arange(0, cfg.block // PER) < cfg.hidden


@triton.jit
def _awaited(inside, epoch):
    """Return words of which those inside are yet to come."""
    return (epoch - inside.to(tl.int64)) << _words.BITS


@triton.jit
def _pack(part, epoch, cfg, PER: tl.constexpr):
    """Pack a part of a row as words of PER neighbours."""
    bits = _words.bits(part)
    if PER == 2:
        low, high = tl.split(tl.reshape(bits, (cfg.block // 2, 2)))
        bits = low | high << 16
    return (epoch << _words.BITS) | bits


@triton.jit
def _sum(words, DTYPE: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr):
    """Add the elements of the words over the ranks in their order."""
    total = _sum_part(words, 0, DTYPE, SIZE)
    if PER == 2:
        total = tl.interleave(total, _sum_part(words, 1, DTYPE, SIZE))
    return total


@triton.jit
def _sum_part(words, part: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Add one element of each word."""
    total = _reduce.widen(_words.element(words[0], part, DTYPE))
    for peer in tl.static_range(1, SIZE):
        total = _reduce.combine(
            total, _reduce.widen(_words.element(words[peer], part, DTYPE)), "sum"
        )
    return total.to(DTYPE)


def _mode(asked: int, by_stores: bool) -> int:
    """Return the form of signals for a launch: stores in any case, if `by_stores`."""
    return asked + signal.STORE.value if by_stores and asked < signal.STORE.value else asked


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate boxes. The plan takes any contiguous tensors."""
    agree(world, f"{OP}.low_latency", problem, config, valid(problem, config))
    programs = programs_of(config, problem.tokens)
    block, per = _block(problem), _per(problem)
    boxes = world.signals((2, problem.size, problem.tokens * block // per), f"{OP}.boxes")
    epochs = world.signals(programs, f"{OP}.epochs")
    world.barrier()  # everybody's boxes are empty before the first word
    num_warps = min(max(block // per // 32, 1), _WARPS)  # a word of each rank, or more, a thread
    # An SM has fewer atomics in a clock than stores. AMD's store has no mask, and was not measured.
    by_stores = not gpu_limits.here().is_amd
    return planned(
        world, problem, config, _low_latency_kernel, programs, (boxes, epochs),
        block=block, num_warps=num_warps, mode=lambda asked: _mode(asked, by_stores),
        PER=per, POLL=config.poll,
    )  # fmt: skip
