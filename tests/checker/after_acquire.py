"""A pipelined product with an acquire per step, and after it one of the things that might help.

docs/memory_model.md has the table of what helps; test_after_acquire.py compiles each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

# what comes after the acquire: whether the loads stay after it
STAYS = {
    "nothing": False,
    "assume": False,
    "relaxed atomic": False,
    "masked store": False,
    "folded address": False,
    "chosen address": True,
    "barrier if late": True,
    "barrier": True,
}


@triton.jit
def product(
    a, a_tiles, b, out, flags, junk, epoch, steps, AFTER: tl.constexpr, BLOCK: tl.constexpr
):
    """Multiply; `a_tiles` is a descriptor of `a`, or None."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(steps):
        shift = acquire(flags + k, junk, epoch, AFTER)
        if a_tiles is None:
            x = tl.load(a + shift + at[:, None] * (steps * BLOCK) + (k * BLOCK + at)[None, :])
        else:
            x = a_tiles.load([0, shift + k * BLOCK])
        y = tl.load(b + shift + (k * BLOCK + at)[:, None] * BLOCK + at[None, :])
        total = tl.dot(x, y, total)
    tl.store(out + at[:, None] * BLOCK + at[None, :], total)


@triton.jit
def acquire(flag, junk, epoch, AFTER: tl.constexpr):
    """Wait for the flag; return 0, which the addresses of the loads contain."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen < epoch:
        while seen < epoch:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        if AFTER == "barrier if late":
            tl.debug_barrier()
    shift = 0
    if AFTER == "assume":
        tl.assume(seen >= epoch)
    elif AFTER == "relaxed atomic":
        tl.atomic_add(junk, 1, sem="relaxed", scope="gpu")
    elif AFTER == "masked store":
        tl.store(junk, 1, mask=seen < epoch)
    elif AFTER == "folded address":
        shift = ((seen - seen) * 0).to(tl.int32)
    elif AFTER == "chosen address":
        shift = tl.where(seen >= epoch, 0, 1)
    elif AFTER == "barrier":
        tl.debug_barrier()
    return shift
