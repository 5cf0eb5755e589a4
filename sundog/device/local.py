"""Signals between the programs of one rank: like `signal`, but the flag is always this rank's.

The scope is `gpu`, which costs less than `sys` and reaches exactly these programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import trace
from .context import RANK
from .signal import _wait_word

GPU = tl.constexpr("gpu")  # Triton 3.6 takes no bare string as a default


@triton.jit
def signal(flag, epoch, ctx, TRACE: tl.constexpr = trace.OFF):
    """Set `flag` to `epoch`, after everything that this program did before.

    Orders: every load and store of this program, of all its warps, before the flag. A program of
    this rank that waits for it sees them. Does not order anything for other ranks.
    """
    if TRACE:
        trace.begin(trace.SIGNAL, flag, epoch, tl.load(ctx + RANK), ctx, TRACE)
    tl.debug_barrier()  # the stores of all warps come before the release, which one thread makes
    tl.atomic_xchg(flag, epoch, sem="release", scope="gpu")


@triton.jit
def wait(flag, epoch, ctx, TRACE: tl.constexpr = trace.OFF, SCOPE: tl.constexpr = GPU):
    """Return once `flag` has reached `epoch`, which a program of this rank owes; bounded.

    Orders: what the signaller did before its signal, before everything after the wait. SCOPE: "sys"
    where a stream of this rank copies the epoch to the flag (docs/memory_model.md).
    """
    rank = tl.load(ctx + RANK)
    trace.begin(trace.WAIT, flag, epoch, rank, ctx, TRACE)
    _wait_word(flag, rank, epoch, ctx, scope=SCOPE)
    trace.end(trace.WAIT, flag, epoch, rank, ctx, TRACE)
