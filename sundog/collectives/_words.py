"""Words that carry their own flag: 32 bits of data below 32 bits of the epoch.

A word arrives whole, so a reader that sees the epoch has the data: no fence and no barrier. The
low_latency algorithms send and await them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import chunks, signal

BITS = tl.constexpr(32)  # of data in a word, below the epoch
# How a reader polls a word: by an atomic that adds 0, which the cache serves one at a time, or by a
# volatile load, which is a relaxed access too and may bring several words at once.
POLLS = ("atomic", "load")
_ATOMIC = tl.constexpr(POLLS[0])
element = chunks.element  # one of the elements in a word's data


@triton.jit
def load_word(x, at, numel, STEP: tl.constexpr, PER: tl.constexpr):
    """Load elements `at`, and if they have 16 bits also those STEP further, as 32 bits of data."""
    word = bits(tl.load(x + at, mask=at < numel, other=0))
    if PER == 2:
        second = tl.load(x + at + STEP, mask=at + STEP < numel, other=0)
        word |= bits(second) << 16
    return word


@triton.jit
def bits(element):
    """Return the bits of elements of at most 4 bytes, as integers of 8 bytes."""
    return chunks.word_of(element, 0).to(tl.int64)


@triton.jit
def wait_words(
    words, boxes, stride, epoch, ctx, SIZE: tl.constexpr,
    POLL: tl.constexpr = _ATOMIC, LANES: tl.constexpr = 1,
):  # fmt: skip
    """Return every rank's words, once none is of an earlier epoch. Bounded like `signal.wait`.

    There is a tile for each of SIZE ranks, then tiles of which each rank in turn owes LANES lanes.
    """
    limit = tl.cast(signal._LOOK_EVERY, tl.int64)
    polls = limit * 0
    words, late = _look(words, boxes, stride, epoch, POLL)
    while (late > 0) & (polls < limit):
        polls += 1
        if polls % signal._LOOK_EVERY == 0:
            limit = signal._polls_allowed(ctx)
        words, late = _look(words, boxes, stride, epoch, POLL)
    if late > 0:
        _run_out(boxes, stride, words, epoch, ctx, SIZE, LANES)
    return words


@triton.jit
def _look(words, boxes, stride, epoch, POLL: tl.constexpr):
    """Load the missing words again, all at once. Return also whether some are still missing."""
    found = ()
    for n in tl.static_range(len(words)):
        missing = _is_late(words[n], epoch)
        place = boxes + n * stride
        # Relaxed suffices: the word that has the epoch has the data.
        if POLL == "load":
            seen = tl.load(place, mask=missing, other=0, volatile=True)
        else:
            seen = tl.atomic_add(place, words[n] * 0, mask=missing, sem="relaxed", scope="sys")
        found = found + (tl.where(missing, seen, words[n]),)  # type: ignore[assignment]
    late = _is_late(found[0], epoch)  # type: ignore[misc]
    for n in tl.static_range(1, len(words)):
        late |= _is_late(found[n], epoch)
    return found, tl.max(late.to(tl.int32), 0)


@triton.jit
def _is_late(word, epoch):
    """Return whether a word is of an earlier epoch, by the signed difference of 32 bits."""
    return (word >> BITS).to(tl.int32) - epoch.to(tl.int32) < 0


@triton.jit
def _run_out(boxes, stride, words, epoch, ctx, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Leave a record of the last rank that is late, and of a word that it owes."""
    WIDTH: tl.constexpr = words[0].shape[0]
    late = tl.full((WIDTH,), 0, tl.int32)
    place, seen = boxes.to(tl.int64), words[0] * 0
    for n in tl.static_range(len(words)):
        peer = n if n < SIZE else (n - SIZE) * (WIDTH // LANES) + tl.arange(0, WIDTH) // LANES
        is_late = _is_late(words[n], epoch)
        late = tl.where(is_late, peer, late)
        place = tl.where(is_late, (boxes + n * stride).to(tl.int64), place)
        seen = tl.where(is_late, words[n] >> BITS, seen)
    last = tl.max(late, 0)
    flag = tl.max(tl.where(late == last, place, 0), 0).to(tl.pointer_type(tl.int64))
    signal._run_out(
        flag, last, epoch, tl.max(tl.where(place == flag.to(tl.int64), seen, 0), 0), ctx
    )
