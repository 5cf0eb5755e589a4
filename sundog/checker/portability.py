"""A volatile load that counts on being atomic: on NVIDIA it is, on AMD it is not."""

from __future__ import annotations

from .encounter import Encounter, Found
from .findings import AccessEvent, Rule

VOLATILE_FLAG = Rule(
    "portability",
    "volatile load of a flag",
    "a volatile load polls a flag: it is relaxed at system scope on NVIDIA, but a plain load on "
    "AMD; an error with --strict",
    'Poll with tl.atomic_add(flag, 0, sem="acquire", scope="sys"), or use sundog.device.signal.',
    is_strict=True,
)
RULES = [VOLATILE_FLAG]
UNORDERED = True  # see rules.py
_VERB = "volatile load"


def watches(event: AccessEvent) -> bool:
    return event.atomic


def look(here: Encounter) -> list[Found]:
    event, why = here.event, "nothing orders them, and only one of them is atomic on AMD"
    return [
        Found(VOLATILE_FLAG, why, earlier.event)
        for earlier in here.state.atomics
        if (event.verb.startswith(_VERB) or earlier.event.verb.startswith(_VERB))
        and (event.writes or earlier.event.writes)
        and not here.is_ordered(earlier)
    ]
