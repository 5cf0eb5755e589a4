"""What a world needs of its backend, which provides ranks and memory (sundog/backends)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from .capture import BackendRecording, Graph
from .heap import Allocation
from .streams import Order

Ranks = tuple[int, ...]


class Exchange(enum.Enum):
    """What an exchange between hosts does besides carrying values. Its name is for messages."""

    VALUES = "exchange"  # it orders no memory
    PICKLED = "exchange with pickle=True"  # the same; its values may need pickle
    BARRIER = "barrier"  # every rank has waited for its streams: it orders all work on them


class Backend(Protocol):
    """One rank's view of its backend. The defaults are what most backends do."""

    name: str
    rank: int
    size: int
    device: torch.device
    num_sms: int
    guard: int = 0  # unused bytes after every allocation, so that overruns are noticed
    polls: int  # how often a wait in a kernel may poll
    bases: list[int]  # address of every rank's heap, as this rank's kernels see it
    flag_bases: list[int]  # the same for flags; they differ from `bases` only across a link
    stream_number: int = 0  # the current stream: set by `world.stream`
    order: Order  # what orders the uses of its streams
    graph: Graph | None = None  # the one being captured: set by `world.capture`
    owns_gpu: bool  # each rank that computes has a GPU to itself
    passive: bool = False  # it only plays its side of the protocol, while rank 0 is measured
    has_atomics: bool = True  # the links to all peers carry atomics

    def segment(self, rank: int, is_flags: bool = False) -> torch.Tensor:
        """Return a rank's data or flags as bytes, if the host can reach it (ValueError if not)."""

    def owns(self, address: int) -> bool:
        """Return whether an address is in this rank's heap, by which a launch finds its world."""
        if self.rank >= len(self.bases):  # not attached yet
            return False
        return 0 <= address - self.bases[self.rank] < self.segment(self.rank).numel()

    def copied_from(self, view: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's contiguous data in the form that torch gives to the copy engine."""
        return view

    def record(self, num_words: int) -> torch.Tensor | None:
        """Return zeroed int64 words in host memory that kernels can write; None to use the heap."""
        return None

    def exchange(
        self, value: Any, what: str, ranks: Ranks, channel: str, kind: Exchange = Exchange.VALUES
    ) -> list[Any]:
        """Return every member's value, in the order of `ranks`. A collective with a timeout."""

    def synchronize(self) -> None:
        """Wait until everything that this rank launched has ended."""

    def stream(self, number: int) -> AbstractContextManager[None]:
        """Put this rank's launches and torch operations on stream `number`, inside the block."""

    def record_event(self) -> Any:
        """Mark a point after everything that is on the current stream now."""

    def wait_event(self, event: Any) -> None:
        """Let the current stream wait for an event of this rank; the host does not."""

    def begin_capture(self) -> BackendRecording:
        """Record this rank's work from now on, without running it."""

    def relaunch(
        self, run: Callable[[], None], given: tuple[torch.Tensor, ...]
    ) -> Callable[[], bool] | None:
        """Run a call with these tensors. Return a function that starts its kernels again without
        any checks and returns whether it could, or None if the call does more than that.
        """

    def after_drain(self, check: Callable[[], None]) -> None:
        """Call `check` whenever the host has waited for its streams in order to use memory."""

    def allocated(self, base: int, allocation: Allocation) -> None:
        """Note that an allocation became live; `base` is where the heap it came from starts."""

    def freed(self, base: int, allocation: Allocation) -> None:
        """Note that an allocation was freed."""

    def fail(self, error: BaseException) -> None:
        """Leave with an error. From now on no rank waits for this one, nor this one for others."""

    def close(self) -> None:
        """Release everything. Called once."""
