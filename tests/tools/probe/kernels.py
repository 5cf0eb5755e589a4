"""Kernels of the ops that the probe's tests capture: right ones, which wrong hosts misuse."""

from __future__ import annotations

import triton
import triton.language as tl

from sundog.device import context, memory, signal

__all__ = [
    "BLOCK", "N", "await_word", "copy", "scale", "shift", "shift_from_host", "shift_in_haste",
    "shift_no_done", "tally",
]  # fmt: skip

N = 37
BLOCK = tl.constexpr(64)


@triton.jit
def _neighbours(ctx):
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    return (rank + 1) % size, (rank + size - 1) % size


@triton.jit
def _send(x, inbox, ready, to, epoch, ctx, n):
    at = tl.arange(0, BLOCK)
    # orders the tile before the flag; the next rank waits for it
    memory.store(inbox + at, tl.load(x + at, mask=at < n), to, ctx, mask=at < n)
    signal.signal(ready, to, epoch, ctx)


@triton.jit
def _receive(inbox, out, n):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


@triton.jit
def shift(x, inbox, out, ready, done, epochs, ctx, n):
    """Every rank gets the tensor of the one before it. The epoch is the device's own: right."""
    epoch = tl.load(epochs) + 1
    to, source = _neighbours(ctx)
    signal.wait(done, to, epoch - 1, ctx)  # it has read what I sent last: its inbox is free
    _send(x, inbox, ready, to, epoch, ctx, n)
    signal.wait(ready, source, epoch, ctx)  # its tile, before I read it
    _receive(inbox, out, n)
    signal.signal(done, source, epoch, ctx)  # my reading, before it sends again
    tl.store(epochs, epoch)


@triton.jit
def shift_from_host(x, inbox, out, ready, done, epoch, ctx, n):
    """The same with an epoch that the host counts: right without a graph."""
    to, source = _neighbours(ctx)
    signal.wait(done, to, epoch - 1, ctx)
    _send(x, inbox, ready, to, epoch, ctx, n)
    signal.wait(ready, source, epoch, ctx)
    _receive(inbox, out, n)
    signal.signal(done, source, epoch, ctx)


@triton.jit
def shift_no_done(x, inbox, out, ready, epochs, ctx, n):
    """Nobody tells the sender that its tile was read: right if a barrier follows every call."""
    epoch = tl.load(epochs) + 1
    to, source = _neighbours(ctx)
    _send(x, inbox, ready, to, epoch, ctx, n)
    signal.wait(ready, source, epoch, ctx)
    _receive(inbox, out, n)
    tl.store(epochs, epoch)


@triton.jit
def shift_in_haste(x, inbox, out, ready, done, epochs, ctx, n, POLLS: tl.constexpr):
    """As `shift`, but it only looks at the flag for some time, and then goes on."""
    epoch = tl.load(epochs) + 1
    to, source = _neighbours(ctx)
    signal.wait(done, to, epoch - 1, ctx)
    _send(x, inbox, ready, to, epoch, ctx, n)
    for _ in range(POLLS):
        tl.atomic_add(ready, 0, sem="acquire", scope="sys")
    _receive(inbox, out, n)
    signal.signal(done, source, epoch, ctx)
    tl.store(epochs, epoch)


@triton.jit
def copy(x, out, n):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def scale(x, out, table, epochs, n):
    """out = x * table[call % 8]: of this rank alone."""
    epoch = tl.load(epochs) + 1
    at = tl.arange(0, BLOCK)
    factor = tl.load(table + epoch % 8)
    tl.store(out + at, factor * tl.load(x + at, mask=at < n), mask=at < n)
    tl.store(epochs, epoch)


@triton.jit
def await_word(word, epochs, ctx):
    """Wait until somebody has set the word to the number of this call."""
    epoch = tl.load(epochs) + 1
    signal.wait(word, tl.load(ctx + context.RANK), epoch, ctx)
    tl.store(epochs, epoch)


@triton.jit
def tally(count, expected, ctx):
    """Count this call (downwards), then wait until no more were counted than the host expects."""
    tl.atomic_add(count, tl.full((), -1, tl.int64), sem="relaxed", scope="gpu")
    signal.wait(count, tl.load(ctx + context.RANK), -expected, ctx)
