"""Kernels for what torch does by its own kernels and stream operations.

Integers are addresses: torch passes tables and signal pads that way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def send(pads, peer, word):
    pad = tl.load(pads.to(tl.pointer_type(tl.int64)) + peer).to(tl.pointer_type(tl.int32))
    # a release at system scope: what came before this kernel on its stream, for the peer's wait
    while tl.atomic_cas(pad + word, 0, 1, sem="release", scope="sys") != 0:
        pass


@triton.jit
def wait(pads, rank, word):
    pad = tl.load(pads.to(tl.pointer_type(tl.int64)) + rank).to(tl.pointer_type(tl.int32))
    # an acquire at system scope: what the sender published comes before what follows here
    while tl.atomic_cas(pad + word, 1, 0, sem="acquire", scope="sys") != 1:
        pass


@triton.jit
def barrier(pads, rank, channel, size):
    for peer in range(size):
        if peer != rank:
            send(pads, peer, channel * size + rank)
    for peer in range(size):
        if peer != rank:
            wait(pads, rank, channel * size + peer)


@triton.jit
def write_value(address, value, KIND: tl.constexpr = tl.int32):
    # cuStreamWriteValue32 fences first: what came before it on its stream is published
    word = address.to(tl.pointer_type(KIND))
    tl.atomic_xchg(word, tl.cast(value, KIND), sem="release", scope="sys")


@triton.jit
def wait_value(address, value, HOW: tl.constexpr, KIND: tl.constexpr = tl.int32):
    word, wanted = address.to(tl.pointer_type(KIND)), tl.cast(value, KIND)
    # orders what the writer published with this value before what follows on this stream
    if HOW == "equal":
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") != wanted:
            pass
    elif HOW == "at least":  # the difference may wrap around, as in the driver
        while tl.atomic_add(word, 0, sem="acquire", scope="sys") - wanted < 0:
            pass
    else:
        while (tl.atomic_add(word, 0, sem="acquire", scope="sys") & wanted) == 0:
            pass


@triton.jit
def copy(to, source, nbytes, BLOCK: tl.constexpr):
    # the copy engine: in stream order, and by itself it publishes nothing
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(source.to(tl.pointer_type(tl.uint8)) + at, mask=at < nbytes)
    tl.store(to.to(tl.pointer_type(tl.uint8)) + at, byte, mask=at < nbytes)
