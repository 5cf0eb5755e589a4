"""Which uses of a rank's streams come behind which, as far as its host has arranged it.

For one question: may a plan be called on this stream now, or could its last use, on another stream,
still be running? Two uses of one plan at a time would share its flags and workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from .capture import Graph

__all__ = ["Event", "Order", "Use"]

Use = tuple[int, int]  # stream, count


@dataclass(frozen=True)
class Event:
    """What `world.record_event` returns: the backend's event, and what it is behind."""

    inner: object
    behind: dict[int, int]


@dataclass
class Order:
    """Of one rank. Uses are counted; a stream is behind some of each stream's uses."""

    count: int = 0
    finished: int = 0  # all uses up to here have ended
    behind: dict[int, dict[int, int]] = field(default_factory=dict)
    graphs: WeakSet[Graph] = field(default_factory=WeakSet)  # that may be replayed

    def use(self, stream: int) -> Use:
        self.count += 1
        self.behind.setdefault(stream, {})[stream] = self.count
        return stream, self.count

    def is_behind(self, stream: int, use: Use) -> bool:
        """Does what is put on the stream now come after that use?"""
        return use[1] <= max(self.finished, self.behind.get(stream, {}).get(use[0], 0))

    def of(self, stream: int) -> dict[int, int]:
        return dict(self.behind.get(stream, {}))

    def learn(self, stream: int, behind: dict[int, int]) -> None:
        own = self.behind.setdefault(stream, {})
        for other, count in behind.items():
            own[other] = max(own.get(other, 0), count)

    def synchronize(self) -> None:
        """The host has waited for all streams."""
        self.finished = self.count
