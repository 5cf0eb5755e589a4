"""All rules. A new one is a file with its RULES and a function `look`, and its name in WATCHING.

`look` is called for every access and every history of the bytes that it touches.
"""

from __future__ import annotations

from importlib import import_module

from . import failures
from .findings import Rule

__all__ = ["LOOKS", "OBJECTIONS", "RULES", "WATCHING"]

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
LOOKS = tuple(module.look for module in _MODULES)
RULES: list[Rule] = [rule for module in (*_MODULES, failures) for rule in module.RULES]
OBJECTIONS = {rule.kind for rule in RULES if rule.is_verdict}  # kinds that kill a mutant
