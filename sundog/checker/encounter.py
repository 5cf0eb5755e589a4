"""What a rule looks at: an access, and the history of the bytes that it touches."""

from __future__ import annotations

from typing import NamedTuple

from ..machine.accesses import Touch
from .clocks import Clocks
from .findings import AccessEvent, Rule
from .scopes import both_reach
from .shadow import PastAccess, Span, State
from .words import VOLATILE_TILE


class Encounter(NamedTuple):
    """An access and the state of bytes that share one history; a tile may have several of these."""

    event: AccessEvent
    state: State  # before the access
    clocks: Clocks
    span: Span
    touch: Touch  # the whole access

    def conflicts(self) -> list[PastAccess]:
        """Return the earlier accesses that need an order with this one."""
        event, state = self.event, self.state
        found = [*state.writes, *state.reads] if event.writes else list(state.writes)
        for earlier in state.atomics:
            other = earlier.event
            if event.atomic and other.size == event.size and both_reach(other, event):
                continue
            if other.writes or event.writes:  # else both are loads
                found.append(earlier)
        return found

    def is_ordered(self, earlier: PastAccess) -> bool:
        return self.clocks.knows(self.event.actor, earlier.stamp) or self._is_validated(earlier)

    def payloads(self) -> list[PastAccess]:
        """Return the stores of other programs that this volatile load of a tile reads whole.

        Such a word validates itself: its payload is its flag (Lamport). It publishes nothing else.
        """
        return [each for each in self.state.writes if _are_of_a_word(each.event, self.event)]

    def _is_validated(self, earlier: PastAccess) -> bool:
        """Return whether they load and store such a word, or it is overwritten after its reader."""
        event, other = self.event, earlier.event
        if _are_of_a_word(other, event) or _are_of_a_word(event, other):
            return True
        return (event.writes and not event.atomic) and any(
            _are_of_a_word(other, past.event) and self.clocks.knows(event.actor, past.stamp)
            for past in self.state.atomics
        )


def _are_of_a_word(store: AccessEvent, load: AccessEvent) -> bool:
    """Return whether these are one program's tile of stores and another's tile of volatile loads.

    Each word of them must be loaded whole. A single word is a flag more often than a payload.
    """
    if (store.verb, load.verb) != ("store", VOLATILE_TILE) or not store.tensor:
        return False
    return store.actor is not load.actor and store.size <= 8 and store.size % load.size == 0


class Found(NamedTuple):
    """A broken rule. With `acquire` set it is a suspicion, which compiled code must confirm."""

    rule: Rule
    why: str
    earlier: AccessEvent | None = None
    acquire: AccessEvent | None = None
