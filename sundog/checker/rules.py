"""All rules. A new one is a file with its RULES and a function `look`, and its name in WATCHING.

`look` is called for every access and every history of the bytes that it touches. A rule that only
some places of a kernel concern has a function `watches` too, which is asked once for each of them.
One with UNORDERED looks only for what nothing orders: it is not called for an access that comes
after all that it could race with. One with UNUSUAL looks only at bytes that nobody has written or
that a descriptor has, and at the accesses of descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from . import failures
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule

Look = Callable[[Encounter], Iterable[Found]]

WATCHING = (
    "unwritten",
    "races",
    "pipelined",
    "proxies",
    "portability",
    "overlaps",
    "layouts",
)
_MODULES = [import_module(f".{name}", __package__) for name in WATCHING]
LOOKS: tuple[Look, ...] = tuple(module.look for module in _MODULES)
_WATCHES = {module.look: module.watches for module in _MODULES if hasattr(module, "watches")}
RULES: list[Rule] = [rule for module in (*_MODULES, failures) for rule in module.RULES]
OBJECTIONS = {rule.kind for rule in RULES if rule.is_verdict}  # kinds that kill a mutant


Looks = tuple[tuple[tuple[Look, ...], ...], ...]  # [is all in order?][are the bytes plain?]
_known: dict[tuple, Looks] = {}


def _with(attribute: str) -> set[Look]:
    return {module.look for module in _MODULES if getattr(module, attribute, False)}


_FOR_UNORDERED, _FOR_UNUSUAL = _with("UNORDERED"), _with("UNUSUAL")


def looks_at(event: AccessEvent) -> Looks:
    """Return those that the accesses of one place concern: how it is made says that.

    By whether an access comes after all that it could race with, and whether its bytes are plain:
    written, and not by a descriptor.
    """
    how = type(event.actor), event.verb, event.writes, event.atomic, event.tensor, event.proxy
    if how not in _known:
        looks = [look for look in LOOKS if look not in _WATCHES or _WATCHES[look](event)]
        unusual = set() if event.proxy else _FOR_UNUSUAL
        _known[how] = tuple(
            tuple(
                tuple(look for look in looks if look not in none | also)
                for also in (set(), unusual)
            )
            for none in (set(), _FOR_UNORDERED)
        )
    return _known[how]
