"""Mailboxes: messages of any size between ranks that know only their own side.

A rank has SLOTS slots for every peer, on the heap. The sender fills a slot and signals it, the
receiver empties it and signals that, chunk by chunk; a slot is filled again only when it is empty.
So neither tensor need be symmetric, and a rank need not know what others send to each other. Where
that is known, writing straight to the destination (_copy.py) moves less.

The first word of a message is its length. A receiver that expected another length leaves the record
of an expired wait, with both numbers, and the host raises it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal
from ..ops.op import World
from . import _copy
from ._copy import Config, default_config

SLOTS = tl.constexpr(4)
NOTHING = -1  # in place of a length: no message, not even an empty one
_ROW = tl.constexpr(4)
_MOST_TABLES = 256
_LARGEST, _SMALLEST = 16384, 1024  # bytes of a chunk of a message between two ranks
_SHARE = 64  # of the heap, at most, for their boxes
Message = tuple[int, int, int, int]  # start in x, bytes to the peer; start in out, bytes from it


@triton.jit
def _mail_kernel(
    x, out, table, boxes, sizes, flags, ctx,
    SIZE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Send to one peer and receive from another, alternately, so that ranks never wait in a circle.

    `table` has a Message per peer. `flags` has, in this order: the chunks that a peer has put here;
    for every slot at a peer, the latest chunk that it has emptied; the chunks sent to a peer so
    far; the chunks received.
    """
    rank = tl.load(ctx + context.RANK)
    part = tl.program_id(0) % PARTS
    full, emptied = flags, flags + SIZE * PARTS
    counts = emptied + SIZE * PARTS * SLOTS
    for step in range(tl.program_id(0) // PARTS, SIZE, tl.num_programs(0) // PARTS):
        peer = (rank + step) % SIZE
        writer = (rank + SIZE - step) % SIZE
        num_sent = tl.load(table + peer * _ROW + 1)
        num_received = tl.load(table + writer * _ROW + 3)
        mine, to, by = rank * PARTS + part, peer * PARTS + part, writer * PARTS + part
        sent, received = counts + to, counts + SIZE * PARTS + by
        # Only the sides that this call takes part in: a send and a receive may run at the same
        # time.
        before_sent = tl.load(sent, mask=num_sent >= 0, other=0)
        before_received = tl.load(received, mask=num_received >= 0, other=0)
        out_chunks = _chunks(num_sent, PARTS, BLOCK)
        in_chunks = _chunks(num_received, PARTS, BLOCK)
        for chunk in range(0, tl.maximum(out_chunks, in_chunks)):
            if chunk < out_chunks:
                src, number = x + _offset(tl.load(table + peer * _ROW), x), before_sent + chunk + 1
                place = mine * SLOTS + number % SLOTS  # the peer's slot for me
                # The peer has emptied it: its loads of SLOTS chunks ago come before my stores.
                slot = emptied + to * SLOTS + number % SLOTS
                signal.wait(slot, peer, number - SLOTS, ctx, TRACE)
                box = memory.translate(boxes + _offset(place * BLOCK, boxes), peer, ctx)
                start, count = _share(num_sent, chunk, part, src, PARTS, BLOCK)
                _copy.copy((box,), src + start, count, part * 0, 1, 1, BLOCK, ALIGNED)
                memory.store(sizes + place, num_sent, peer, ctx)
                # The chunk and the length before the flag: the peer reads both after it.
                signal.signal(full + mine, peer, number, ctx, TRACE)
            if chunk < in_chunks:
                dst = out + _offset(tl.load(table + writer * _ROW + 2), out)
                number = before_received + chunk + 1
                place = by * SLOTS + number % SLOTS  # my slot for the writer
                # The writer's chunk is here.
                signal.wait(full + by, writer, number, ctx, TRACE)
                _check_length(sizes + place, num_received, writer, ctx)
                box = boxes + _offset(place * BLOCK, boxes)
                start, count = _share(num_received, chunk, part, dst, PARTS, BLOCK)
                _copy.copy((dst + start,), box, count, part * 0, 1, 1, BLOCK, ALIGNED)
                # My loads before the flag: the writer fills the slot again after it.
                slot = emptied + mine * SLOTS + number % SLOTS
                signal.signal(slot, writer, number, ctx, TRACE)
        # Read by the next call on the stream.
        tl.store(sent, before_sent + out_chunks, mask=num_sent >= 0)
        tl.store(received, before_received + in_chunks, mask=num_received >= 0)


@triton.jit
def _offset(nbytes, ptr):
    return nbytes // (ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def _chunks(nbytes, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Count each part's chunks: at least one, since an empty message has a length too."""
    chunks = tl.maximum((nbytes + PARTS * BLOCK - 1) // (PARTS * BLOCK), 1)
    return tl.where(nbytes < 0, 0, chunks)


@triton.jit
def _share(nbytes, chunk, part, ptr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a part's chunk begins in a message, and its length, in elements of `ptr`."""
    start = (chunk * PARTS + part).to(tl.int64) * BLOCK
    count = tl.maximum(tl.minimum(nbytes - start, BLOCK), 0)
    return _offset(start, ptr), _offset(count, ptr)


@triton.jit
def _check_length(size, nbytes, writer, ctx):
    """Leave a record unless the writer's message has the `nbytes` that this rank expects."""
    length = tl.load(size)
    if length != nbytes:
        signal._run_out(size, writer, nbytes, length, ctx)


def default_mail(nbytes: int, size: int, num_sms: int) -> Config:
    """Choose for messages of `nbytes`, such that each program has more chunks than slots."""
    return default_config(nbytes // SLOTS.value, size, num_sms)


class Mail:
    """A rank's boxes and flags. All ranks make them together. They serve one stream at a time."""

    def __init__(self, world: World, name: str, config: Config) -> None:
        self.config = config
        self._world = world
        self._parts = max(config.programs // world.size, 1)
        channels = world.size * self._parts
        slots = channels * SLOTS.value
        self._boxes = world.empty((slots * config.block,), torch.uint8, f"{name}.boxes")
        self._sizes = world.empty((slots,), torch.int64, f"{name}.bytes")
        self._flags = world.signals(3 * channels + slots, f"{name}.flags")
        self._tables: dict[tuple[Message, ...], tuple[torch.Tensor, int]] = {}
        self._captured: dict[tuple[Message, ...], tuple[torch.Tensor, int]] = {}

    @property
    def workspaces(self) -> tuple[torch.Tensor, ...]:
        return self._boxes, self._sizes, self._flags

    def launch(self, x: torch.Tensor, out: torch.Tensor, messages: tuple[Message, ...]) -> None:
        """Send and receive one message per peer, from flat `x` and into flat `out`."""
        table, unit = self._table(messages)
        (boxes, source, result), aligned = _copy.as_words(unit, self._boxes, x, out)
        _mail_kernel[(self.config.programs,)](
            source, result, table, boxes, self._sizes, self._flags, self._world.ctx,
            SIZE=self._world.size, PARTS=self._parts, BLOCK=self.config.block, ALIGNED=aligned,
            TRACE=self._world.kernel_mode, num_warps=self.config.num_warps,
        )  # fmt: skip

    def _table(self, messages: tuple[Message, ...]) -> tuple[torch.Tensor, int]:
        """Put the messages into device memory, once; a captured table stays with the boxes."""
        capturing = self._boxes.is_cuda and torch.cuda.is_current_stream_capturing()
        found = self._tables.get(messages)
        if found is None:
            if capturing:
                raise ValueError(
                    "a message of these sizes is new: send it once before the capture, which can't "
                    "copy its sizes to the device"
                )
            if len(self._tables) >= _MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            unit = functools.reduce(operator.or_, (max(n, 0) for m in messages for n in m))
            table = torch.tensor(messages, dtype=torch.int64, device=self._world.device)
            found = self._tables[messages] = table, unit
        if capturing:
            self._captured[messages] = found
        return found


def messages(sent: Sequence[int], received: Sequence[int], nbytes: int) -> tuple[Message, ...]:
    """Return one message per peer, from splits in units of `nbytes`."""
    starts = [nbytes * n for n in accumulate(sent, initial=0)]
    places = [nbytes * n for n in accumulate(received, initial=0)]
    return tuple(
        (starts[peer], nbytes * sent[peer], places[peer], nbytes * received[peer])
        for peer in range(len(sent))
    )


# what a world has from the start, for messages between two ranks


def mailboxes(world: World, heap_size: int) -> Mail | None:
    """Make a new world's boxes. Return None if they would take too much of its heap."""
    most = heap_size // (_SHARE * SLOTS.value * world.size)
    if world.size == 1 or most < _SMALLEST:
        return None
    block = min(1 << (most.bit_length() - 1), _LARGEST)
    return Mail(world, "send_recv", Config(block, programs=1, num_warps=4))


def least_heap(size: int) -> int:
    """Return the bytes of the smallest heap that gives `size` ranks mailboxes."""
    return _SMALLEST * _SHARE * SLOTS.value * size
