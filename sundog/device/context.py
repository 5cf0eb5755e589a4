"""The context that every kernel gets (`world.ctx`): a table of int64 words in device memory.

One table per rank and world. Host and kernels use these names; nobody else knows the numbers.
"""

from __future__ import annotations

import triton.language as tl

__all__ = ["DELTAS", "POLLS", "RANK", "RECORD", "RECORD_WORDS", "SIZE"]

RANK = tl.constexpr(0)  # this rank in the world (or group)
SIZE = tl.constexpr(1)  # ranks in the world
POLLS = tl.constexpr(2)  # how often a wait may poll; 0 ends every wait at once (the sticky word)
RECORD = tl.constexpr(3)  # the first of RECORD_WORDS words that a wait leaves when it runs out
RECORD_WORDS = tl.constexpr(6)  # taken, program, address of the flag, expected, seen, peer
DELTAS = tl.constexpr(16)  # base of peer's heap minus base of mine, in bytes, one word per peer
