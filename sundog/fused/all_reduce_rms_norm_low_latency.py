"""All-reduce and RMSNorm, low latency: two shots in which every word carries its own flag.

As in all_reduce.low_latency, a word of 64 bits holds up to 4 bytes of data and the epoch, so a
reader that sees the epoch has the data. A row is divided into as many parts as there are ranks, and
each rank owns one. Every rank sends each owner its part. The owner adds them and the residual, and
sends the sum to all ranks, with its measures: the level and the sum of squares of each group. A
program need not know more of the rest of a row, so several programs may share one, each with a
piece of every part: one SM would take longer to send and read the words of a whole row than a
message takes. No rank touches a peer's tensors, which may be anywhere.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .. import gpu_limits
from ..collectives import _reduce, _words
from ..device import context, signal, trace
from ..ops.op import Plan, agree
from . import _rms_norm
from . import all_reduce_rms_norm as norm
from ._call import resident
from .all_reduce_rms_norm import OP, Problem, cases, cost, inputs, planned, programs_of, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
LARGEST = 256 << 10  # bytes of x: each crosses as two bytes, twice
_WARPS = 8  # at most: a thread may then hold all 255 registers
_WORDS = 32  # of a row and its measures in a thread: 64 registers, and as many again while it polls
_PIECES = (1, 2, 4, 8)
_LEVEL = tl.constexpr(20)  # bit where a measure's level begins, above half of a sum
_HALF_BITS = tl.constexpr((1 << 20) - 1)


@dataclass(frozen=True)
class Config(norm.Config):
    """`programs` is that of the other algorithms, for each piece of a row."""

    poll: str = "load"  # or "atomic": see _words.POLLS
    pieces: int = 1  # of a rank's part of a row, each for its own program


def valid(problem: Problem, config: Config) -> str | None:
    nbytes, part = problem.tokens * problem.hidden * problem.dtype.itemsize, _part(problem)
    if nbytes > LARGEST:
        return f"low_latency of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    if config.poll not in _words.POLLS:
        return f"poll {config.poll!r}: expected one of {', '.join(_words.POLLS)}"
    if config.pieces not in _PIECES or config.pieces * _rms_norm.GROUP.value > part:
        return f"pieces {config.pieces}: 1, 2, 4 or 8, each of 128 or more of {part} columns"
    if config.pieces > 1 and problem.quant == "token" and not problem.is_static:
        return f"pieces {config.pieces}: the scale of a token is that of its whole row; use 1"
    if _held(problem, config.pieces) > _WORDS:
        more = (replace(config, pieces=n) for n in _PIECES if n > config.pieces)
        fits = any(valid(problem, each) is None for each in more)
        return (
            f"low_latency of rows of {problem.hidden} elements in {config.pieces} pieces: too "
            f"many words; use {'more pieces, or ' if fits else ''}one_shot"
        )
    return norm.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    tried = itertools.product(_rms_norm.PROGRAMS, _words.POLLS, _PIECES)
    configs = (Config(*each) for each in tried)
    return [config for config in configs if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    """Choose as many pieces as there are SMs for them."""
    programs = norm.default(problem, num_sms).programs
    configs = [Config(programs, pieces=pieces) for pieces in _PIECES]
    fit = [each for each in configs if valid(problem, each) is None] or configs[:1]
    rows = programs_of(fit[0], problem.tokens)
    return max((each for each in fit if rows * each.pieces <= num_sms), default=fit[0], key=_pieces)


def _pieces(config: Config) -> int:
    return config.pieces


def _part(problem: Problem) -> int:
    """Count the elements of an owner's part, a power of two. The last ranks may own nothing."""
    share = triton.next_power_of_2(triton.cdiv(problem.hidden, problem.size))
    return int(max(share, _rms_norm.GROUP.value))


def _per(problem: Problem) -> int:
    """Count the elements in a word."""
    return 2 if problem.dtype.itemsize == 2 else 1


