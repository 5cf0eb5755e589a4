"""Signals between the programs of one rank: as in `signal`, but the flag is never another rank's.

Scope `gpu`, which costs less than `sys` and reaches just these programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .context import RANK
from .signal import _wait_word

__all__ = ["signal", "wait"]


@triton.jit
def signal(flag, epoch, ctx):
    """Set the own `flag` to `epoch`, after all that this program did before.

    Orders: every load and store of this program, of all its warps, before the flag; a program of
    this rank that waits for it sees them. Does not order: anything for another rank.
    """
    tl.debug_barrier()  # all warps' stores before the release, which one thread makes
    tl.atomic_xchg(flag, epoch, sem="release", scope="gpu")


@triton.jit
def wait(flag, epoch, ctx):
    """Return when the own `flag` has reached `epoch`, which a program of this rank owes; bounded.

    Orders: what the signaller did before its signal, before all that this program does after.
    """
    _wait_word(flag, tl.load(ctx + RANK), epoch, ctx, scope="gpu")
