"""Signals between programs: a flag is an int64 word that holds an epoch and only grows.

Epochs do not wrap: at one per nanosecond a kernel would reach the largest, 2^63 - 1, in 292 years.

A flag (from `world.signals`) is in the heap of the rank that waits for it, so polling stays local;
the signaller writes it across the link. Three patterns cover everything (docs/memory_model.md):

    produce, then signal      store tiles to the peer; signal(flag, peer, epoch, ctx)
    wait, then consume        wait(flag, peer, epoch, ctx); load the tiles
    reuse a buffer            wait for the reader's done flag before writing again

The context's POLLS word bounds every wait. A wait that expires leaves a record and sets POLLS to 0,
which ends all other waits of this rank at once. The kernel then continues; the host raises
WaitTimeout and does not use what the kernel computed.

TRACE is a constexpr that a launch sets to `world.kernel_mode`: the clock of trace points
(trace.py), plus STORE if signals are stores. A link without native atomics loses a
read-modify-write on a peer's word, but keeps a store. Every flag has one writer, so both forms do.
Without TRACE a signal is the atomic.

Gluon kernels call these functions too (through `gluon`). Only `signal_all` and `wait_all` make a
tile, which needs a layout there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import memory, trace
from .context import FLAG_DELTAS, PER_PEER, POLLS, RANK, RECORD, SIZE, TAKEN

_LOOK_EVERY = tl.constexpr(64)  # polls between two looks at POLLS: the look is a second atomic

# TRACE from STORE on: signals are stores. Before Triton 3.9 `tl` has no store with an order, so
# each vendor has its own lines; the simulator runs those of NVIDIA (interpreter/ptx.py).
STORE = tl.constexpr(4)
STORE_AMD = tl.constexpr(8)
_HAS_STORE = tl.constexpr(hasattr(tl, "atomic_store"))
# All threads run them: thread 0 stores, or each of the first threads to its own peer.
_STORE_ONE = tl.constexpr(
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "@p st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0; }"
)
_STORE_EACH = tl.constexpr(
    "{ .reg .pred p; .reg .u32 t; .reg .u64 a, d; mov.u32 t, %tid.x; add.u32 t, t, $4; "
    "setp.lt.u32 p, t, $5; mad.wide.u32 a, t, 16, $1; mov.u64 d, 0; @p ld.global.u64 d, [a]; "
    "add.u64 a, d, $2; @p st.release.sys.global.u64 [a], $3; mov.u32 $0, 0; }"
)
_STORE_WORDS = tl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p st.relaxed.sys.global.u64 [$1], $2; mov.u32 $0, 0; }"
)
# Release at system scope, as LLVM has it for gfx942 and gfx950. All threads store the same.
_STORE_ONE_AMD = tl.constexpr(
    "buffer_wbl2 sc0 sc1\ns_waitcnt vmcnt(0) lgkmcnt(0)\n"
    "global_store_dwordx2 $1, $2, off sc0 sc1\nv_mov_b32 $0, 0"
)
_STORE_WORDS_AMD = tl.constexpr("global_store_dwordx2 $1, $2, off sc0 sc1\nv_mov_b32 $0, 0")
_THREADS = tl.constexpr(32)  # a program has at least as many


@triton.jit
def translate(flag, peer, ctx):
    """Return the pointer, or tile of pointers, to the peer's copy of a flag. Orders nothing.

    For your own atomics, such as a count of arrivals. For data see `memory.translate`.
    """
    return flag + tl.load(ctx + FLAG_DELTAS + PER_PEER * peer) // 8  # flags are int64


@triton.jit
def _translate_all(flags, lane, size, ctx):
    """Return pointers to `flags[my rank]` at every rank, a lane per peer. Orders nothing.

    Lanes beyond `size`, the number of ranks, point to rank 0's: mask them.
    """
    peer = tl.where(lane < size, lane, 0)
    return translate(flags + tl.load(ctx + RANK) + lane * 0, peer, ctx)


@triton.jit
def signal(flag, peer, epoch, ctx, TRACE: tl.constexpr = trace.OFF):
    """Set the peer's `flag` to `epoch`, after everything that this program did before.

    Orders: every load and store of this program, of all its warps, before the flag. A wait for the
    flag sees them. Does not order: other programs of this rank, or anything after the signal.
    """
    trace.begin(trace.SIGNAL, flag, epoch, peer, ctx, TRACE)
    # All warps make a tile store; one thread makes the release and would publish only its own
    # stores. The compiler puts no barrier between the two.
    tl.debug_barrier()
    _set(translate(flag, peer, ctx), epoch, TRACE)


@triton.jit
def _set(flag, epoch, TRACE: tl.constexpr):
    """Set a peer's word, with release at system scope: the waiter acquires it."""
    if TRACE < STORE:
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    elif _HAS_STORE:
        tl.atomic_store(flag, epoch, sem="release", scope="sys")
    elif TRACE < STORE_AMD:
        word = tl.cast(epoch, tl.int64)
        tl.inline_asm_elementwise(_STORE_ONE, "=r,l,l", [flag, word], tl.int32, False, 1)
    else:
        word = tl.cast(epoch, tl.int64)
        tl.inline_asm_elementwise(_STORE_ONE_AMD, "=v,v,v", [flag, word], tl.int32, False, 1)


