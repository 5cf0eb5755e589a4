"""Load and store 16 bytes at a time, whatever the addresses: a span of memory as whole chunks.

A store can be 16 bytes wide only at a multiple of 16. If a span's destination is at one and its
source is not, a chunk of the destination lies in two chunks of the source. Both are loaded, wide,
and shifted together; the second one comes from the cache, where the load of a neighbour's first one
put it. The first chunk is stored at a multiple of 128, so that what a warp stores begins with a
cache line. The elements that are in no whole chunk, fewer than 176 bytes, are the span's ends.

    head, skew, chunks = span(dst, src, n)      # elements, bytes, chunks
    tile = load(src + head, skew, chunk, mask)  # 64-bit words, two to a chunk
    store(dst + head, tile, chunk, mask)

Nothing outside the source is read. `word_of` and `element` go between elements and words.
"""

from __future__ import annotations

import triton
import triton.language as tl

WIDE = tl.constexpr(16)  # bytes of the widest access
LINE = tl.constexpr(128)  # bytes of a cache line
HEAD = tl.constexpr(12)  # chunks that a span's head has room for; it is shorter than 9


@triton.jit
def to_line(ptr):
    """Return how many elements lie before the next boundary of a cache line."""
    nbytes: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    return (-ptr.to(tl.int64) & (LINE - 1)) // nbytes


@triton.jit
def span(dst, src, n):
    """Return where the chunks of n elements begin, the source's skew in bytes, and their number.

    The skew is how far the source lies after a 16-byte boundary where the destination is at one.
    """
    nbytes: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    head = to_line(dst)
    skew = (src + head).to(tl.int64) & (WIDE - 1)
    # Otherwise the first load would begin before the source.
    head += tl.where(head * nbytes < skew, LINE // nbytes, 0)
    head = tl.minimum(head, n)
    # A skewed chunk needs the source's next one too, all of it inside the source.
    chunks = ((n - head) * nbytes + skew) // WIDE - (skew > 0).to(tl.int32)
    return head, skew, tl.maximum(chunks, 0)


@triton.jit
def ends(head, chunks, n, PER: tl.constexpr):
    """Return the offsets of a span's elements that are in no chunk, and which of them exist."""
    lane = tl.arange(0, 16 * PER)
    at = tl.where(lane < HEAD * PER, lane, head + chunks * PER + lane - HEAD * PER)
    return at, tl.where(lane < HEAD * PER, lane < head, at < n)


@triton.jit
def load(src, skew, chunk, mask):
    """Load the chunks, `skew` bytes after a boundary, as pairs of 64-bit words."""
    nbytes: tl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    words = (src - skew // nbytes).to(tl.pointer_type(tl.uint64))
    at = chunk[:, None] * 2 + tl.arange(0, 2)[None, :]
    first = tl.load(tl.multiple_of(words + at, (16, 16)), mask=mask[:, None])
    both = (mask & (skew > 0))[:, None]
    second = tl.load(tl.multiple_of(words + 2 + at, (16, 16)), mask=both, other=0)
    a, b = tl.split(first)
    c, d = tl.split(second)
    is_far = skew >= 8
    bits = (skew % 8 * 8).to(tl.uint64)
    middle = tl.where(is_far, c, b)
    low = _shift(tl.where(is_far, b, a), middle, bits)
    return tl.join(low, _shift(middle, tl.where(is_far, d, c), bits))


@triton.jit
def _shift(low, high, bits):
    """Return 64 of 128 bits, from `bits` on: in two steps, since a shift by 64 is undefined."""
    return (low >> bits) | ((high << (63 - bits)) << 1)


@triton.jit
def store(dst, tile, chunk, mask):
    """Store chunks at a 16-byte boundary."""
    words = dst.to(tl.pointer_type(tl.uint64))
    at = chunk[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(tl.multiple_of(words + at, (16, 16)), tile, mask=mask[:, None])


@triton.jit
def element(word, part: tl.constexpr, DTYPE: tl.constexpr):
    """Return element number `part` of a word."""
    width: tl.constexpr = DTYPE.primitive_bitwidth
    shifted = word >> (part * width)
    if width == 64:
        bits = shifted.to(tl.int64)
    elif width == 32:
        bits = shifted.to(tl.int32)
    elif width == 16:
        bits = shifted.to(tl.int16)
    else:
        bits = shifted.to(tl.int8)
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def word_of(value, part: tl.constexpr):
    """Return a word that is zero but for `value`, which is its element number `part`."""
    width: tl.constexpr = value.dtype.primitive_bitwidth
    if width == 64:
        bits = value.to(tl.uint64, bitcast=True)
    elif width == 32:
        bits = value.to(tl.uint32, bitcast=True).to(tl.uint64)
    elif width == 16:
        bits = value.to(tl.uint16, bitcast=True).to(tl.uint64)
    else:
        bits = value.to(tl.uint8, bitcast=True).to(tl.uint64)
    return bits << (part * width)
