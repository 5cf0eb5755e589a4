"""Signals between programs: a flag is an int64 word that holds an epoch and only grows.

Epochs up to the largest, 2^63 - 1, are compared rightly, and they do not wrap: a kernel that took a
nanosecond per epoch would come there after 292 years.

A flag (from `world.signals`) lies in the heap of the rank that waits for it, so that polling stays
local; the signaller writes it across the link. Three patterns cover everything
(docs/memory_model.md has them whole):

    produce, then signal      store tiles to the peer; signal(flag, peer, epoch, ctx)
    wait, then consume        wait(flag, peer, epoch, ctx); load the tiles
    reuse a buffer            wait for the reader's done flag before writing again

Every wait is bounded by the context's POLLS word. One that runs out leaves a record, sets POLLS to
0, which ends all other waits of this rank at once, and goes on: the host raises WaitTimeout, and
what the kernel computed is not used.

Gluon kernels call these functions too (`gluon` has the names): nothing here but the lanes of
`signal_all` and `wait_all` makes a tile, which would need a layout there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import memory
from .context import FLAG_DELTAS, PER_PEER, POLLS, RANK, RECORD, SIZE, TAKEN

__all__ = [
    "barrier_programs",
    "barrier_ranks",
    "put_signal",
    "signal",
    "signal_all",
    "translate",
    "wait",
    "wait_all",
]

_LOOK_EVERY = tl.constexpr(64)  # polls between two looks at POLLS: the look is a second atomic


@triton.jit
def translate(flag, peer, ctx):
    """The pointer, or tile of pointers, to the peer's copy of an own flag. Orders nothing.

    For an atomic of your own, such as a count of arrivals. Not for data: see `memory.translate`.
    """
    return flag + tl.load(ctx + FLAG_DELTAS + PER_PEER * peer) // 8  # flags are int64


@triton.jit
def _translate_all(flags, lane, size, ctx):
    """Pointers to `flags[my rank]` at every rank, a lane per peer. Orders nothing.

    Lanes beyond `size`, the number of ranks, point to rank 0's: mask them.
    """
    peer = tl.where(lane < size, lane, 0)
    return translate(flags + tl.load(ctx + RANK) + lane * 0, peer, ctx)


@triton.jit
def signal(flag, peer, epoch, ctx):
    """Set the peer's `flag` to `epoch`, after all that this program did before.

    Orders: every load and store of this program, of all its warps, before the flag; whoever waits
    for it sees them. Does not order: other programs of this rank, or anything after the signal.
    """
    # The compiler puts no barrier between a tile store, made by all warps, and the release, made by
    # one thread, which alone would publish only its own stores.
    tl.debug_barrier()
    tl.atomic_xchg(translate(flag, peer, ctx), epoch, sem="release", scope="sys")


@triton.jit
def wait(flag, peer, epoch, ctx):
    """Return when the own `flag` has reached `epoch`, which rank `peer` owes; bounded.

    Orders: what the signaller did before its signal, before all that this program does after the
    wait, in every loop: Triton does not pipeline a loop in which something waits, so wait outside
    the inner loop. Does not order: other programs of this rank.
    """
    _wait_word(flag, peer, epoch, ctx, scope="sys")


@triton.jit
def _wait_word(flag, peer, epoch, ctx, scope: tl.constexpr):
    seen = tl.atomic_add(flag, 0, sem="acquire", scope=scope)
    if seen < epoch:
        limit = tl.cast(_LOOK_EVERY, tl.int64)  # most waits end without a look at POLLS
        polls = limit * 0
        while (seen < epoch) & (polls < limit):
            polls += 1
            if polls % _LOOK_EVERY == 0:  # again and again: another wait may have run out
                limit = _polls_allowed(ctx)
            seen = tl.atomic_add(flag, 0, sem="acquire", scope=scope)
        if seen < epoch:
            _run_out(flag, peer, epoch, seen, ctx)
    _hold_loads()  # all that follows, after the acquire, also where the compiler would load ahead


@triton.jit
def _hold_loads():
    """Keep the loads that follow where they are. All warps have learnt from the acquire before.

    In a pipelined loop the compiler issues tile loads ahead of an acquire. It does not pipeline a
    loop that has a CTA barrier: docs/memory_model.md has what else was tried.
    """
    tl.debug_barrier()


@triton.jit
def put_signal(dst, src, flag, peer, epoch, ctx, mask=None):
    """Copy the own `src` to the peer's `dst`, then signal: whoever waits for the flag sees it."""
    memory.put(dst, src, peer, ctx, mask=mask)
    signal(flag, peer, epoch, ctx)