@triton.jit
def set_words(places, words, mask, TRACE: tl.constexpr):
    """Set a tile of a peer's words, relaxed: each carries its own epoch (collectives/_words.py).

    In AMD's store form lanes outside the mask are stored too: they must be this program's words.
    """
    if TRACE < STORE:
        tl.atomic_xchg(places, words, mask=mask, sem="relaxed", scope="sys")
    elif _HAS_STORE:
        tl.atomic_store(places, words, mask=mask, sem="relaxed", scope="sys")
    elif TRACE < STORE_AMD:
        given = [places, words, mask.to(tl.int32)]
        tl.inline_asm_elementwise(_STORE_WORDS, "=r,l,l,r", given, tl.int32, False, 1)
    else:
        tl.inline_asm_elementwise(_STORE_WORDS_AMD, "=v,v,v", [places, words], tl.int32, False, 1)


@triton.jit
def wait(flag, peer, epoch, ctx, TRACE: tl.constexpr = trace.OFF):
    """Return once this rank's `flag` has reached `epoch`, which rank `peer` owes; bounded.

    Orders: what the signaller did before its signal, before everything that this program does after
    the wait. Does not order: other programs of this rank. Triton does not pipeline a loop that
    contains a wait, so wait outside the inner loop.
    """
    trace.begin(trace.WAIT, flag, epoch, peer, ctx, TRACE)
    _wait_word(flag, peer, epoch, ctx, scope="sys")
    trace.end(trace.WAIT, flag, epoch, peer, ctx, TRACE)


@triton.jit
def _wait_word(flag, peer, epoch, ctx, scope: tl.constexpr):
    # Acquire: what the signaller did before its release comes before what this program does next.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope=scope)
    if seen < epoch:
        limit = tl.cast(_LOOK_EVERY, tl.int64)  # most waits end before they look at POLLS
        polls = limit * 0
        while (seen < epoch) & (polls < limit):
            polls += 1
            if polls % _LOOK_EVERY == 0:  # regularly: another wait may have expired
                limit = _polls_allowed(ctx)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope=scope)
        if seen < epoch:
            _run_out(flag, peer, epoch, seen, ctx)
    _hold_loads()  # what follows comes after the acquire, even if the compiler would load ahead


@triton.jit
def _hold_loads():
    """Keep later loads after the acquire. All warps have learnt from it at this point.

    In a pipelined loop the compiler issues tile loads ahead of an acquire. It does not pipeline a
    loop with a CTA barrier. docs/memory_model.md lists what else was tried.
    """
    tl.debug_barrier()


