"""Pairs of a wrong kernel and its corrected twin, with what the checker must say of the wrong one.

The families come from the public record of multi-GPU kernels. A file holds one kind of mistake; a
wrong kernel says in one comment what is wrong with it. The twins compare their results with torch:
they are right, not only silent. `PAIRS`, the table that `sundog check --corpus` reads, has the
pairs of every file of this folder that has some.
"""

from __future__ import annotations

import importlib
import pkgutil

from .pair import Pair

__all__ = ["PAIRS", "Pair"]

_FILES = sorted(module.name for module in pkgutil.iter_modules(__path__))
PAIRS: list[Pair] = [
    pair
    for name in _FILES
    if not name.startswith("test_")
    for pair in getattr(importlib.import_module(f".{name}", __name__), "PAIRS", [])
]
