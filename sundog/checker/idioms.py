"""The idiom by which two programs tried to order their accesses, and its smallest repair.

For kernels of other people: named is what their own lines say, Triton's atomics or inline PTX.
"""

from __future__ import annotations

import os

from ..callsite import called_from, relative
from ..interpreter.ptx_lanes import LOOP
from .findings import AccessEvent

_STREAM = os.path.join("compat", "stream_kernels.py")


def idiom(signal: AccessEvent, wait: AccessEvent, weak: str) -> str:
    """Say which instruction signals and which one waits, and the change that mends it.

    `weak` is what they lack: release, acquire, scope, a barrier, or nothing that a word would mend.
    """
    repair = {
        "release": lambda: _stronger(signal, "release"),
        "acquire": lambda: _stronger(wait, "acquire"),
        "scope": lambda: _wider(signal, wait),
        "barrier before fence": lambda: f"a CTA barrier before the fence of {_line(signal)}",
        "barrier before": lambda: f"a CTA barrier before {_line(signal)}",
        "barrier after": lambda: f"a CTA barrier after {_line(wait)}",
    }.get(weak, lambda: "")()
    text = f". Idiom: {_name(signal)} signals, then {_name(wait)} waits"
    return f"{text}. Smallest repair: {repair}" if repair else text


def chain(event: AccessEvent) -> str:
    """Return the line of an access, and those that called what it is in."""
    return called_from((path, line) for path, line, _ in event.callers)


def wider(*events: AccessEvent) -> str:
    """Return the repair of atomics whose scopes do not reach each other's programs."""
    return f". Smallest repair: {_wider(*events)}"


def _name(event: AccessEvent) -> str:
    """Return the instruction of inline PTX, or what Triton calls it: `relaxed atomic CAS`."""
    path, _, function = event.stack[0] if event.stack else ("", 0, "")
    if path.endswith(_STREAM):
        return f"{function} of a stream"
    return _opcode(event) or f"{event.sem} {event.verb}".strip()


def _opcode(event: AccessEvent) -> str:
    """Return the instruction that made an access; empty if it is Triton's own."""
    name = str(event.stack[0][2]) if event.stack else ""
    return name.removesuffix(LOOP) if "." in name else ""


def _is_stand_in(event: AccessEvent) -> bool:
    """Return whether a library's function made it, whose instruction its caller cannot change."""
    return bool(event.stack) and event.where is not event.stack[0]


def _line(event: AccessEvent) -> str:
    path, line, _ = event.where
    return f"{relative(path)}:{line}"


def _stronger(event: AccessEvent, sem: str) -> str:
    opcode = _opcode(event)
    if opcode and _is_stand_in(event):
        return f"a fence {'before' if sem == 'release' else 'after'} {_line(event)}"
    if event.sem in ("acquire", "release") and event.sem != sem:  # it must do both
        strong = f"{opcode.replace(event.sem, 'acq_rel')}" if opcode else 'sem="acq_rel"'
        return f"{strong} at {_line(event)}"
    if not opcode:
        order = f'sem="{sem}"'
        is_atomic = event.atomic and "load" not in event.verb  # tl.load has no semantics
        found = order if is_atomic else f'an atomic with {order}, scope="sys"'
        return f"{found} at {_line(event)}"
    scoped = f".{sem}" if {"sys", "gpu", "cta"} & {*opcode.split(".")} else f".{sem}.sys"
    if "relaxed" in opcode:
        return f"{opcode.replace('.relaxed', scoped)} at {_line(event)}"
    name, _, rest = opcode.replace(".volatile", "").partition(".")
    return f"{name}{scoped}.{rest} at {_line(event)}"


def _wider(*events: AccessEvent) -> str:
    needed = "gpu" if len({event.actor.rank for event in events}) == 1 else "sys"
    found = [_with_scope(event, needed) for event in events if event.scope not in (needed, "sys")]
    return ", and ".join(dict.fromkeys(found))


def _with_scope(event: AccessEvent, scope: str) -> str:
    opcode = _opcode(event)
    if not opcode or _is_stand_in(event):
        return f'scope="{scope}" at {_line(event)}'
    parts = opcode.split(".")
    if event.scope in parts:
        return f"{opcode.replace(f'.{event.scope}', f'.{scope}')} at {_line(event)}"
    place = next((n for n, part in enumerate(parts) if part == event.sem), 0) + 1
    sem = [] if event.sem in parts else [event.sem]
    return f"{'.'.join((*parts[:place], *sem, scope, *parts[place:]))} at {_line(event)}"
