"""What falls short, and how the wide path is told from the rest.

The *wide path* is every access of a whole tile through an argument that holds data. Not part of it:

scalar   a single element: an epoch, a size
flags    through `world.ctx` or what `world.signals` gave: words, one for each peer
small    a tile of less than a sixteenth of the kernel's largest, in no deeper loop: a bias, a row
         of scales, the last few elements; or of a tensor of at most 64 KB, whose time is latency
tail     masked, and either a 16-byte access of the same kind and argument stands in a deeper loop
         (the tail comes after the loop over whole tiles), or in the other branch of an `if`
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataset.triton.mlir import MlirOperation
from ..device.context import DELTAS
from .recorded import CTX, DATA, FEW
from .ttgir import Flow, MemoryAccess, descriptor_bytes

__all__ = ["FULL", "CompiledKernel", "IsaMark", "classify", "judge"]

FULL = 16  # bytes of the widest access of one thread
_SMALL = 16
_A_FEW = (
    16  # bytes: ptxas keeps 8 or 12 on the stack of any kernel now and then, even a trivial one
)


@dataclass(frozen=True)
class IsaMark:
    """Something that falls short."""

    rule: str  # narrow, lost, reload, cut, spill or hoisted
    where: str
    text: str


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's accesses, and what is known of its launch."""

    flow: Flow
    accesses: list[MemoryAccess]
    roles: dict[str, str]  # of its tensor arguments
    threads: int


def classify(kernel: CompiledKernel) -> list[str]:
    """Of each access: atomic, scalar, flags, small, tail or wide."""
    found = [_without_tiles(access, kernel.roles) for access in kernel.accesses]
    tiles = [a for a, role in zip(kernel.accesses, found, strict=True) if not role]
    if not tiles:
        return found
    largest = max(tiles, key=lambda a: (a.nbytes, len(a.loops)))
    most = max(largest.nbytes, descriptor_bytes(kernel.flow))
    for n, access in enumerate(kernel.accesses):
        if not found[n]:
            is_small = access.nbytes * _SMALL <= most and len(access.loops) <= len(largest.loops)
            is_tail = any(_is_tail_of(kernel.flow, access, other) for other in tiles)
            found[n] = "small" if is_small else "tail" if is_tail else "wide"
    return found


def _without_tiles(access: MemoryAccess, roles: dict[str, str]) -> str:
    if access.kind == "atomic":
        return "atomic"
    if not access.tile:
        return "scalar"
    # Of no known argument: an address from a table, as good as data.
    found = {roles.get(name, DATA) for name in access.arguments or ("",)}
    return "" if DATA in found else "small" if FEW in found else "flags"


def judge(kernel: CompiledKernel, classes: list[str], spills: int) -> list[IsaMark]:
    marks = []
    for access, role in zip(kernel.accesses, classes, strict=True):
        if role == "wide":
            marks += _narrow(access, kernel.threads) + _reloads(kernel.flow, access)
        marks += _cuts(access, kernel.roles)
    if spills > _A_FEW:
        marks.append(IsaMark("spill", "", f"{spills} bytes a thread are spilled to memory"))
    return list(dict.fromkeys(marks))


def _narrow(access: MemoryAccess, threads: int) -> list[IsaMark]:
    name = ", ".join(access.arguments) or "memory"
    size = "x".join(map(str, access.tile))
    tile = f"a tile of {size} elements of {access.itemsize} bytes over {threads} threads"
    if not access.widths:
        text = f"{access.kind} of {name}, {tile}: not found in the assembly, its width is unknown"
        return [IsaMark("lost", access.where, text)]
    least = min(access.widths)
    if least >= FULL:
        return []
    return [
        IsaMark("narrow", access.where, f"{access.kind} of {name}, {tile}: {least} bytes at a time")
    ]


def _reloads(flow: Flow, access: MemoryAccess) -> list[IsaMark]:
    """Addresses that need a word which the innermost loop loads, and had loaded before.

    Before: in the same loop, or when a loop around it ran it the last time.
    """
    marks = []
    for load in access.needs:
        is_inside = access.loops == flow.loops(load.op)[: len(access.loops)]
        if is_inside and not all(flow.varies(load.address, loop) for loop in access.loops):
            name = ", ".join(load.arguments) or "memory"
            text = (
                f"the address of this {access.kind} needs a word of {name} that the loop loads "
                "again and again: load it (translate the scalar base) before the loop"
            )
            marks.append(IsaMark("reload", access.where, text))
    return marks


def _cuts(access: MemoryAccess, roles: dict[str, str]) -> list[IsaMark]:
    """A peer's distance has 64 bits, and so must have every offset that it is added to."""
    for load in access.needs:
        is_distance = load.offset is None or load.offset >= DELTAS.value
        if load.cut and is_distance and CTX in (roles.get(name) for name in load.arguments):
            text = (
                f"the address of this {access.kind} cuts the distance to a peer's heap to 32 bits: "
                "AMD does so in memory below 2 GiB, so the heap must be larger"
            )
            return [IsaMark("cut", access.where, text)]
    return []


def _is_tail_of(flow: Flow, access: MemoryAccess, other: MemoryAccess) -> bool:
    same = access.kind == other.kind and set(access.arguments) & set(other.arguments)
    is_wide = bool(other.widths) and min(other.widths) >= FULL
    if not (access.masked and same and is_wide):
        return False
    return len(other.loops) > len(access.loops) or _excludes(flow, access.op, other.op)


def _excludes(flow: Flow, one: MlirOperation, two: MlirOperation) -> bool:
    """Do they stand in the two branches of one `if`?"""
    branches = {id(op): n for op, n in flow.parents(one) if op.name == "scf.if"}
    return any(n != branches.get(id(op), n) for op, n in flow.parents(two))