@triton.jit
def put_signal(dst, src, flag, peer, epoch, ctx, mask=None, TRACE: tl.constexpr = trace.OFF):
    """Copy this rank's `src` to the peer's `dst`, then signal. A wait for the flag sees it."""
    memory.put(dst, src, peer, ctx, mask=mask)
    signal(flag, peer, epoch, ctx, TRACE)


@triton.jit
def signal_all(flags, epoch, ctx, LANES: tl.constexpr, TRACE: tl.constexpr = trace.OFF):
    """Set `flags[my rank]` to `epoch` at every rank, a lane per peer. Orders like `signal`.

    LANES: the world size, or more. One tensor atomic instead of a loop over the peers waits for all
    answers at once (measured: a barrier is 3.6 times as fast).
    """
    trace.begin(trace.SIGNAL, flags, epoch, trace.ALL, ctx, TRACE)
    _signal_lanes(flags, tl.arange(0, triton.next_power_of_2(LANES)), epoch, ctx, TRACE)


@triton.jit
def _signal_lanes(flags, lane, epoch, ctx, TRACE: tl.constexpr):
    tl.debug_barrier()  # all warps' earlier stores before the lanes' releases, as in `signal`
    _set_lanes(flags, lane, epoch, ctx, TRACE)


@triton.jit
def _set_lanes(flags, lane, epoch, ctx, TRACE: tl.constexpr):
    """Set `flags[my rank]` at every rank, with release at system scope: the waiters acquire it."""
    size = tl.load(ctx + SIZE).to(tl.int32)
    if TRACE < STORE or _HAS_STORE or TRACE >= STORE_AMD:
        mine = _translate_all(flags, lane, size, ctx)
        value = lane * 0 + epoch
    if TRACE < STORE:
        tl.atomic_xchg(mine, value, mask=lane < size, sem="release", scope="sys")
    elif _HAS_STORE:
        tl.atomic_store(mine, value, mask=lane < size, sem="release", scope="sys")
    elif TRACE < STORE_AMD:
        # A thread for each peer: one after the other, each store would wait for the one before.
        mine, table = flags + tl.load(ctx + RANK), ctx + FLAG_DELTAS
        word = tl.cast(epoch, tl.int64)
        for first in tl.static_range(0, lane.shape[0], _THREADS):
            given = [table, mine, word, first, tl.minimum(size, first + _THREADS)]
            tl.inline_asm_elementwise(_STORE_EACH, "=r,l,l,l,r,r", given, tl.int32, False, 1)
    else:
        tl.inline_asm_elementwise(_STORE_ONE_AMD, "=v,v,v", [mine, value], tl.int32, False, 1)


@triton.jit
def wait_all(flags, epoch, ctx, LANES: tl.constexpr, TRACE: tl.constexpr = trace.OFF):
    """Return once `flags[peer]` of every peer has reached `epoch`. Orders like `wait`; bounded."""
    trace.begin(trace.WAIT, flags, epoch, trace.ALL, ctx, TRACE)
    _wait_lanes(flags, tl.arange(0, triton.next_power_of_2(LANES)), epoch, ctx)
    trace.end(trace.WAIT, flags, epoch, trace.ALL, ctx, TRACE)


@triton.jit
def _wait_lanes(flags, lane, epoch, ctx):
    _wait_tile(flags + lane, lane < tl.load(ctx + SIZE).to(tl.int32), lane, epoch, ctx)


