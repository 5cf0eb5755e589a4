"""The context that every kernel gets (`world.ctx`): a table of int64 words in device memory.

One table per rank and world. Host and kernels use these names; nobody else knows the numbers.
"""

from __future__ import annotations

import triton.language as tl

__all__ = [
    "DELTAS", "FLAG_DELTAS", "NOBODY", "PER_PEER", "POLLS", "RANK", "RECORD", "RECORD_HERE",
    "RECORD_WORDS", "SIZE", "TAKEN", "TRACE_BUFFER", "TRACE_EVENTS", "TRACE_PROGRAMS",
]  # fmt: skip

RANK = tl.constexpr(0)  # this rank in the world (or group)
SIZE = tl.constexpr(1)  # ranks in the world
POLLS = tl.constexpr(2)  # how often a wait may poll; 0 ends every wait at once (the sticky word)
# A wait that runs out leaves RECORD_WORDS words where the host can read them without touching the
# device: written, program, address of the flag, expected, seen, peer.
RECORD = tl.constexpr(3)  # how far from this table the record lies, in words
RECORD_WORDS = tl.constexpr(6)
TAKEN = tl.constexpr(4)  # 1 once a wait has claimed the record: the first one leaves it
# Traces (trace.py); read only by kernels that were compiled with TRACE.
TRACE_BUFFER = tl.constexpr(5)  # how far from this table the buffer lies, in words
TRACE_PROGRAMS = tl.constexpr(6)  # that have a slot in it
TRACE_EVENTS = tl.constexpr(7)  # that a slot has room for
RECORD_HERE = tl.constexpr(8)  # the record's place where this table is in host memory itself
# Two words per peer: how far, in bytes, the peer's data and the peer's flags lie from the own ones.
# They are equal unless a link separates them: data may lie in host memory, flags never do.
DELTAS = tl.constexpr(16)
FLAG_DELTAS = tl.constexpr(17)
PER_PEER = tl.constexpr(2)
NOBODY = 1 << 62  # the words before them: a peer of -1 must not turn out to be this rank
