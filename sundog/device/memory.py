"""Access a peer's memory. Arguments come in one order: where, what, which peer, context.

`ptr` is a pointer into this rank's heap, a scalar or a tile; `peer` names the rank whose copy is
accessed. The context holds the distance to each peer's heap, so an access needs one (cached) word.
Distances are multiples of 256 bytes, and the compiler knows it: a 16-byte access stays one. In a
loop, translate the scalar base once and index from it; that is the fastest form.

Use these for data (`world.empty` and similar). A peer's flags (`world.signals`) may be in another
memory: use `signal` for them.

Nothing here orders anything. See `signal` for what does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .context import DELTAS, PER_PEER

ACQ_REL = tl.constexpr("acq_rel")  # Triton 3.6 takes no bare string as a default


@triton.jit
def translate(ptr, peer, ctx):
    """Return the pointer, or tile of pointers, to the same place in the peer's heap."""
    return moved(ptr, tl.load(ctx + DELTAS + PER_PEER * peer))


@triton.jit
def moved(ptr, distance):
    """Return the pointer `distance` bytes further on; it must be a multiple of 256."""
    # In elements: through a pointer to bytes, Triton 3.9 forgets that a tile is contiguous. As a
    # product, which is a multiple by itself: a hint is lost where an element is one byte.
    nbytes: tl.constexpr = (ptr.dtype.element_ty.primitive_bitwidth + 7) // 8
    return ptr + (distance >> 8) * (256 // nbytes)


@triton.jit
def load(ptr, peer, ctx, mask=None, other=None):
    """Return the peer's values at `ptr`."""
    return tl.load(translate(ptr, peer, ctx), mask=mask, other=other)


@triton.jit
def store(ptr, value, peer, ctx, mask=None):
    """Write `value` at the peer's `ptr`."""
    tl.store(translate(ptr, peer, ctx), value, mask=mask)


@triton.jit
def get(dst, src, peer, ctx, mask=None):
    """Copy the peer's `src` to this rank's `dst`."""
    tl.store(dst, load(src, peer, ctx, mask=mask), mask=mask)


@triton.jit
def put(dst, src, peer, ctx, mask=None):
    """Copy this rank's `src` to the peer's `dst`."""
    store(dst, tl.load(src, mask=mask), peer, ctx, mask=mask)


@triton.jit
def copy(dst, src, dst_peer, src_peer, ctx, mask=None):
    """Copy one peer's `src` to another peer's `dst`, through this program."""
    store(dst, load(src, src_peer, ctx, mask=mask), dst_peer, ctx, mask=mask)


@triton.jit
def atomic_add(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Add to the peer's value at system scope; return the old value."""
    return tl.atomic_add(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_and(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Bitwise-and the peer's value at system scope; return the old value."""
    return tl.atomic_and(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_or(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Bitwise-or the peer's value at system scope; return the old value."""
    return tl.atomic_or(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_xor(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Bitwise-xor the peer's value at system scope; return the old value."""
    return tl.atomic_xor(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_min(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Lower the peer's value to the minimum at system scope; return the old value."""
    return tl.atomic_min(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_max(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Raise the peer's value to the maximum at system scope; return the old value."""
    return tl.atomic_max(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_xchg(ptr, value, peer, ctx, mask=None, sem: tl.constexpr = ACQ_REL):
    """Exchange the peer's value at system scope; return the old value."""
    return tl.atomic_xchg(translate(ptr, peer, ctx), value, mask=mask, sem=sem, scope="sys")


@triton.jit
def atomic_cas(ptr, expected, value, peer, ctx, sem: tl.constexpr = ACQ_REL):
    """Exchange the peer's value if it is `expected`, at system scope; return the old value."""
    return tl.atomic_cas(translate(ptr, peer, ctx), expected, value, sem=sem, scope="sys")
