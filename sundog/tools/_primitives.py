"""The primitives of a world, as the tools run them: barriers, send and receive.

Each rank passes its values to a neighbour, so that the right answer needs the primitive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..world.world import World

_NUMEL = 37
_MESSAGES = 6
Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Primitive:
    """`prepare(world)` gives a call: from this rank's values to those of its neighbour."""

    prepare: Callable[[World], Call]
    module: str  # that it is in
    step: int  # to the rank whose values the answer has
    can_capture: bool = True

    def inputs(self, world: World, seed: int) -> tuple[torch.Tensor]:
        """Draw a rank's random values, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed * 1000 + world.rank)
        values = torch.randint(-99, 99, (_NUMEL,), generator=generator)
        return (values.float().to(world.device),)

    def reference(self, rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[(rank + self.step) % len(xs)]

    def run_once(self, world: World) -> None:
        """Launch what one call launches, without comparing results."""
        self.prepare(world)(self.inputs(world, 0)[0])

    def exercise(self, world: World) -> None:
        """Call it three times in a row on fresh values, then compare."""
        call = self.prepare(world)
        given = [self.inputs(world, seed)[0] for seed in range(3)]
        wants = [self.reference(world.rank, world.exchange(x.cpu())) for x in given]
        for number, (got, want) in enumerate(zip(map(call, given), wants, strict=True)):
            if not torch.equal(got.cpu(), want):
                raise AssertionError(f"rank {world.rank}: call {number} gave {got}, not {want}")


def _barrier(name: str) -> Callable[[World], Call]:
    """Write, wait for the other ranks, and read what the right neighbour wrote."""

    def prepare(world: World) -> Call:
        buffer = world.empty((_NUMEL,), name="buffer")
        theirs = world.peer(buffer, (world.rank + 1) % world.size)
        world.barrier()  # every rank has allocated its buffer

        def call(x: torch.Tensor) -> torch.Tensor:
            buffer.copy_(x)
            getattr(world, name)()  # what I wrote, before what my neighbour reads
            result = theirs.clone()
            getattr(world, name)()  # what I read, before my neighbour writes again
            return result

        return call

    return prepare


def _send_recv(world: World) -> Call:
    """Send to the right neighbour, and receive from the left one.

    There are more messages than a mailbox has slots, so that a slot is used again.
    """

    def call(x: torch.Tensor) -> torch.Tensor:
        if world.size == 1:  # nobody to send to
            return x.clone()
        right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        sent = [world.send(part, right, async_op=True) for part in x.tensor_split(_MESSAGES)]
        out = torch.empty_like(x)
        for part in out.tensor_split(_MESSAGES):
            world.recv(part, left)
        for handle in sent:
            handle.wait()
        return out

    return call


PRIMITIVES = {
    "device_barrier": Primitive(
        _barrier("device_barrier"), "sundog.collectives.device_barrier", step=1
    ),
    "host barrier": Primitive(_barrier("barrier"), "sundog.world.world", step=1, can_capture=False),
    "send_recv": Primitive(_send_recv, "sundog.collectives.send_recv", step=-1),
}
