"""Races: two accesses to the same bytes that nothing orders, and which edge is missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from .encounter import Encounter, Found
from .findings import SILENCE, AccessEvent, Rule
from .idioms import chain, idiom, wider
from .scopes import both_reach
from .shadow import PastAccess, bounds
from .signals import Heard

BARRIER_BEFORE = Rule(
    "race",
    "no CTA barrier before the release",
    "a tile was accessed since the last CTA barrier: the release that follows does not publish it",
    "Put tl.debug_barrier() between the tile and the release, or use sundog.device.signal.",
)
BARRIER_AFTER = Rule(
    "race",
    "no CTA barrier after the acquire",
    "each lane of a tensor atomic acquires for its own thread; the others learn at a CTA barrier",
    "Put tl.debug_barrier() after the tensor atomic, or use sundog.device.signal.wait_all.",
)
SCOPE = Rule(
    "race",
    "scope does not reach",
    "the scope of an atomic does not include the other side",
    'Use scope="sys" between ranks and scope="gpu" between programs.',
)
RELAXED_ACQUIRE = Rule(
    "race",
    "relaxed acquire",
    "the signal was read without acquire, so nothing after the read is ordered",
    'Poll with sem="acquire", or use sundog.device.signal.wait.',
)
RELAXED_RELEASE = Rule(
    "race",
    "relaxed release",
    "the signal was sent without release, so it publishes nothing",
    'Signal with sem="release" after tl.debug_barrier(), or use signal.signal.',
)
PLAIN_FLAG = Rule(
    "race",
    "plain access to a flag",
    "a word is accessed both by atomics and by plain loads or stores",
    "Access flags by atomics only, or use sundog.device.signal.",
)
DESCRIPTOR_STORE = Rule(
    "race",
    "descriptor store before the release",
    "no release publishes what a descriptor (TMA) stores or adds",
    "Store signalled data through pointers, or read it after the end of this kernel.",
)
NO_ORDER = Rule(
    "race",
    "no order",
    "no signal, barrier or launch orders the two accesses",
    "Order them: signal and wait between programs, wait for a done flag before reusing a buffer, "
    "call world.barrier() between hosts.",
)
WIDTH = Rule(
    "race",
    "different widths",
    "two overlapping atomics have different sizes, so they are not atomic to each other",
    "Write and poll a flag with pointers to the same type.",
)
EARLY_LAUNCH = Rule(
    "race",
    "launch_pdl without its wait",
    "a kernel launched with launch_pdl=True starts before the previous kernel has ended",
    "Call tl.extra.cuda.gdc_wait() before the access, or launch without launch_pdl.",
)
PAYLOAD = Rule(
    "race",
    "self-validating word for other data",
    "a word that validates itself (its payload is its flag) publishes nothing but itself",
    'Put all data into such words, or signal with sem="release" and wait with sem="acquire".',
)
KERNEL_BOUNDARY = Rule(
    "kernel boundary",
    "relies on the kernel boundary",
    "a relaxed or volatile signal in a later kernel is all that orders data of an earlier kernel; "
    "an error with --strict",
    'Signal with sem="release" and wait with sem="acquire", or use sundog.device.signal.',
    is_strict=True,
)
UNORDERED = True  # see rules.py
_LONGEST_CHAIN = 16  # signals

RULES = [
    BARRIER_BEFORE, BARRIER_AFTER, SCOPE, RELAXED_ACQUIRE, RELAXED_RELEASE, PLAIN_FLAG,
    DESCRIPTOR_STORE, NO_ORDER, WIDTH, EARLY_LAUNCH, PAYLOAD, KERNEL_BOUNDARY,
]  # fmt: skip
_LACKS = {
    RELAXED_RELEASE: "release", RELAXED_ACQUIRE: "acquire", PLAIN_FLAG: "acquire", SCOPE: "scope",
    BARRIER_BEFORE: "barrier before", BARRIER_AFTER: "barrier after",
}  # fmt: skip


def look(here: Encounter) -> list[Found]:
    return [
        Found(*_explain(here, earlier), earlier.event)
        for earlier in here.conflicts()
        if not here.is_ordered(earlier)
    ]


def _explain(here: Encounter, old: PastAccess) -> tuple[Rule, str]:
    """Say which edge is missing between an earlier access and this one."""
    event = here.event
    actor, other = event.actor, old.event.actor
    unwaited = getattr(actor, "unwaited", None)
    if unwaited is not None and here.clocks.covers(unwaited, old.stamp):
        return EARLY_LAUNCH, (
            "the kernel before this one made the first access, and this one was launched with "
            "launch_pdl=True and has not called gdc_wait(): the first may not have ended"
        )
    if old.event.atomic and event.atomic and old.event.size != event.size:
        return WIDTH, (
            f"one has {old.event.size} bytes, the other {event.size}: they overlap only in part, "
            "so they are not atomic to each other"
        )
    if old.event.atomic and event.atomic:
        return SCOPE, (
            f"both are atomic, but scope {old.event.scope} and scope {event.scope} do not both "
            f"reach both programs, so they are not atomic to each other{wider(old.event, event)}"
        )
    heard, learner = actor.heard.get(other), actor
    if heard is None:
        heard, learner = _heard_through(actor, other)
    boundary = _boundary(here, old, heard, learner)
    if boundary is not None:
        return KERNEL_BOUNDARY, (
            f"the signal at {chain(boundary.signal.event)} ({_order(boundary)}) was read at "
            f"{chain(boundary.event)} ({boundary.event.sem}), and the {old.event.verb} was made "
            "before the signalling kernel began: the memory model gives no order, the end of a "
            "kernel gives one on today's GPUs"
        )
    if heard is None:
        heard = next(_heard_of_later_kernels(here, old), None)
    mixed = old.event.atomic != event.atomic
    if heard is not None and not (mixed and _is_on(heard, here)):
        if _ended_with(heard, learner, old):
            return KERNEL_BOUNDARY, (
                f"the signal at {chain(heard.signal.event)} ({heard.signal.event.sem}) was read at "
                f"{chain(heard.event)} ({heard.event.sem}) by a kernel that ended, and a later one "
                "on its stream relies on it: the memory model gives no order, the end of a kernel "
                "gives one on today's GPUs"
            )
        rule, why = _explain_heard(heard, old, learner)
        weak = _LACKS.get(rule, "")
        if rule is PLAIN_FLAG and not heard.signal.event.atomic:
            weak = "release"
        if rule is BARRIER_BEFORE and heard.signal.is_fenced:
            weak = "barrier before fence"
        return rule, why + idiom(heard.signal.event, heard.event, weak)
    if mixed:
        return PLAIN_FLAG, (
            "one side is atomic, the other is a plain access: a plain one makes no order and is "
            "not atomic to anything"
        )
    return NO_ORDER, _explain_silence(other, old)


def _explain_silence(other: Any, old: PastAccess) -> str:
    """Say that nothing was heard; a signal that nobody on the way read is named."""
    sent = getattr(other, "sent", None)
    if sent is not None and sent.step >= old.step:
        return (
            f"the other side signalled at {chain(sent.event)} after its access, but this program "
            "has not read that signal, nor one that follows from it"
        )
    return SILENCE


def _is_boundary(heard: Heard) -> bool:
    """Return whether only a signal's semantics are too weak: it is atomic, its scope reaches."""
    if not heard.event.atomic:
        return False
    if heard.signal.validates_itself:
        return True
    if not both_reach(heard.signal.event, heard.event):
        return False
    return fault(heard) in (RELAXED_RELEASE, RELAXED_ACQUIRE, SCOPE)  # scope: of a fence


