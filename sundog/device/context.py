"""The context that every kernel receives (`world.ctx`): a table of int64 words in device memory.

There is one table per rank and world. Host and kernels use these names, never the numbers.
"""

from __future__ import annotations

import triton.language as tl

RANK = tl.constexpr(0)  # this rank in the world (or group)
SIZE = tl.constexpr(1)  # ranks in the world
POLLS = tl.constexpr(2)  # how often a wait may poll; 0 ends every wait at once (the sticky word)
# A wait that expires leaves RECORD_WORDS words where the host can read them without touching the
# device: written, program, address of the flag, expected, seen, peer.
RECORD = tl.constexpr(3)  # distance from this table to the record, in words
RECORD_WORDS = tl.constexpr(6)
TAKEN = tl.constexpr(4)  # 1 once a wait has claimed the record: the first one leaves it
# Traces (trace.py); read only by kernels that were compiled with TRACE.
TRACE_BUFFER = tl.constexpr(5)  # distance from this table to the buffer, in words
TRACE_PROGRAMS = tl.constexpr(6)  # programs that have a slot in it
TRACE_EVENTS = tl.constexpr(7)  # events that a slot has room for
RECORD_HERE = tl.constexpr(8)  # where the record is if this table itself is in host memory
# Two words per peer: how many bytes the peer's data, and the peer's flags, are from this rank's.
# They are equal unless a link separates them: data may be in host memory, flags never are.
DELTAS = tl.constexpr(16)
FLAG_DELTAS = tl.constexpr(17)
PER_PEER = tl.constexpr(2)
NOBODY = 1 << 62  # in the two words before them, so that peer -1 is not this rank
