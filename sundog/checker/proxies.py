"""Descriptor loads of what was written since the kernel was launched, without a proxy fence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .encounter import Encounter, Found
from .findings import Rule

__all__ = ["NO_FENCE", "RULES", "look"]

NO_FENCE = Rule(
    "proxy",
    "no proxy fence",
    "a descriptor (TMA) loads data that was written after its kernel was launched, without the "
    "proxy fence",
    "Call sundog.device.proxy.fence() after the wait, or load by pointers.",
)
RULES = [NO_FENCE]


def look(here: Encounter) -> Iterable[Found]:
    if not here.event.proxy or here.event.writes:
        return ()
    return _unfenced(here)


def _unfenced(here: Encounter) -> Iterator[Found]:
    actor = here.event.actor
    for earlier in here.conflicts():
        own = earlier.event.proxy and earlier.event.actor is actor
        fenced = own or here.clocks.covers(actor.proxy, earlier.stamp)
        if here.is_ordered(earlier) and not fenced:
            why = (
                "the data was written after this kernel was launched, and a descriptor reads "
                "through another proxy, for which no fence stands between"
            )
            yield Found(NO_FENCE, why, earlier.event)
