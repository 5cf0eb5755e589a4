"""What is right only as compilers and GPUs of today have it.

A volatile load that counts on being atomic: on NVIDIA it is, on AMD it is not. A result that counts
on zeros in the lanes of a masked load or atomic that the language leaves undefined.
"""

from __future__ import annotations

from types import SimpleNamespace

from ..machine.tasks import Program
from ..machine.undefined import Stack
from .encounter import Encounter, Found
from .findings import AccessEvent, Finding, Rule

VOLATILE_FLAG = Rule(
    "portability",
    "volatile load of a flag",
    "a volatile load polls a flag: it is relaxed at system scope on NVIDIA, but a plain load on "
    "AMD; an error with --strict",
    'Poll with tl.atomic_add(flag, 0, sem="acquire", scope="sys"), or use sundog.device.signal.',
    is_strict=True,
)
UNDEFINED_LANES = Rule(
    "portability",
    "undefined lanes",
    "the result uses lanes that a masked load without `other`, or a masked atomic, leaves "
    "undefined, and is correct only if they are zero, as today's compilers leave them (an "
    "atomic's: only NVIDIA's); an error with --strict",
    "Load with other=0.0, or mask the values computed from these lanes.",
    is_strict=True,
)
RULES = [VOLATILE_FLAG, UNDEFINED_LANES]
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


def undefined_lanes(stack: Stack, program: Program, verb: str) -> Finding:
    """Return the remark about a load or atomic; `program` made it first."""
    who = SimpleNamespace(rank=program.rank, index=program.index, kernel=program.launch.name)
    event = AccessEvent(who, f"masked {verb}", False, False, tensor=True, stack=stack)
    why = "the function fails with other values there than zeros, and with zeros it does not"
    return UNDEFINED_LANES.finding(why, None, event.access("", ""))
