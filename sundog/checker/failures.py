"""Rules that look at no single access: a run that failed, or fails with other undefined lanes, and
memory that is freed in use."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

from ..callsite import raised_at, relative
from ..errors import BadAccess, CannotInterpret, Deadlock, Livelock, SundogError, WaitTimeout
from ..machine.tasks import Program
from ..machine.undefined import Stack
from .clocks import Clock, Clocks
from .encounter import Found
from .findings import AccessEvent, Finding, Rule
from .idioms import chain
from .races import fault
from .shadow import State
from .signals import ACQUIRES, RELEASES
from .words import Message

BAD_ACCESS = Rule("bad access", "", "an access outside a live allocation, or to freed memory")
FREED_IN_USE = Rule(
    "bad access",
    "freed while a stream uses it",
    "memory is freed while a kernel on another stream of the rank may still use it: the next "
    "allocation may get it at once",
    "Free it after world.synchronize(), or after the current stream has waited for an event of "
    "the other stream.",
)
DEADLOCK = Rule(
    "deadlock",
    "",
    "nothing can run; the report says who waits for what, where, and who could end the wait",
    "Follow the waits above.",
)
NOT_RESIDENT = Rule(
    "deadlock",
    "needs resident programs",
    "programs wait for others of their kernel that are not resident yet: the kernel ends only "
    "if more of them run at once",
    "Launch at most world.num_sms programs, pass launch_cooperative_grid=True, or let programs "
    "wait only for earlier ones.",
)
LIVELOCK = Rule(
    "livelock",
    "",
    "programs repeat the same steps forever; the report lists these steps",
    "Make one of them wait for a step that another one is certain to take.",
)
TORN_TILE = Rule(
    "wrong result",
    "tile atomic taken for one",
    "a tile atomic is one atomic per element: another program saw only some of the elements that "
    "it wrote",
    "Put values that belong together into one word of at most 64 bits, or signal the whole tile by "
    "a scalar release after tl.debug_barrier().",
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
WRONG_RESULT = Rule("wrong result", "", "an assertion of the rank's function fails")
ERROR = Rule("error", "", "a kernel or a host raises an exception", is_verdict=False)
CANNOT_INTERPRET = Rule(
    "error",
    "cannot be interpreted",
    "a kernel or a program uses a feature that the simulator lacks; the exit status is 2",
    is_verdict=False,
)
_SHOWN = 8  # stale reads
_WEAK = "Write with release and read with acquire where one atomic must be seen before another."
_TOTAL = (
    "These release and acquire, and still two programs may each miss what the other one wrote just "
    'before. Give the write and the read sem="acq_rel", or put a fence.sc between them.'
)

RULES = [
    BAD_ACCESS, FREED_IN_USE, DEADLOCK, NOT_RESIDENT, LIVELOCK, TORN_TILE, UNDEFINED_LANES,
    WRONG_RESULT, ERROR, CANNOT_INTERPRET,
]  # fmt: skip


def find_failure(
    error: Exception | SystemExit,
    rank: int | None,
    stale: list[Missed] | None = None,
    all_started: bool = True,
    torn: list[str] | None = None,
) -> Finding:
    """Return the finding of what ended a run; `rank` is the one whose host raised it, if any.

    `stale` names the reads that returned an older value than the newest: a cause that the error
    itself does not show; `torn` those of tiles that saw a part of what another tile wrote.
    `all_started`: no kernel had programs that were still to become resident.
    """
    finding = _find(error, rank)
    if isinstance(error, Deadlock) and not all_started:
        finding = NOT_RESIDENT.finding(str(error))
    if torn and finding.kind == TORN_TILE.kind:
        finding = TORN_TILE.finding("\n".join([finding.why, *torn[-_SHOWN:]]))
    if stale and finding.kind in (WRONG_RESULT.kind, DEADLOCK.kind):
        shown = [missed.text for missed in stale[-_SHOWN:]]
        more = f" ({len(stale) - _SHOWN} more)" if len(stale) > _SHOWN else ""
        finding.why += "\n".join(
            [f"\nolder values were read, as nothing orders them{more}:", *shown]
        )
        weak = any(missed.is_weak for missed in stale)
        finding.suggestion = finding.suggestion or (_WEAK if weak else _TOTAL)
    return finding


class Missed(NamedTuple):
    """An atomic that read an older value than the newest."""

    text: str
    is_weak: bool  # it does not acquire, or the write that it missed does not release


def stale_read(event: AccessEvent, word: str, read: Message, newest: Message) -> Missed:
    """Say which atomic read an older value, which write it missed, and the signal that is weak."""
    writer = newest.event
    missed = f", not {_number(newest)}"
    if writer is not None:
        missed += f", which {_who(writer)} wrote at {_at(writer)}{_weak_signal(event, writer)}"
    text = f"  {_who(event)} at {_at(event)} ({event.sem}) read {word} = {_number(read)}{missed}"
    strong = event.sem in ACQUIRES and writer is not None and writer.sem in RELEASES
    return Missed(text, not strong)


def _weak_signal(event: AccessEvent, writer: AccessEvent) -> str:
    """Name the signal of the writer that the reader has read, if that made no order."""
    heard = event.actor.heard.get(writer.actor)
    if heard is None or (rule := fault(heard)) is None:
        return ""
    signal = heard.signal.event
    return (
        f"; it read the signal of {chain(signal)} ({signal.sem}, {heard.signal.scope}) at "
        f"{chain(heard.event)} ({heard.event.sem}, {heard.scope}): {rule.name}"
    )


def torn_read(event: AccessEvent, writer: AccessEvent) -> str:
    """Say which tile atomic read a part of which other one."""
    return (
        f"{_who(event)} at {_at(event)} read some of the elements that {_who(writer)} wrote at "
        f"{_at(writer)} in one tile atomic, and older values of the others: each element is an "
        "atomic of its own"
    )


def _who(event: AccessEvent) -> str:
    return f"rank {event.actor.rank} program {event.actor.index}"


def _at(event: AccessEvent) -> str:
    path, line, _ = event.where
    return f"{relative(path)}:{line}"


def _number(message: Message) -> int:
    return int.from_bytes(message.value, sys.byteorder, signed=True)


def _find(error: Exception | SystemExit, rank: int | None) -> Finding:
    who = f"rank {rank}: " if rank is not None else ""
    if isinstance(error, Deadlock):
        return DEADLOCK.finding(str(error))
    if isinstance(error, Livelock):
        return LIVELOCK.finding(str(error))
    if isinstance(error, CannotInterpret | ImportError):
        return CANNOT_INTERPRET.finding(_why_not(error, who))
    if isinstance(error, BadAccess):
        return BAD_ACCESS.finding(str(error))
    if isinstance(error, WaitTimeout):  # no wait runs out in a check: this one left too early
        return WRONG_RESULT.finding(str(error))
    if isinstance(error, AssertionError):
        path, line, _ = raised_at(error)
        text = str(error) or linecache.getline(path, line).strip()
        return WRONG_RESULT.finding(f"{who}{_where(error)}{text}")
    kind = type(error).__name__
    text = str(error) if isinstance(error, SundogError) else f"{kind}: {error}"
    return ERROR.finding(f"{who}{_where(error)}{text}")


def _why_not(error: CannotInterpret | ImportError, who: str) -> str:
    """Say why nothing can be checked. A kernel's error names its line itself."""
    path, line, _ = raised_at(error)
    place = f"{who}{relative(path)}:{line}: " if who else ""
    if not isinstance(error, ImportError):
        return f"{place}{error}"
    return f"{place}{error}. Install it, or put a stand-in for it on PYTHONPATH"