def _warps(problem: Problem, pieces: int) -> int:
    """Give a thread at least two words of each rank: a single warp needs no barriers."""
    return int(min(max(_part(problem) // pieces // _per(problem) // 64, 1), _WARPS))


def _tiles(problem: Problem, pieces: int) -> int:
    """Count the tiles that hold the measures of a row; a tile has as many words as a piece."""
    words = _part(problem) // pieces // _per(problem)
    lanes = 2 * _part(problem) // _rms_norm.GROUP.value
    return int(triton.cdiv(triton.cdiv(problem.hidden, _part(problem)), words // lanes))


def _held(problem: Problem, pieces: int) -> int:
    """Count the words that a thread holds: a piece of every owner, and the measures."""
    words = _part(problem) // pieces // _per(problem)
    return (problem.size + _tiles(problem, pieces)) * words // (32 * _warps(problem, pieces))


@triton.jit
def _low_latency_kernel(
    x, given, out, boxes, epochs, ctx, tokens, cfg,
    PIECES: tl.constexpr, TILES: tl.constexpr, PER: tl.constexpr, POLL: tl.constexpr,
):  # fmt: skip
    """Reduce and normalise. The measures of a row take TILES tiles.

    `boxes` hold every rank's words of my part, every owner's sum, and every owner's measures.

    One set of boxes serves all calls. An owner reads my words before it sends me its sum, and I
    wait for that sum before I send again. It sends its next sum and measures only after it has my
    next words. By then my last kernel has ended, so all its programs have read the last ones.
    """
    program, programs = tl.program_id(0), tl.num_programs(0) // PIECES
    # These loads are in flight together: none needs the result of another.
    epoch = tl.load(epochs + program) + 1
    rank = tl.load(ctx + context.RANK)
    theirs = ()
    for peer in tl.static_range(cfg.size):
        theirs = theirs + (signal.translate(boxes, peer, ctx),)  # type: ignore[assignment]
    begin, piece, count = program // PIECES, program % PIECES, tokens * PIECES
    first = piece * cfg.block
    row = _rms_norm.fetch_row(x, begin, tokens, first, cfg)
    trace.begin(trace.SIGNAL, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    for token in range(begin, tokens, programs):
        _send_parts(row, theirs, rank, first, token * PIECES + piece, count, epoch, cfg, PER)
        row = _rms_norm.fetch_row(x, token + programs, tokens, first, cfg)
    trace.begin(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    mine = rank * cfg.stride + first
    for token in range(begin, tokens, programs):
        box = boxes + (token * PIECES + piece) * (cfg.block // PER)
        added = _add_part(given, box, mine, token, count, epoch, ctx, cfg, PER, POLL)
        _send_sum(added, theirs, rank, mine, token * PIECES + piece, count, epoch, cfg, PER)
        if mine < cfg.hidden:
            _send_measures(added, theirs, rank, token, piece, count, epoch, cfg, PIECES, PER)
    for token in range(begin, tokens, programs):
        # Loaded now, so that they arrive while the words do.
        weights = _rms_norm.fetch_row(given.weight, token * 0, 1, first, cfg)
        box = boxes + (token * PIECES + piece) * (cfg.block // PER)
        words = _receive(box, first, count, epoch, ctx, cfg, PIECES, TILES, PER, POLL)
        row = _unpack(words, x.dtype.element_ty, cfg, PER)
        to = _rms_norm.here(out)
        _rms_norm.store_row(row, token, first, to[1], cfg, 1)
        level, total = _measures(words, cfg, TILES)
        _rms_norm.finish_row(row, weights, level, total, token, first, to, given, cfg, 1)
    trace.end(trace.WAIT, epochs + program, epoch, trace.ALL, ctx, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _send_parts(row, theirs, rank, first, box, count, epoch, cfg, PER: tl.constexpr):
    """Store my pieces of a row of x into their owners' boxes for this rank."""
    for owner in tl.static_range(cfg.parts):
        place = _boxes_of(theirs[owner], rank, box, count, cfg, PER)
        inside = _inside(owner * cfg.stride + first, cfg, PER)
        # Relaxed suffices: data and epoch are one word, and nothing else is published by it.
        signal.set_words(place, _pack(row[owner], epoch, cfg, PER), inside, cfg.trace)


@triton.jit
def _add_part(
    given, box, mine, token, count, epoch, ctx, cfg, PER: tl.constexpr, POLL: tl.constexpr
):
    """Add up my piece of a row from all ranks, once it is there, plus bias, plus residual."""
    column = mine + tl.arange(0, cfg.block)
    at = token.to(tl.int64) * cfg.hidden + column
    residual = tl.load(given.residual + at, mask=column < cfg.hidden, other=0.0)
    words = ()
    for _ in tl.static_range(cfg.size):
        words = words + (_awaited(_inside(mine, cfg, PER), epoch),)  # type: ignore[assignment]
    places = box + tl.arange(0, cfg.block // PER)
    words = _words.wait_words(words, places, count * (cfg.block // PER), epoch, ctx, cfg.size, POLL)
    total = _sum(words, residual.dtype, cfg.size, PER)
    return _rms_norm.add(total, residual, given.bias, column, cfg)


@triton.jit
def _send_sum(added, theirs, rank, mine, box, count, epoch, cfg, PER: tl.constexpr):
    """Store my piece of the new residual into all ranks' boxes for my sums."""
    word = _pack(added, epoch, cfg, PER)
    for peer in tl.static_range(cfg.size):
        place = _boxes_of(theirs[peer], cfg.size + rank, box, count, cfg, PER)
        # Relaxed, as above.
        signal.set_words(place, word, _inside(mine, cfg, PER), cfg.trace)


@triton.jit
def _send_measures(
    added, theirs, rank, token, piece, count, epoch, cfg, PIECES: tl.constexpr, PER: tl.constexpr
):
    """Store the measures of my piece's groups at all ranks, where all programs of a row read them.

    Each group takes two words: its level with the lower, and with the upper half of its sum of
    squares.
    """
    WORDS: tl.constexpr = cfg.block // PER
    LANES: tl.constexpr = 2 * cfg.block // _rms_norm.GROUP
    level, total = _rms_norm.measure(added, cfg)
    upper, lower = total >> _rms_norm.HALF, total & _rms_norm.LOWER
    data = (tl.interleave(level, level) << _LEVEL) | tl.interleave(lower, upper)
    data = data.to(tl.int64)
    word = tl.broadcast_to(((epoch << _words.BITS) | data)[None, :], (PIECES, LANES))
    lane = (rank * PIECES + piece) * LANES + tl.arange(0, LANES)
    readers = token * PIECES + tl.arange(0, PIECES)
    sender = cfg.size + cfg.parts + lane // WORDS
    at = (sender * count + readers[:, None]) * WORDS + lane % WORDS
    for peer in tl.static_range(cfg.size):
        # Relaxed, as above.
        signal.set_words(theirs[peer] + at, word, word == word, cfg.trace)


@triton.jit
def _receive(
    box, first, count, epoch, ctx, cfg,
    PIECES: tl.constexpr, TILES: tl.constexpr, PER: tl.constexpr, POLL: tl.constexpr,
):  # fmt: skip
    """Wait for my pieces of a row of the new residual, and for the measures of all of it."""
    WORDS: tl.constexpr = cfg.block // PER
    LANES: tl.constexpr = 2 * cfg.block // _rms_norm.GROUP  # of the measures of a piece
    words = ()
    for owner in tl.static_range(cfg.parts):
        inside = _inside(owner * cfg.stride + first, cfg, PER)
        words = words + (_awaited(inside, epoch),)  # type: ignore[assignment]
    lane = tl.arange(0, WORDS)
    for tile in tl.static_range(TILES):
        begin = (tile * WORDS + lane) // LANES * cfg.block  # of the piece that was measured
        words = words + (_awaited(begin < cfg.hidden, epoch),)  # type: ignore[assignment]
    places, stride = box + cfg.size * count * WORDS + lane, count * WORDS
    return _words.wait_words(words, places, stride, epoch, ctx, cfg.parts, POLL, PIECES * LANES)


@triton.jit
def _measures(words, cfg, TILES: tl.constexpr):
    """Return the level of a row and the sum of its squares, from the words of its measures."""
    levels, sums = (), ()
    for tile in tl.static_range(TILES):
        word = words[cfg.parts + tile].to(tl.int32)
        is_upper = tl.arange(0, word.shape[0]) % 2
        levels = levels + (word >> _LEVEL,)  # type: ignore[assignment]
        half = (word & _HALF_BITS) << (is_upper * _rms_norm.HALF)
        sums = sums + (half,)  # type: ignore[assignment]
    return _rms_norm.join(levels, sums, cfg)


@triton.jit
def _unpack(words, DTYPE: tl.constexpr, cfg, PER: tl.constexpr):
    """Return the pieces of a row that the words hold."""
    parts = ()
    for owner in tl.static_range(cfg.parts):
        part = _words.element(words[owner], 0, DTYPE)
        if PER == 2:
            part = tl.interleave(part, _words.element(words[owner], 1, DTYPE))
        parts = parts + (part,)  # type: ignore[assignment]
    return parts


@triton.jit
def _boxes_of(boxes, sender, box, count, cfg, PER: tl.constexpr):
    """Return where a sender's words of one piece of a row are."""
    WORDS: tl.constexpr = cfg.block // PER
    return boxes + (sender * count + box) * WORDS + tl.arange(0, WORDS)


@triton.jit
def _inside(start, cfg, PER: tl.constexpr):
    """Return which words of a piece that begins with column `start` have data."""
    return start + PER * tl.arange(0, cfg.block // PER) < cfg.hidden


@triton.jit
def _awaited(inside, epoch):
    """Return words of which those inside are still awaited."""
    return (epoch - inside.to(tl.int64)) << _words.BITS


@triton.jit
def _pack(part, epoch, cfg, PER: tl.constexpr):
    """Pack a piece of a row as words of PER neighbouring elements."""
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
    """Return the form of signals for a launch: always stores if `by_stores`."""
    return asked + signal.STORE.value if by_stores and asked < signal.STORE.value else asked


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate boxes. The plan takes any contiguous tensors."""
    programs, refused = programs_of(config, problem.tokens) * config.pieces, valid(problem, config)
    if config.pieces > 1:  # a row's programs wait for each other's measures
        refused = resident(refused, programs, world.num_sms)
    agree(world, f"{OP}.low_latency", problem, config, refused)
    part, per = _part(problem), _per(problem)
    boxes = world.signals((3, problem.size, problem.tokens * part // per), f"{OP}.boxes")
    epochs = world.signals(programs, f"{OP}.epochs")
    world.barrier()  # every rank's boxes are empty before the first word
    # An SM does fewer atomics per clock than stores. AMD's store has no mask, and was not measured.
    by_stores = not gpu_limits.here().is_amd
    return planned(
        world, problem, config, _low_latency_kernel, programs, (boxes, epochs),
        block=part // config.pieces, stride=part, num_warps=_warps(problem, config.pieces),
        mode=lambda asked: _mode(asked, by_stores),
        PIECES=config.pieces, TILES=_tiles(problem, config.pieces), PER=per, POLL=config.poll,
    )  # fmt: skip
