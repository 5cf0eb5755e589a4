"""What a rule looks at: an access, and the history of the bytes that it touches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..machine.accesses import Touch
from .clocks import Clocks
from .findings import AccessEvent, Rule
from .shadow import PastAccess, Span, State
from .signals import both_reach

__all__ = ["Encounter", "Found"]


class Encounter(NamedTuple):
    """An access and the state of bytes that share one history; a tile may have several of these."""

    event: AccessEvent
    state: State  # before the access
    clocks: Clocks
    span: Span
    touch: Touch  # the whole access

    def conflicts(self) -> Iterator[PastAccess]:
        """Yield the earlier accesses that need an order with this one."""
        event, state = self.event, self.state
        reads = state.reads if event.writes else ()
        for earlier in (*state.writes, *state.atomics, *reads):
            other = earlier.event
            if not (other.writes or event.writes):
                continue  # an atomic load
            both = other.atomic and event.atomic and other.size == event.size
            if not (both and both_reach(other, event)):
                yield earlier

    def is_ordered(self, earlier: PastAccess) -> bool:
        return self.clocks.knows(self.event.actor, earlier.stamp)


class Found(NamedTuple):
    """A broken rule. With `acquire` set it is a suspicion, which compiled code must confirm."""

    rule: Rule
    why: str
    earlier: AccessEvent | None = None
    acquire: AccessEvent | None = None
