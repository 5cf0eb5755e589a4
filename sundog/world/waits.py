"""The host's side of a kernel's context: the table that waits read, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..device import context
from ..errors import WaitRecord, WaitTimeout

__all__ = ["Waits", "table"]


def table(rank: int, deltas: list[tuple[int, int]], polls: int) -> list[int]:
    """The words of a context, but for where its record lies. `deltas`: of data and of flags."""
    first = context.DELTAS.value
    assert (first + 1, 2) == (context.FLAG_DELTAS.value, context.PER_PEER.value)
    words = [0] * first + [word for pair in deltas for word in pair]
    words[first - 2 : first] = [context.NOBODY] * 2
    words[context.RANK.value] = rank
    words[context.SIZE.value] = len(deltas)
    words[context.POLLS.value] = polls
    return words


class Waits:
    """One rank's waits: whether one ran out, and how to go on afterwards."""

    def __init__(self, ctx: torch.Tensor, record: torch.Tensor | None) -> None:
        here = context.RECORD_HERE.value
        own = ctx[here : here + context.RECORD_WORDS.value]
        self._ctx = ctx
        self._record = own if record is None else record
        self.expired = False

    @property
    def distance(self) -> int:
        """From the context to the record, in words."""
        return (self._record.data_ptr() - self._ctx.data_ptr()) // 8

    def raise_if_expired(self, rank: int, name_of: Callable[[int], str]) -> None:
        """WaitTimeout, once, if a wait of this rank has run out. Reads no device memory."""
        with torch._C.DisableTorchFunction():  # host memory: there is nothing to wait for
            words = self._record.tolist()
        if words[0] == 0 or self.expired:
            return
        self.expired = True
        _, program, address, expected, seen, peer = words
        record = WaitRecord(rank, program, name_of(address), expected, seen, peer)
        raise WaitTimeout(
            f"rank {rank}, program {program}: waited for {record.flag} to reach {expected}, "
            f"saw {seen}; rank {peer} owes the signal. Its waits end at once until every rank has "
            "called world.barrier(), which sets the flags back.",
            record,
        )

    def set_back(self, polls: int) -> None:
        """Waits are bounded by so many polls again, and none has run out."""
        self._ctx[context.POLLS.value] = polls
        self._ctx[context.TAKEN.value] = 0
        self._record.zero_()
        self.expired = False
