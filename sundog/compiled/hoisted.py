"""Find loads that the compiler issues before a wait that precedes them in the source.

A software-pipelined loop loads the tiles of later iterations ahead of its body. An acquire in that
body does not stop the pipeliner: it moves atomics and loads as if they had nothing to do with each
other. So the tiles come from memory before the wait for them has ended.

TTIR still has the order of the source, and TTGIR has the order in which the loads are issued. An
operation keeps its source position, also through inlined calls, by which its copies are found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..dataset.triton.compile import lower_stages
from ..dataset.triton.mlir import MlirBlock, MlirOperation
from ..dataset.triton.triton_module import read_module
from .assembly import Place
from .ttgir import Flow, argument_names, place_of, short, where

_POINTER_LOADS = ("load", "buffer_load", "async_copy_global_to_local", "buffer_load_to_local")
_DESCRIPTOR_LOADS = (
    "descriptor_load", "descriptor_gather", "async_tma_copy_global_to_local", "async_tma_gather",
    "async_tdm_copy_global_to_local",
)  # fmt: skip
_ATOMICS = ("atomic_rmw", "atomic_cas", "buffer_atomic_rmw", "buffer_atomic_cas")
_ACQUIRE, _ACQ_REL = 2, 4  # the values of `sem`


@dataclass(frozen=True)
class Hoisted:
    """A load that is issued before an acquire that precedes it in the source."""

    load: Place
    acquire: Place

    @property
    def where(self) -> str:
        return where(self.load)

    @property
    def text(self) -> str:
        return (
            f"the compiler issues this load before the acquire at {where(self.acquire)}, which the "
            "source has first: put tl.debug_barrier() between them, or move the acquire out of "
            "the pipelined loop"
        )


def find(ttir: Any, ttgir: Any, constant: Collection[str] = ()) -> list[Hoisted]:
    """Find every load of a kernel that is issued too early, and the first acquire it passed.

    Both forms of the kernel may be text, modules of Triton, or already read. `constant` names
    pointer arguments to words that are not written while the kernel runs.
    """
    source, issued = _read(ttir), _read(ttgir)
    found: dict[Place, Hoisted] = {}
    for load in _places(source, lambda op: _is_load(source, op, constant)):
        for acquire in _places(source, lambda op: _is_acquire(source, op)):
            if load not in found and _passes(source, issued, load, acquire):
                found[load] = Hoisted(load, acquire)
    return list(found.values())


def find_in(
    source: Any, options: Mapping[str, Any], arch: str, constant: Collection[str] = ()
) -> list[Hoisted]:
    """Compile a kernel's source once, to TTIR and on to TTGIR, and compare both."""
    forms = {name: _read(module) for name, module in lower_stages(source, options, arch=arch)}
    if "ttir" not in forms:
        raise ValueError("a Gluon kernel has no ttir: ask for ttgir")
    return find(forms["ttir"], forms["ttgir"], constant)


def _read(form: Any) -> Flow:
    return form if isinstance(form, Flow) else Flow(read_module(form))


def _passes(source: Flow, issued: Flow, load: Place, acquire: Place) -> bool:
    """Return whether some copy of the load is issued before an acquire that it must follow."""
    needs, acquires = _needs(source, load, acquire)
    if not any(needs) and not acquires:
        return False
    seen = number = 0
    for is_load in _sequence(issued, load, acquire):
        if is_load:
            iteration, which = divmod(number, len(needs))
            if seen < iteration * acquires + needs[which]:
                return True
            number += 1
        else:
            seen += 1
    return False


def _needs(source: Flow, load: Place, acquire: Place) -> tuple[list[int], int]:
    """Return how many acquires each copy of the load follows, and how many more per iteration.

    The latter is known only where both are in the same innermost loop. Elsewhere an inner loop may
    repeat the load after a single acquire, so that only its first copy can be judged.
    """
    needs: list[int] = []
    acquires = 0
    for is_load in _sequence(source, load, acquire):
        if is_load:
            needs.append(acquires)
        else:
            acquires += 1
    loops = {_innermost(source, place) for place in (load, acquire)}
    if len(loops) == 1 and loops != {None}:
        return needs, acquires
    return [min(needs)] * len(needs), 0


def _innermost(flow: Flow, place: Place) -> int | None:
    first = next(op for op in flow.operations if _moves(op) and place_of(op) == place)
    loops = flow.loops(first)
    return id(loops[-1]) if loops else None


def _sequence(flow: Flow, load: Place, acquire: Place) -> Iterator[bool]:
    """Yield the copies of both in order: True for the load, False for the acquire."""
    for op in flow.operations:
        if _moves(op) and (place := place_of(op)) in (load, acquire):
            yield place == load


def _places(flow: Flow, wanted: Callable[[MlirOperation], bool]) -> list[Place]:
    return list(dict.fromkeys(place_of(op) for op in flow.operations if wanted(op)))


def _moves(op: MlirOperation) -> bool:
    return short(op) in (*_POINTER_LOADS, *_DESCRIPTOR_LOADS, *_ATOMICS)


def _is_load(flow: Flow, op: MlirOperation, constant: Collection[str]) -> bool:
    if short(op) in _DESCRIPTOR_LOADS:
        return True
    if short(op) not in _POINTER_LOADS:
        return False
    names = argument_names(flow, op)
    return not names or not set(names) <= set(constant)


def _is_acquire(flow: Flow, op: MlirOperation) -> bool:
    """Return whether a program learns from an atomic. `acq_rel` is the default of atomics, so such
    a one counts only if its result is used."""
    sem = op.properties.get("sem")
    if short(op) not in _ATOMICS or not isinstance(sem, dict):
        return False
    return sem["value"] == _ACQUIRE or (sem["value"] == _ACQ_REL and id(op) in _used(flow))


def _used(flow: Flow) -> set[int]:
    values = (value for op in flow.operations for value in op.operands)
    return {id(value.owner) for value in values if not isinstance(value.owner, MlirBlock)}