@triton.jit
def signal_all(flags, epoch, ctx, LANES: tl.constexpr):
    """Set `flags[my rank]` to `epoch` at every rank at once, a lane per peer. As `signal`.

    LANES: a power of two, at least the world size. One tensor atomic instead of a loop over the
    peers: the peers' answers are awaited together (measured: a barrier 3.6 times as fast).
    """
    _signal_lanes(flags, tl.arange(0, LANES), epoch, ctx)


@triton.jit
def _signal_lanes(flags, lane, epoch, ctx):
    size = tl.load(ctx + SIZE).to(tl.int32)
    mine = _translate_all(flags, lane, size, ctx)
    tl.debug_barrier()  # all warps' earlier stores before the lanes' releases, as in `signal`
    tl.atomic_xchg(mine, lane * 0 + epoch, mask=lane < size, sem="release", scope="sys")


@triton.jit
def wait_all(flags, epoch, ctx, LANES: tl.constexpr):
    """Return when the own `flags[peer]` of every peer has reached `epoch`; bounded. As `wait`."""
    _wait_lanes(flags, tl.arange(0, LANES), epoch, ctx)


@triton.jit
def _wait_lanes(flags, lane, epoch, ctx):
    _wait_tile(flags + lane, lane < tl.load(ctx + SIZE).to(tl.int32), lane, epoch, ctx)


@triton.jit
def _wait_tile(flags, valid, peer, epoch, ctx):
    """Return when all of a tile of own flags that are `valid` have reached `epoch`; bounded.

    As `wait`. `peer`: who owes each. Not for a tile in which a flag occurs twice.
    """
    limit = tl.cast(_LOOK_EVERY, tl.int64)
    polls = limit * 0
    seen = tl.atomic_add(flags, peer * 0, mask=valid, sem="acquire", scope="sys")
    late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    while (late > 0) & (polls < limit):
        polls += 1
        if polls % _LOOK_EVERY == 0:
            limit = _polls_allowed(ctx)
        seen = tl.atomic_add(flags, peer * 0, mask=valid, sem="acquire", scope="sys")
        late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    # Each lane's acquire orders its own thread only; all of them make the loads that follow. Nor
    # does the compiler pipeline a loop that has this barrier, as in `_wait_word`.
    tl.debug_barrier()
    if late > 0:  # of those the last is told
        address = flags.to(tl.int64)
        flag = tl.max(tl.where(valid & (seen < epoch), address, 0), 0)
        who = tl.sum(tl.where(address == flag, peer, 0), 0)
        value = tl.sum(tl.where(address == flag, seen, 0), 0)
        _run_out(flag, who, epoch, value, ctx)


@triton.jit
def barrier_ranks(flags, epoch, ctx, LANES: tl.constexpr):
    """All ranks: nobody leaves before everybody has arrived with this `epoch`.

    One program per rank takes part (or several, each with `flags` of its own). Orders what these
    programs did before, on any rank, before what they do after. `flags` has a word per rank; the
    epoch must grow by one from use to use and be the same on all ranks.
    """
    signal_all(flags, epoch, ctx, LANES)
    wait_all(flags, epoch, ctx, LANES)


@triton.jit
def barrier_programs(counter, ctx):
    """All programs of this launch on this rank; `counter` is one int64 word, never reset.

    Orders what the programs did before, before what they do after. All must be resident at once.
    Each use adds the number of programs, so a word may serve only launches of one grid.
    """
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.debug_barrier()  # this program's stores, of all warps, before its arrival
    one = tl.cast(1, tl.int64)
    before = tl.atomic_add(counter, one, sem="release", scope="gpu")
    target = (before // programs + 1) * programs
    # Acquires the others' arrivals. Who is late is unknown here: the record names this rank.
    _wait_word(counter, tl.load(ctx + RANK), target, ctx, scope="gpu")


@triton.jit
def _polls_allowed(ctx):
    """How long this rank's waits may last; 0 once one of them has run out."""
    return tl.atomic_add(ctx + POLLS, 0, sem="relaxed", scope="gpu")


@triton.jit
def _run_out(flag, peer, epoch, seen, ctx):
    """Leave a record for the host, once per rank, and end all other waits of this rank."""
    one = tl.cast(1, tl.int64)
    if tl.atomic_xchg(ctx + TAKEN, one, sem="relaxed", scope="gpu") == 0:
        program = tl.program_id(0) + tl.num_programs(0) * (
            tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
        )
        record = ctx + tl.load(ctx + RECORD)
        # Atomics, since the host may look while the kernel still runs; the first word comes last.
        tl.atomic_xchg(record + 1, program.to(tl.int64), sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 2, flag.to(tl.int64), sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 3, one * epoch, sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 4, one * seen, sem="relaxed", scope="sys")
        tl.atomic_xchg(record + 5, one * peer, sem="relaxed", scope="sys")
        tl.atomic_xchg(record, one, sem="release", scope="sys")
    tl.atomic_xchg(ctx + POLLS, one * 0, sem="release", scope="sys")
