"""Volatile loads that count on being atomic: on NVIDIA they are, on AMD they are not."""

from __future__ import annotations

from collections.abc import Iterator

from .encounter import Encounter, Found
from .findings import AccessEvent, Rule

__all__ = ["RULES", "VOLATILE_FLAG", "look", "watches"]

VOLATILE_FLAG = Rule(
    "portability",
    "volatile load of a flag",
    "a volatile load polls what others write: relaxed at system scope on NVIDIA, a plain load on "
    "AMD; an error with --strict",
    'Poll with tl.atomic_add(flag, 0, sem="acquire", scope="sys"), or use sundog.device.signal.',
    is_strict=True,
)
RULES = [VOLATILE_FLAG]
_VERB = "volatile load"


def watches(event: AccessEvent) -> bool:
    return event.atomic


def look(here: Encounter) -> Iterator[Found]:
    event = here.event
    for earlier in here.state.atomics:
        other = earlier.event
        volatile = event.verb.startswith(_VERB) or other.verb.startswith(_VERB)
        if not volatile or not (event.writes or other.writes):
            continue
        if not here.is_ordered(earlier):
            why = "nothing orders them, and only one of them is atomic on AMD"
            yield Found(VOLATILE_FLAG, why, other)
