"""Kernels for what torch does by a kernel or a stream operation of its own.

Integers are addresses: torch passes tables and signal pads that way.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["barrier", "send", "wait", "wait_value", "write_value"]


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
def write_value(address, value):
    # cuStreamWriteValue32 fences first: what came before it on its stream is published
    word = address.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def wait_value(address, value):
    word = address.to(tl.pointer_type(tl.int32))
    # what follows on this stream comes after what the writer published with this value
    while tl.atomic_add(word, 0, sem="acquire", scope="sys") != value:
        pass
