"""Scopes: whom an atomic, a fence or a signal reaches."""

from __future__ import annotations

from typing import Any

from .clocks import Actor

_SCOPES = ("cta", "gpu", "sys")  # from the narrowest


def narrower(*scopes: str) -> str:
    return min(scopes, key=_SCOPES.index)


def same(scope: str, actor: Actor) -> Any:
    """Return who an actor is, in terms of its scope: itself for cta, else its rank."""
    return actor if scope == "cta" else actor.rank


def reaches(scope: str, who: Any, other: Any) -> bool:
    """Return whether `scope`, used by `who`, takes in `other`; each a rank, or a program."""
    if scope == "sys":
        return True
    if scope == "cta":
        return who is other
    rank, other_rank = (x.rank if isinstance(x, Actor) else x for x in (who, other))
    return rank == other_rank


def both_reach(a: Any, b: Any) -> bool:
    """Return whether two atomics are atomic to each other, or a signal reaches who heard it."""
    if a.scope == b.scope == "sys":  # most
        return True
    return reaches(a.scope, a.actor, b.actor) and reaches(b.scope, b.actor, a.actor)
