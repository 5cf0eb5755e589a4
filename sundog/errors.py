"""Every exception that sundog raises on purpose. A message has the numbers and the next step.

Wrong arguments raise `ValueError`; failures at run time raise a `SundogError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class SundogError(RuntimeError):
    """Something went wrong while a world was running."""


class NotSymmetric(ValueError):
    """The tensor is not a live allocation of this world's heap."""


class RankMismatch(SundogError):
    """Ranks that must agree passed different arguments."""


class HeapDivergence(RankMismatch):
    """Ranks made different sequences of heap calls, so equal offsets mean different tensors."""


class OutOfHeap(SundogError, MemoryError):
    """The heap has no free block of the requested size."""


class WorldClosed(SundogError):
    """The world was closed, or lost a rank, and can no longer be used."""


class PeerLost(SundogError):
    """Another rank died, raised, or did not arrive within the timeout; the message says which."""


class BadValue(SundogError):
    """Another rank's value is not data that sundog wrote. Nothing of it was run."""


class Deadlock(SundogError):
    """Nothing can run, and not all has finished. `waits` has an entry per waiting program."""

    def __init__(self, message: str, waits: list[object]) -> None:
        super().__init__(message)
        self.waits = waits

    def __reduce__(self) -> tuple:  # a rank in its own process sends it by pickle
        return Deadlock, (str(self), self.waits)


class Livelock(SundogError):
    """Programs run without end and repeat themselves; the message has their steps."""


class BadAccess(SundogError):
    """A kernel touched memory that is not in a live allocation."""


class KernelError(SundogError):
    """A kernel raised while it was simulated."""


class CannotInterpret(KernelError):
    """A kernel, or a program for GPUs, uses something that only a GPU can run or reach."""


@dataclass(frozen=True)
class WaitRecord:
    """The record that a kernel leaves when a bounded wait expires."""

    rank: int
    program: int
    flag: str  # allocation name and index
    expected: int
    seen: int
    peer: int  # the rank that owes the signal


class WaitTimeout(SundogError):
    """A wait inside a kernel expired. `record` says which one, and who owes the signal."""

    def __init__(self, message: str, record: WaitRecord) -> None:
        super().__init__(message)
        self.record = record

    def __reduce__(self) -> tuple:
        return WaitTimeout, (str(self), self.record)


class CaptureError(SundogError):
    """A call during a capture cannot be part of a graph: the call, its line, the reason."""

    def __init__(self, message: str, call: str, where: str, reason: str) -> None:
        super().__init__(message)
        self.call, self.where, self.reason = call, where, reason

    def __reduce__(self) -> tuple:
        return CaptureError, (str(self), self.call, self.where, self.reason)


class VariantFailed(SundogError):
    """One of several measured variants raised. `before` has the others' results until then."""

    def __init__(self, variant: str, reason: str, before: Any = None) -> None:
        super().__init__(f"{variant}: {reason}")
        self.variant, self.reason, self.before = variant, reason, before

    def __reduce__(self) -> tuple:
        return VariantFailed, (self.variant, self.reason, self.before)


class NotOrdered(SundogError):
    """One plan was used on two streams, and nothing orders the uses."""


class NotResident(SundogError):
    """Programs that wait for each other do not all fit on the GPU at once: they would hang."""


def by_rank(values: Sequence[object], ranks: Sequence[int] | None = None) -> str:
    """Return a line per rank, for messages about ranks that differ. `ranks`: those of a group."""
    numbers = range(len(values)) if ranks is None else ranks
    return "\n".join(f"  rank {n}: {value}" for n, value in zip(numbers, values, strict=True))