def _waited(heard: Heard, learner: Any) -> bool:
    """Return whether a load after the poll is made after it, on today's GPUs if not in the model.

    By an acquire, by a CTA barrier between them, or by the end of the kernel that polled.
    """
    if heard.acquires or heard.signal.validates_itself or heard.event.actor is not learner:
        return True
    return bool(learner.met >= heard.barriers)


def _ended_with(heard: Heard, learner: Any, old: PastAccess) -> bool:
    """Return whether a kernel before the learner's read what published the access, unacquired.

    The learner may be in the middle of a chain: a poll of its own kernel has no boundary after it.
    """
    signal = heard.signal
    if heard.event.actor is learner or signal.actor is not old.event.actor:
        return False
    if not _is_boundary(heard) or fault(heard) is not RELAXED_ACQUIRE:
        return False
    by_tile = old.event.tensor and old.stamp[1] >= signal.barriers
    return old.step <= signal.step and not by_tile and not old.event.proxy


def _heard_through(actor: Any, other: Any) -> tuple[Heard | None, Any]:
    """Find the faulty link in the shortest chain of signals, and the actor that learns by it.

    Without a fault it is the first link: what it published does not cover the access.
    """
    paths: dict[Any, list[tuple[Heard, Any]]] = {actor: []}
    queue = deque([actor])
    while queue and other not in paths:
        learner = queue.popleft()
        for sender, heard in getattr(learner, "heard", {}).items():
            if sender not in paths and len(paths[learner]) < _LONGEST_CHAIN:
                paths[sender] = [(heard, learner), *paths[learner]]
                queue.append(sender)
    chain = paths.get(other, [])
    for heard, learner in chain:
        if fault(heard) or heard.signal.actor in getattr(learner, "pending_from", {}):
            return heard, learner
    return chain[0] if len(chain) > 2 else (None, actor)


