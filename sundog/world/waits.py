"""The host's side of a kernel's context: the table that waits read, and the record that they leave.

A wait that expires leaves a record there; the host finds it and raises WaitTimeout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from ..device import context, signal
from ..errors import WaitRecord, WaitTimeout
from .heap import ALIGNMENT

SIGNALS = ("atomic", "store")  # how a kernel sets a flag of a peer: device/signal.py
RAISED = 2  # first word of a record that the host has raised; a kernel writes 1


def signal_form(asked: str, device: torch.device, has_atomics: bool) -> int:
    """Return the form of signals for `world.kernel_mode`; for "", stores if peers lack atomics."""
    if (asked or SIGNALS[not has_atomics]) == "atomic":
        return 0
    is_amd = device.type == "cuda" and torch.version.hip is not None
    return int((signal.STORE_AMD if is_amd else signal.STORE).value)


def table(rank: int, deltas: list[tuple[int, int]], polls: int) -> list[int]:
    """Return a context's words up to its record. `deltas` are those of data and of flags."""
    first = context.DELTAS.value
    assert (first + 1, 2) == (context.FLAG_DELTAS.value, context.PER_PEER.value)
    # device.memory.moved drops what is below 256 bytes.
    assert not any(data % ALIGNMENT for data, _ in deltas), f"heaps lie {deltas} bytes apart"
    words = [0] * first + [word for pair in deltas for word in pair]
    words[first - 2 : first] = [context.NOBODY] * 2
    words[context.RANK.value] = rank
    words[context.SIZE.value] = len(deltas)
    words[context.POLLS.value] = polls
    return words


class Waits:
    """One rank's waits: whether one expired, and how to go on afterwards."""

    def __init__(self, ctx: torch.Tensor, record: torch.Tensor | None) -> None:
        here = context.RECORD_HERE.value
        own = ctx[here : here + context.RECORD_WORDS.value]
        self._ctx = ctx
        self._record = own if record is None else record
        # Every call reads this word in host memory, which takes 30 ns by ctypes.
        self.word = ctypes.c_int64.from_address(self._record.data_ptr())
        self.error: WaitTimeout | None = None  # the one that was raised, until the world recovers

    @property
    def distance(self) -> int:
        """The words from the context to the record."""
        return (self._record.data_ptr() - self._ctx.data_ptr()) // 8

    def raise_if_expired(
        self,
        member: int,
        ranks: Sequence[int],
        name_of: Callable[[int], str],
        doing: Callable[[], str],
    ) -> None:
        """Raise WaitTimeout, once, if a wait of this rank has expired. It reads no device memory.

        Kernels number ranks within their group; the error numbers them as the world does.
        """
        if self.word.value == 0 or self.error is not None:
            return
        with torch._C.DisableTorchFunction():  # host memory: there is nothing to wait for
            _, program, address, expected, seen, owing = self._record.tolist()
        self.word.value = RAISED
        rank, peer = ranks[member], ranks[owing] if 0 <= owing < len(ranks) else owing
        record = WaitRecord(rank, program, name_of(address), expected, seen, peer)
        text = _refusal(record) if expected < 0 else f"{_expiry(record)}{doing()}"
        self.error = WaitTimeout(text, record)
        raise self.error

    def set_back(self, polls: int) -> None:
        """Bound waits by that many polls again, and clear the record."""
        self._ctx[context.POLLS.value] = polls
        self._ctx[context.TAKEN.value] = 0
        self._record.zero_()
        self.error = None


def _refusal(record: WaitRecord) -> str:
    """Say what device/signal.py's `refuse` left."""
    return (
        f"rank {record.rank}, program {record.program}: {record.flag} is {record.seen}, outside 0 "
        f"to {-1 - record.expected}: what this call gave is not complete. Change what you pass, "
        "then call world.barrier() on every rank to go on."
    )


def _expiry(record: WaitRecord) -> str:
    return (
        f"rank {record.rank}, program {record.program}: waited for {record.flag} to reach "
        f"{record.expected}, saw {record.seen}; rank {record.peer} owes the signal. Further waits "
        "on this rank return immediately until every rank calls world.barrier(), which resets the "
        "flags."
    )