def _where(error: BaseException) -> str:
    """Return the line of theirs that raised it; nothing for a kernel's error, which has its own."""
    path, line, _ = raised_at(error)
    return f"{relative(path)}:{line}: " if line else ""


def find_uses(
    states: list[State], event: AccessEvent, clocks: Clocks, host: Clock
) -> Iterator[Found]:
    """Yield the accesses of this rank that neither its host nor its current stream waited for."""
    for state in states:
        for earlier in (*state.writes, *state.reads, *state.atomics):
            if earlier.event.actor.rank != event.actor.rank:
                continue
            if clocks.knows(event.actor, earlier.stamp) or clocks.covers(host, earlier.stamp):
                continue
            yield Found(
                FREED_IN_USE,
                f"the {earlier.event.verb} was put on another stream, and neither the host nor the "
                "stream that is current at the free has waited for it",
                earlier.event,
            )


def undefined_lanes(stack: Stack, program: Program, verb: str) -> Finding:
    """Return the remark about a load or atomic; `program` made it first."""
    who = SimpleNamespace(rank=program.rank, index=program.index, kernel=program.launch.name)
    event = AccessEvent(who, f"masked {verb}", False, False, tensor=True, stack=stack)
    why = "the function fails with other values there than zeros, and with zeros it does not"
    return UNDEFINED_LANES.finding(why, None, event.access("", ""))
