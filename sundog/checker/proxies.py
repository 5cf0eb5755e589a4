"""Descriptor loads without a proxy fence, and plain accesses to what a descriptor has stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .encounter import Encounter, Found
from .findings import Rule
from .shadow import PastAccess

NO_FENCE = Rule(
    "proxy",
    "no proxy fence",
    "a descriptor (TMA) loads data that was written after its kernel was launched, without a "
    "proxy fence",
    "Call sundog.device.proxy.fence() after the wait, or load by pointers.",
)
READ_BACK = Rule(
    "proxy",
    "plain access after a descriptor store",
    "a program accesses through pointers data that its descriptor (TMA) stored: the store may not "
    "have arrived",
    "Keep the value, store by pointers, or read it after the end of this kernel.",
)
RULES = [NO_FENCE, READ_BACK]
UNUSUAL = True  # see rules.py


def look(here: Encounter) -> Iterable[Found]:
    if here.event.proxy:
        return () if here.event.writes else _unfenced(here)
    stored = [earlier for earlier in here.state.writes if earlier.event.proxy]
    return _read_back(here, stored) if stored else ()


def _read_back(here: Encounter, stored: list[PastAccess]) -> Iterator[Found]:
    for earlier in stored:
        if earlier.event.actor is here.event.actor:
            why = (
                "the descriptor's store goes through another proxy, and after it Triton waits "
                "until its shared memory is free again, not until the data has arrived"
            )
            yield Found(READ_BACK, why, earlier.event)


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