def _boundary(here: Encounter, old: PastAccess, heard: Heard | None, learner: Any) -> Heard | None:
    """Find a signal of a later kernel that was waited for, and whose semantics alone are too weak.

    It counts whatever else the program that made the access has signalled.
    """
    actor, mixed = here.event.actor, old.event.atomic != here.event.atomic
    found = [(each, actor) for each in _heard_of_later_kernels(here, old)]
    if heard is not None and _is_later(heard, here, old):
        found.append((heard, learner))
    for each, by in found:
        waited = here.event.writes or _waited(each, by)
        if waited and _is_boundary(each) and not (mixed and _is_on(each, here)):
            return each
    return None


def _heard_of_later_kernels(here: Encounter, old: PastAccess) -> Iterator[Heard]:
    """Yield what was heard of programs whose kernels began after the old access."""
    return (each for each in here.event.actor.heard.values() if _is_later(each, here, old))


def _is_later(heard: Heard, here: Encounter, old: PastAccess) -> bool:
    """Return whether the kernel that signalled began after the old access."""
    return here.clocks.covers(heard.signal.actor.begun or {}, old.stamp)


def _is_on(heard: Heard, here: Encounter) -> bool:
    """Return whether a signal is a word of the bytes that are looked at."""
    lo, hi = bounds(here.span)
    return any(lo <= address < hi for address in heard.signal.addresses)


def fault(heard: Heard) -> Rule | None:
    """Say why a signal that was heard made no order; None if it made one."""
    if heard.signal.validates_itself and heard.event.atomic:
        return PAYLOAD
    if not (heard.event.atomic and heard.signal.event.atomic):
        return PLAIN_FLAG
    if not heard.signal.releases:
        return RELAXED_RELEASE
    if not heard.acquires:
        return RELAXED_ACQUIRE
    return None if both_reach(heard.signal, heard) else SCOPE


def _explain_heard(heard: Heard, old: PastAccess, actor: Any) -> tuple[Rule, str]:
    signal, event = heard.signal.event, heard.event
    flag = f"the signal at {chain(signal)} was read at {chain(event)}"
    broken = fault(heard)
    if broken is SCOPE:
        sent, read = _reach(heard.signal.scope, signal), _reach(heard.scope, event)
        scopes = f"signalled with {sent}, read with {read}"
        return broken, f"{flag}, but {scopes}: that does not reach the other side"
    if broken is PAYLOAD:
        word = f"the word stored at {chain(signal)} was read at {chain(event)}"
        return broken, f"{word} by a volatile load: it validates itself, and publishes nothing else"
    if broken is RELAXED_RELEASE:
        return broken, f"{flag}, but it is {signal.sem}: it publishes nothing"
    if broken is RELAXED_ACQUIRE:
        return broken, f"{flag}, but that is {event.sem}: nothing after it is ordered"
    if broken is not None and event.atomic:
        return broken, f"{flag}, but it is a plain store: it publishes nothing"
    if broken is not None:
        return broken, f"{flag} by a plain load: nothing after it is ordered"
    if heard.signal.actor in getattr(actor, "pending_from", {}):
        return BARRIER_AFTER, (
            f"{flag} by a tensor atomic: each lane learnt for its own thread only, and no CTA "
            "barrier stands between it and this access by all threads"
        )
    if old.event.proxy and old.event.writes:
        return DESCRIPTOR_STORE, (
            f"{flag}, but what a descriptor writes is published by no release: after it Triton "
            "waits until its shared memory is free again, not until the data has arrived"
        )
    own = old.event.actor is heard.signal.actor
    if own and old.step > heard.signal.step:
        return NO_ORDER, f"{flag}, but the {old.event.verb} comes after that signal, not before"
    if own and old.event.tensor and old.stamp[1] >= heard.signal.barriers:
        release, by = "signal", "the release, made by one thread,"
        if heard.signal.is_fenced:
            release, by = "fence before the signal", "the fence, which is each thread's own,"
        return BARRIER_BEFORE, (
            f"{flag}, but no CTA barrier stands between the tile and the {release}: {by} does not "
            "publish what the other warps did"
        )
    return NO_ORDER, f"{flag}, but this access is not ordered by what that signal published"


def _reach(scope: str, event: AccessEvent) -> str:
    return f"scope {scope}" if scope == event.scope else f"a fence of scope {scope}"


def _order(heard: Heard) -> str:
    return "self-validating" if heard.signal.validates_itself else heard.signal.event.sem
