"""Send and receive: one message between two ranks, through the receiver's mailbox (_mailbox.py).

Only the two ranks take part, so the boxes are made with the world. All sends of a rank run in order
on one stream, and all receives on another; by default the current stream waits for them. `send` of
a message of up to four chunks ends without the receive; a longer one ends with it.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops.dispatch import ASYNC_STREAM, check_contiguous, on_stream, packed
from ..ops.op import World, checked_tensor
from ._mailbox import NOTHING, Mail, Message, least_heap

SEND_STREAM, RECV_STREAM = ASYNC_STREAM, ASYNC_STREAM + 1


def send(world: World, x: torch.Tensor, dst: int, *, async_op: bool = False) -> Any:
    """Send `x` to rank `dst`, which receives as many bytes, like torch's send (or isend).

    Two ranks that both send a long message before they receive wait for each other forever, as with
    torch: let one of them receive first, or pass `async_op`.
    """
    mail, dst = _mail(world, "send", dst)
    x = packed(world, "send", x)
    told = _only(world, dst, (0, x.numel() * x.itemsize, 0, NOTHING))
    flat = x.view(-1)
    handle = on_stream(world, SEND_STREAM, lambda: mail.launch(flat, flat, told), x)
    return handle if async_op else handle.wait()


def recv(world: World, out: torch.Tensor, src: int, *, async_op: bool = False) -> Any:
    """Receive `out` from rank `src` and return it, like torch's recv (`async_op`: irecv)."""
    mail, src = _mail(world, "recv", src)
    check_contiguous("recv", out=checked_tensor(out))
    told = _only(world, src, (0, NOTHING, 0, out.numel() * out.itemsize))
    flat = out.view(-1)

    def run() -> torch.Tensor:
        mail.launch(flat, flat, told)
        return out

    handle = on_stream(world, RECV_STREAM, run)
    return handle if async_op else handle.wait()


def _mail(world: World, verb: str, peer: int) -> tuple[Mail, int]:
    world._check_open()
    peer = world._check_rank(peer)
    if peer == world.rank:
        raise ValueError(f"{verb}: rank {peer} is this rank; copy the tensor")
    if world._mail is None:
        raise ValueError(
            f"{verb}: this world's heap, {world._heap.capacity:,} bytes, is too small for "
            f"mailboxes of {world.size} ranks; open it with a larger heap_size, at least "
            f"{least_heap(world.size):,}"
        )
    return world._mail, peer


def _only(world: World, peer: int, message: Message) -> tuple[Message, ...]:
    nothing = (0, NOTHING, 0, NOTHING)
    return tuple(message if rank == peer else nothing for rank in range(world.size))
