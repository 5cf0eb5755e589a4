"""Trace points: when a program fetched, waited and computed, and whom it signalled.

This file defines the record: kernels write it, `sundog trace` reads it. A program keeps its
position in a register and passes it from point to point, so a point costs four stores and no load
that anybody waits for. With TRACE = 0 nothing of it is compiled.

    point = trace.wait(0, flag, peer, epoch, ctx, TRACE)       # signal.wait, with its two points
    point = trace.begin(point, trace.FETCH, tile, 0, peer, ctx, TRACE)
    ...
    point = trace.end(point, trace.FETCH, tile, 0, peer, ctx, TRACE)
    point = trace.signal(point, done, peer, epoch, ctx, TRACE)
    trace.finish(point, ctx, TRACE)

A full buffer drops later events. `finish` stores the count of all events, so the reader knows how
many are missing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import signal as signals
from .context import TRACE_BUFFER, TRACE_EVENTS, TRACE_PROGRAMS

__all__ = [
    "ALL", "BARRIER", "COMPUTE", "EVENT_WORDS", "FETCH", "GLOBALTIMER", "KINDS", "MEMREALTIME",
    "MOST_PROGRAMS", "SIGNAL", "WAIT", "barrier_ranks", "begin", "end", "finish", "now", "signal",
    "signal_all", "wait", "wait_all",
]  # fmt: skip

# Kinds. A barrier signals all peers where it begins, and waits for all of them until it ends.
FETCH = tl.constexpr(0)  # moving data; `what` is the tile, `value` is free
WAIT = tl.constexpr(1)  # until this rank's flag `what` has reached `value`, which `peer` owes
COMPUTE = tl.constexpr(2)  # `what` is the tile
SIGNAL = tl.constexpr(3)  # the flag `what` of `peer` was set to `value`; a begin without an end
BARRIER = tl.constexpr(4)  # `what` is the first of this rank's flags
KINDS = ("fetch", "wait", "compute", "signal", "barrier")
ALL = tl.constexpr(-1)  # as a peer: every rank

# The buffer: the number of events of each of MOST_PROGRAMS programs; then a slot for each of the
# first ones. An event is time, tag, what, value; the tag is kind + 8 * is_end + 16 * (peer + 1).
MOST_PROGRAMS = tl.constexpr(4096)  # later ones are not recorded at all
EVENT_WORDS = tl.constexpr(4)

# TRACE: 0, or the clock to read. It is not `tl`; the simulator knows it (interpreter/builder.py).
GLOBALTIMER = tl.constexpr(1)  # nanoseconds, one clock for all SMs of an NVIDIA GPU
MEMREALTIME = tl.constexpr(2)  # ticks of 10 ns, the same of an AMD GPU
READ_GLOBALTIMER = tl.constexpr("mov.u64 $0, %globaltimer;")
READ_MEMREALTIME = tl.constexpr("s_memrealtime $0\n s_waitcnt lgkmcnt(0)")


@triton.jit
def begin(at, KIND: tl.constexpr, what, value, peer, ctx, TRACE: tl.constexpr):
    """Record that something begins. `what`: a flag's pointer or a number. Return the position."""
    return _record(at, KIND, what, value, peer, ctx, TRACE)


@triton.jit
def end(at, KIND: tl.constexpr, what, value, peer, ctx, TRACE: tl.constexpr):
    """Record that what `begin` recorded last, of this kind, ends."""
    return _record(at, KIND + 8, what, value, peer, ctx, TRACE)


@triton.jit
def signal(at, flag, peer, epoch, ctx, TRACE: tl.constexpr):
    """Record a point, then call signal.signal."""
    at = begin(at, SIGNAL, flag, epoch, peer, ctx, TRACE)
    signals.signal(flag, peer, epoch, ctx)
    return at


@triton.jit
def wait(at, flag, peer, epoch, ctx, TRACE: tl.constexpr):
    """Call signal.wait between two points."""
    at = begin(at, WAIT, flag, epoch, peer, ctx, TRACE)
    signals.wait(flag, peer, epoch, ctx)
    return end(at, WAIT, flag, epoch, peer, ctx, TRACE)


@triton.jit
def signal_all(at, flags, epoch, ctx, LANES: tl.constexpr, TRACE: tl.constexpr):
    """Record a point, then call signal.signal_all."""
    at = begin(at, SIGNAL, flags, epoch, ALL, ctx, TRACE)
    signals.signal_all(flags, epoch, ctx, LANES)
    return at


@triton.jit
def wait_all(at, flags, epoch, ctx, LANES: tl.constexpr, TRACE: tl.constexpr):
    """Call signal.wait_all between two points."""
    at = begin(at, WAIT, flags, epoch, ALL, ctx, TRACE)
    signals.wait_all(flags, epoch, ctx, LANES)
    return end(at, WAIT, flags, epoch, ALL, ctx, TRACE)


@triton.jit
def barrier_ranks(at, flags, epoch, ctx, LANES: tl.constexpr, TRACE: tl.constexpr):
    """Call signal.barrier_ranks between two points."""
    at = begin(at, BARRIER, flags, epoch, ALL, ctx, TRACE)
    signals.barrier_ranks(flags, epoch, ctx, LANES)
    return end(at, BARRIER, flags, epoch, ALL, ctx, TRACE)


@triton.jit
def finish(at, ctx, TRACE: tl.constexpr):
    """Record the number of the program's events, including those that found no room."""
    if TRACE:
        buffer, program, _ = _buffer(ctx)
        tl.store(buffer + program, at, mask=program < MOST_PROGRAMS)


@triton.jit
def _record(at, TAG: tl.constexpr, what, value, peer, ctx, TRACE: tl.constexpr):
    if TRACE:
        buffer, program, size = _buffer(ctx)
        place = buffer + MOST_PROGRAMS + program * size + at * EVENT_WORDS
        has_slot = program < tl.load(ctx + TRACE_PROGRAMS)
        room = has_slot & (at < tl.load(ctx + TRACE_EVENTS))
        tl.store(place, now(TRACE), mask=room)
        tl.store(place + 1, TAG + 16 * (peer + 1), mask=room)
        tl.store(place + 2, tl.cast(what, tl.int64), mask=room)
        tl.store(place + 3, value, mask=room)
        at += 1
    return at


@triton.jit
def _buffer(ctx):
    """Return where the buffer starts, this program's number, and the words per slot."""
    program = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    size = tl.load(ctx + TRACE_EVENTS) * EVENT_WORDS
    return ctx + tl.load(ctx + TRACE_BUFFER), program.to(tl.int64), size


@triton.jit
def now(TRACE: tl.constexpr):
    """Return the time of the clock."""
    if TRACE == GLOBALTIMER:
        time = tl.inline_asm_elementwise(READ_GLOBALTIMER, "=l", [], tl.int64, False, 1)
    else:
        time = tl.inline_asm_elementwise(READ_MEMREALTIME, "=r", [], tl.int64, False, 1)
    return time
