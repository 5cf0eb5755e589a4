"""Trace points: when a program fetched, waited and computed, and whom it signalled.

This file defines the record: kernels write it, `sundog trace` reads it. Signals, waits and barriers
record themselves if they get TRACE; `begin` and `end` record anything else. With TRACE = 0, the
default, nothing of it is compiled.

    signal.wait(ready, peer, epoch, ctx, TRACE)
    trace.begin(trace.FETCH, tile, 0, peer, ctx, TRACE)
    ...
    trace.end(trace.FETCH, tile, 0, peer, ctx, TRACE)
    signal.signal(done, peer, epoch, ctx, TRACE)

A program counts its events in the buffer. A full slot drops later events and counts them, so the
reader knows how many are missing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .context import TRACE_BUFFER, TRACE_EVENTS, TRACE_PROGRAMS

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

# The last two bits of TRACE: OFF, or the clock to read; the other bits are signal.py's. Reading a
# clock takes assembly, which the simulator knows (interpreter/builder.py).
OFF = tl.constexpr(0)
GLOBALTIMER = tl.constexpr(1)  # nanoseconds, one clock for all SMs of an NVIDIA GPU
MEMREALTIME = tl.constexpr(2)  # ticks of 10 ns, the same of an AMD GPU
CLOCKS = 3  # the bits of a clock in TRACE; kernels take it modulo 4
READ_GLOBALTIMER = tl.constexpr("mov.u64 $0, %globaltimer;")
READ_MEMREALTIME = tl.constexpr("s_memrealtime $0\n s_waitcnt lgkmcnt(0)")


@triton.jit
def begin(KIND: tl.constexpr, what, value, peer, ctx, TRACE: tl.constexpr):
    """Record that something begins. `what`: a flag's pointer or a number."""
    if TRACE % 4:
        _record(KIND, what, value, peer, ctx, TRACE)


@triton.jit
def end(KIND: tl.constexpr, what, value, peer, ctx, TRACE: tl.constexpr):
    """Record the end of what the last `begin` of this kind recorded."""
    if TRACE % 4:
        _record(KIND + 8, what, value, peer, ctx, TRACE)


@triton.jit
def _record(TAG: tl.constexpr, what, value, peer, ctx, TRACE: tl.constexpr):
    """Write an event after the program's others, and count it.

    One thread makes all of these stores, and reads the count that it wrote: no barrier is needed.
    """
    program = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    program = program.to(tl.int64)
    buffer = ctx + tl.load(ctx + TRACE_BUFFER)
    events = tl.load(ctx + TRACE_EVENTS)
    programs = tl.load(ctx + TRACE_PROGRAMS)  # 0: there is no buffer
    is_counted = (program < MOST_PROGRAMS) & (programs > 0)
    count = tl.load(buffer + program, mask=is_counted, other=0)
    place = buffer + MOST_PROGRAMS + (program * events + count) * EVENT_WORDS
    room = (program < programs) & (count < events)
    tl.store(place, now(TRACE), mask=room)
    tl.store(place + 1, TAG + 16 * (peer + 1), mask=room)
    tl.store(place + 2, tl.cast(what, tl.int64), mask=room)
    tl.store(place + 3, value, mask=room)
    tl.store(buffer + program, count + 1, mask=is_counted)


@triton.jit
def now(TRACE: tl.constexpr):
    """Return the time of the clock."""
    if TRACE % 4 == GLOBALTIMER:
        time = tl.inline_asm_elementwise(READ_GLOBALTIMER, "=l", [], tl.int64, False, 1)
    else:
        time = tl.inline_asm_elementwise(READ_MEMREALTIME, "=r", [], tl.int64, False, 1)
    return time
