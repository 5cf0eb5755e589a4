"""Stand-ins for the SHMEM library's collectives of a team, following OpenSHMEM 1.5.

When one returns, this rank's destination is written and its source may be used again. Nothing is
said about the other ranks, and puts that were begun before it stay late. The simulated ranks are on
one node, so its team is the team of all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import triton.language as tl

from ..errors import CannotInterpret
from ..interpreter.builder import EXTERNS
from ..interpreter.numerics import Value, narrow, scalar, widen
from .shmem import MemoryCopy, extern, named, num_ranks, peer_address, plain, prefixed, sync

_TEAMS = (0, 1, 2)  # NVSHMEM_TEAM_WORLD and _SHARED, and NVSHMEMX_TEAM_NODE
_OPERATIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
_KINDS = {
    "half": tl.float16,
    "bfloat16": tl.bfloat16,
    "float": tl.float32,
    "double": tl.float64,
} | {
    f"{sign}int{bits}": getattr(tl, f"{sign}int{bits}")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}


def _world(builder: Any, team: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    if plain(team) not in _TEAMS:
        raise CannotInterpret(
            f"team {plain(team)}: only the teams of all ranks (0) and of a node (1, 2) are known"
        )
    return builder.machine.program.rank, num_ranks(builder.machine)


def _my_pe(builder: Any, team: Any) -> Any:
    return scalar(_world(builder, team)[0], tl.int32)


def _n_pes(builder: Any, team: Any) -> Any:
    return scalar(_world(builder, team)[1], tl.int32)


def _translate(builder: Any, team: Any, pe: Any, other: Any) -> Any:
    _, size = _world(builder, team)
    _world(builder, other)
    return scalar(plain(pe) if 0 <= plain(pe) < size else -1, tl.int32)


def _sync(builder: Any, team: Any) -> None:
    _world(builder, team)
    sync(builder)


def _exchange(builder: Any, parts: Iterable[tuple[int, int, int, int]]) -> None:
    """Copy parts to ranks (rank, destination, source, bytes), and wait for those of the others."""
    for peer, to, source, nbytes in parts:
        there = peer_address(builder.machine.memory, to, peer)
        MemoryCopy(builder, there, source, nbytes).copy()
    sync(builder)


def _all_to_all(builder: Any, team: Any, to: Any, source: Any, nbytes: Any) -> None:
    (rank, size), count = _world(builder, team), plain(nbytes)
    mine, origin = plain(to) + rank * count, plain(source)
    _exchange(builder, [(peer, mine, origin + peer * count, count) for peer in range(size)])


def _collect(builder: Any, team: Any, to: Any, source: Any, nbytes: Any) -> None:
    (rank, size), count = _world(builder, team), plain(nbytes)
    mine = plain(to) + rank * count
    _exchange(builder, [(peer, mine, plain(source), count) for peer in range(size)])


def _broadcast(builder: Any, team: Any, to: Any, source: Any, nbytes: Any, root: Any) -> None:
    rank, size = _world(builder, team)
    peers = range(size) if rank == plain(root) else ()
    _exchange(builder, [(peer, plain(to), plain(source), plain(nbytes)) for peer in peers])


def _reduce(
    kind: Any, operation: str, builder: Any, team: Any, to: Any, source: Any, count: Any
) -> None:
    """Reduce in the order of the ranks. The destination may be the source."""
    _, size = _world(builder, team)
    width = kind.primitive_bitwidth // 8

    def elements(start: int) -> Value:
        places = np.arange(start, start + plain(count) * width, width, dtype=np.uint64)
        return Value(places, tl.pointer_type(kind))

    sync(builder)  # every rank's source is there
    sources = [peer_address(builder.machine.memory, plain(source), peer) for peer in range(size)]
    found = [builder._load(elements(each), None, None).data for each in sources]
    sync(builder)  # every rank has read it
    total = functools.reduce(
        lambda a, b: narrow(_OPERATIONS[operation](widen(a, kind), widen(b, kind)), kind), found
    )
    builder._store(elements(plain(to)), Value(total, kind), None)


def _by_elements(function: Callable[..., None]) -> Callable[..., None]:
    """Return a collective that is given a number of elements, not of bytes."""

    def call(builder: Any, team: Any, to: Any, source: Any, count: Any, *root: Any) -> None:
        nbytes = plain(count) * (to.dtype.element_ty.primitive_bitwidth // 8)
        function(builder, team, to, source, nbytes, *root)

    return call


def _functions() -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {
        "team_my_pe": _my_pe, "team_n_pes": _n_pes, "team_translate_pe": _translate,
    }  # fmt: skip
    for suffix in ("", "_warp", "_block"):
        for name, function in (
            ("alltoall", _all_to_all), ("broadcast", _broadcast), ("fcollect", _collect)
        ):  # fmt: skip
            found[f"{name}mem{suffix}"] = function
            found[f"{name}{suffix}"] = _by_elements(function)
        found[f"team_sync{suffix}"] = _sync
    return found


NAMES = named(_functions())
EXTERNS |= prefixed({name: extern(call) for name, call in _functions().items() if "mem" in name})
EXTERNS |= {
    f"nvshmem_{name}_{operation}_reduce": extern(functools.partial(_reduce, kind, operation))
    for name, kind in _KINDS.items()
    for operation in _OPERATIONS
}