@triton.jit
def _wait_tile(flags, valid, peer, epoch, ctx):
    """Return once all `valid` flags of a tile have reached `epoch`. Orders like `wait`; bounded.

    `peer`: the rank that owes each flag. No flag may occur twice in the tile.
    """
    limit = tl.cast(_LOOK_EVERY, tl.int64)
    polls = limit * 0
    # Acquires, one for each signaller, as in `_wait_word`.
    seen = tl.atomic_add(flags, peer * 0, mask=valid, sem="acquire", scope="sys")
    late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    while (late > 0) & (polls < limit):
        polls += 1
        if polls % _LOOK_EVERY == 0:
            limit = _polls_allowed(ctx)
        seen = tl.atomic_add(flags, peer * 0, mask=valid, sem="acquire", scope="sys")
        late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    # A lane's acquire orders its own thread only; all threads make the loads that follow. Also,
    # the compiler does not pipeline a loop with this barrier, as in `_wait_word`.
    tl.debug_barrier()
    if late > 0:  # report the last late flag
        address = flags.to(tl.int64)
        flag = tl.max(tl.where(valid & (seen < epoch), address, 0), 0)
        who = tl.sum(tl.where(address == flag, peer, 0), 0)
        value = tl.sum(tl.where(address == flag, seen, 0), 0)
        _run_out(flag, who, epoch, value, ctx)


@triton.jit
def barrier_ranks(flags, epoch, ctx, LANES: tl.constexpr, TRACE: tl.constexpr = trace.OFF):
    """Wait until every rank has arrived with this `epoch`.

    One program per rank takes part (or several, each with its own `flags`). Orders what these
    programs did before the barrier, on any rank, before what they do after it. `flags` has a word
    per rank. The epoch grows by one per use and is the same on all ranks.
    """
    trace.begin(trace.BARRIER, flags, epoch, trace.ALL, ctx, TRACE)
    _signal_lanes(flags, tl.arange(0, triton.next_power_of_2(LANES)), epoch, ctx, TRACE)
    wait_all(flags, epoch, ctx, LANES)
    trace.end(trace.BARRIER, flags, epoch, trace.ALL, ctx, TRACE)


@triton.jit
def barrier_programs(counter, ctx):
    """Wait until all programs of this launch on this rank have arrived.

    Orders what the programs did before the barrier before what they do after it. All of them must
    be resident at once. `counter` is one int64 word, never reset; each use adds the number of
    programs, so use a word only with launches of one grid.
    """
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.debug_barrier()  # this program's stores, of all warps, before its arrival
    one = tl.cast(1, tl.int64)
    before = tl.atomic_add(counter, one, sem="release", scope="gpu")
    target = (before // programs + 1) * programs
    # Acquires the others' arrivals. The late program is not known here; the record names this rank.
    _wait_word(counter, tl.load(ctx + RANK), target, ctx, scope="gpu")


@triton.jit
def _polls_allowed(ctx):
    """Return how many polls a wait of this rank may take; 0 once one of them has expired."""
    # Relaxed: nothing is read because of it. An atomic, since another program may set it to 0.
    return tl.atomic_add(ctx + POLLS, 0, sem="relaxed", scope="gpu")


@triton.jit
def refuse(word, seen, most, ctx):
    """Leave a record, as an expired wait does, that a number is outside 0 to `most`.

    `word` is one of `world.signals`, whose name the error shows. It is neither read nor written.
    """
    _run_out(word, tl.load(ctx + RANK), -1 - most, seen, ctx)  # a wait expects no negative epoch


@triton.jit
def _run_out(flag, peer, epoch, seen, ctx):
    """Leave a record for the host, once per rank, and end all other waits of this rank."""
    one = tl.cast(1, tl.int64)
    # Relaxed: it only decides which program writes the record.
    if tl.atomic_xchg(ctx + TAKEN, one, sem="relaxed", scope="gpu") == 0:
        program = tl.program_id(0) + tl.num_programs(0) * (
            tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
        )
        record = ctx + tl.load(ctx + RECORD)
        # Atomics, since the host may read while the kernel runs. The first word is written last.
        tl.atomic_xchg(record + 1, program.to(tl.int64), sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 2, flag.to(tl.int64), sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 3, one * epoch, sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 4, one * seen, sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 5, one * peer, sem="relaxed", scope="sys")
        tl.atomic_xchg(record, one, sem="release", scope="sys")
    # The record before the word that ends this rank's waits; the host reads both.
    tl.atomic_xchg(ctx + POLLS, one * 0, sem="release", scope="sys")
