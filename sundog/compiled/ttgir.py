"""Find where a value of a kernel's TTGIR comes from, what encloses an operation, and its accesses.

Values are followed back step by step, through loops and branches: an argument of a loop's body
comes from its first value and from what the body yields. That shows which kernel argument an
address is made of, which loads it needs, and whether it changes between iterations.

An access of global memory has an argument, a size and a place.

TTGIR is the last form in which an access is still one operation on a whole tile. The assembly at
the same source position shows how many bytes the compiler moves at a time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..dataset.triton.mlir import MlirBlock, MlirModule, MlirOperand, MlirOperation
from .assembly import Instruction, Place

LOOPS = ("scf.for", "scf.while")


def short(op: MlirOperation) -> str:
    """Name an operation without its dialect: `amdg.buffer_load` is a buffer_load."""
    return op.name.rpartition(".")[2]


class Flow:
    """The kernel's operations in order, and what encloses and feeds each of them."""

    def __init__(self, module: MlirModule) -> None:
        self.operations: list[MlirOperation] = []
        self._parent: dict[int, MlirOperation] = {}  # of a block or an operation, by its id
        self._region: dict[int, int] = {}  # which of its parent's regions a block or op is in
        self._walk(module.operation)
        functions = [op for op in self.operations if op.name == "tt.func"]
        self.kernel = next(op for op in functions if _is_public(op))

    def arguments(self) -> list[str]:
        """List the kernel's arguments in the order of its signature, as the source names them.

        The items of a tuple have its name; since Triton 3.9, followed by one of their own.
        """
        named = enumerate(self.kernel.regions[0][0].arg_locations)
        return [str(loc.get("name", f"argument {n}")).partition(".")[0] for n, loc in named]

    def parents(self, op: MlirOperation) -> Iterator[tuple[MlirOperation, int]]:
        """List what encloses an operation, innermost first, and in which of its regions it is."""
        while (parent := self._parent.get(id(op))) is not None:
            yield parent, self._region[id(op)]
            op = parent

    def loops(self, op: MlirOperation) -> list[MlirOperation]:
        """List the loops around an operation, outermost first."""
        return [parent for parent, _ in self.parents(op) if parent.name in LOOPS][::-1]

    def inputs(self, value: MlirOperand) -> list[MlirOperand]:
        """Return the values that it is directly made of."""
        owner, n = value.owner, value.number
        if isinstance(owner, MlirBlock):
            return self._block_inputs(owner, n)
        if owner.name == "scf.for":
            return [owner.operands[3 + n], _last(owner, 0).operands[n]]
        if owner.name == "scf.while":
            return [_last(owner, 0).operands[1 + n]]
        if owner.name == "scf.if":
            return [owner.operands[0], *(_last(owner, r).operands[n] for r in range(2))]
        return owner.operands

    def back(
        self, start: MlirOperand, stop: Callable[[MlirOperand], bool]
    ) -> Iterator[MlirOperand]:
        """List everything that a value is made of, up to values where `stop` says so."""
        seen: set[tuple[int, int]] = set()
        todo = [start]
        while todo:
            value = todo.pop()
            if (id(value.owner), value.number) in seen:
                continue
            seen.add((id(value.owner), value.number))
            yield value
            if not stop(value):
                todo += self.inputs(value)

    def varies(self, value: MlirOperand, loop: MlirOperation) -> bool:
        """Return whether it may differ between iterations; a load of one address does not."""
        for each in self.back(value, lambda _: False):
            owner = each.owner
            if isinstance(owner, MlirBlock):
                if self._parent[id(owner)] is loop:
                    return True
            elif "atomic" in owner.name and any(p is loop for p, _ in self.parents(owner)):
                return True
        return False

    def _walk(self, op: MlirOperation) -> None:
        self.operations.append(op)
        for number, region in enumerate(op.regions):
            for block in region:
                self._parent[id(block)], self._region[id(block)] = op, number
                for inner in block.operations:
                    self._parent[id(inner)], self._region[id(inner)] = op, number
                    self._walk(inner)

    def _block_inputs(self, block: MlirBlock, n: int) -> list[MlirOperand]:
        parent = self._parent[id(block)]
        if parent.name == "tt.func":
            return []
        if parent.name == "scf.for":
            if n == 0:
                return parent.operands[:3]
            return [parent.operands[2 + n], _last(parent, 0).operands[n - 1]]
        if parent.name == "scf.while":
            if self._region[id(block)] == 1:
                return [_last(parent, 0).operands[1 + n]]
            return [parent.operands[n], _last(parent, 1).operands[n]]
        return parent.operands


def _last(op: MlirOperation, region: int) -> MlirOperation:
    """Return what ends a region: its yield, or a while loop's condition."""
    return op.regions[region][0].operations[-1]


def _is_public(function: MlirOperation) -> bool:
    visibility = function.properties.get("sym_visibility")
    return isinstance(visibility, dict) and visibility.get("value") == "public"


_KINDS = {
    "load": "load",
    "buffer_load": "load",
    "async_copy_global_to_local": "load",
    "buffer_load_to_local": "load",
    "store": "store",
    "buffer_store": "store",
}
_LOADS = ("load", "buffer_load")
_MEMORY = (*_KINDS, "atomic_rmw", "atomic_cas", "buffer_atomic_rmw", "buffer_atomic_cas")


@dataclass
class MemoryAccess:
    """One load, store or atomic of the kernel; several at one place if a loop was unrolled."""

    op: MlirOperation
    kind: str  # load, store or atomic
    arguments: tuple[str, ...]  # that its address is made of
    place: Place
    tile: tuple[int, ...]  # () for a single element
    itemsize: int
    masked: bool
    loops: list[MlirOperation]
    needs: list[Load] = field(default_factory=list)  # loads that its address is made of
    widths: Counter[int] = field(default_factory=Counter)  # bytes: instructions

    @property
    def nbytes(self) -> int:
        return math.prod(self.tile) * self.itemsize

    @property
    def where(self) -> str:
        return where(self.place)


@dataclass(frozen=True)
class Load:
    """A load whose result is part of an address."""

    op: MlirOperation
    arguments: tuple[str, ...]
    offset: int | None  # from the argument, in elements, where it is a constant
    address: MlirOperand
    cut: bool  # to 32 bits on the way to the address


def find(flow: Flow, instructions: Iterable[Instruction]) -> list[MemoryAccess]:
    """Find all accesses, each with the widths of the instructions at its place."""
    accesses = [_access(flow, op) for op in flow.operations if short(op) in _MEMORY]
    for each in instructions:
        for access in accesses:
            # Three words at once are scalars that LLVM has joined, since no tile is cut that way.
            is_scalars = bool(access.tile) and each.nbytes & (each.nbytes - 1) != 0
            if access.kind == each.kind and each.is_at(access.place) and not is_scalars:
                access.widths[each.nbytes] += 1
    for kind in ("load", "store"):
        _find_lost([access for access in accesses if access.kind == kind])
    return accesses


def _find_lost(accesses: list[MemoryAccess]) -> None:
    """Find accesses without a line, which LLVM merged from two branches. They seem to be at the
    line before, where an access is then wider than its single element."""
    lost = [a for a in accesses if a.tile and not a.widths]
    singles = [a for a in accesses if not a.tile]
    wide: Counter[int] = Counter()
    for single in singles:
        wide.update({w: n for w, n in single.widths.items() if w > single.itemsize})
    if lost and len({access.place[-1] for access in lost}) <= wide.total():
        for access in lost:
            access.widths.update(wide)
        for single in singles:
            single.widths = Counter(
                {w: n for w, n in single.widths.items() if w <= single.itemsize}
            )


def descriptor_bytes(flow: Flow) -> int:
    """Return the bytes of the largest tile that a descriptor (TMA) moves, always in full width."""
    kinds = [v.type for op in flow.operations if "tma_copy" in op.name for v in op.operands]
    shapes = [k["params"][0] for k in kinds if _name(k) == "!ttg.memdesc"]
    return max((math.prod(s["shape"]) * _bytes(s["element"]) for s in shapes), default=0)


def argument_names(flow: Flow, op: MlirOperation) -> tuple[str, ...]:
    """List the kernel's pointer arguments in the address of an access."""
    return _sources(flow, _address(op))[0]


def place_of(op: MlirOperation) -> Place:
    return _place(op.location)


def where(place: Place) -> str:
    """Name the line of the kernel, and of the called function where it happens."""
    steps = [f"{file}:{line}" for file, line, _ in place]
    return steps[-1] if len(steps) == 1 else f"{steps[-1]} (in {steps[0]})"


def _address(op: MlirOperation) -> list[MlirOperand]:
    address = [v for v in op.operands if _is_pointer(v.type)][:1]
    if short(op).startswith("buffer"):  # a scalar base and a tile of offsets after it
        address.append(op.operands[op.operands.index(address[0]) + 1])
    return address


def _access(flow: Flow, op: MlirOperation) -> MemoryAccess:
    address = _address(op)
    tensor: Any = next((v.type for v in address if _is_tensor(v.type)), None)
    arguments, needs = _sources(flow, address)
    return MemoryAccess(
        op,
        _KINDS.get(short(op), "atomic"),
        arguments,
        place_of(op),
        tuple(tensor["shape"]) if tensor else (),
        _bytes(_element(address[0].type)["params"][0]),
        any(_element(v.type) == "i1" for v in op.operands),
        flow.loops(op),
        needs,
    )


def _sources(flow: Flow, address: list[MlirOperand]) -> tuple[tuple[str, ...], list[Load]]:
    """Find the kernel's pointer arguments in an address, and the loads it needs, but not theirs.

    An atomic, such as a ticket for the next tile, ends the search too: it is not an address.
    """
    names: dict[str, None] = {}
    loads: dict[int, Load] = {}
    cuts = _cut(flow, address)
    for start in address:
        for value in flow.back(start, _is_from_memory):
            if isinstance(value.owner, MlirBlock):
                if value.owner is flow.kernel.regions[0][0] and _is_pointer(value.type):
                    names[flow.arguments()[value.number]] = None
            elif short(value.owner) in _LOADS and id(value.owner) not in loads:
                loads[id(value.owner)] = _load(flow, value.owner, id(value.owner) in cuts)
    return tuple(names), list(loads.values())


def _load(flow: Flow, op: MlirOperation, cut: bool) -> Load:
    address = _address(op)
    names, _ = _sources(flow, address)
    return Load(op, names, _constant_offset(address), address[-1], cut)


def _cut(flow: Flow, address: list[MlirOperand]) -> set[int]:
    """Find the loads whose result is cut from 64 bits to 32 before it reaches the address."""
    found: set[int] = set()
    for start in address:
        for value in flow.back(start, _is_from_memory):
            if _is_cut(value):
                sources = flow.back(flow.inputs(value)[0], _ends_a_cut)
                found |= {id(v.owner) for v in sources if _is_from_memory(v)}
    return found


def _constant_offset(address: list[MlirOperand]) -> int | None:
    """0 for an argument itself, n for argument + n; None where it is computed."""
    last = address[-1].owner
    if isinstance(last, MlirBlock):
        return 0 if len(address) == 1 else None
    if last.name == "tt.addptr":
        base, offset = (v.owner for v in last.operands)
        if isinstance(base, MlirBlock) and isinstance(offset, MlirOperation):
            return _constant(offset)
    return _constant(last) if len(address) == 2 else None


def _constant(op: MlirOperation) -> int | None:
    value = op.properties.get("value") if op.name == "arith.constant" else None
    return value["value"] if isinstance(value, dict) and value.get("kind") == "int" else None


def _is_cut(value: MlirOperand) -> bool:
    op = value.owner
    if isinstance(op, MlirBlock) or op.name != "arith.trunci":
        return False
    return (_element(op.operands[0].type), _element(value.type)) == ("i64", "i32")


def _ends_a_cut(value: MlirOperand) -> bool:
    """Return whether a cut loses nothing: the value is from memory, or has few bits."""
    op = value.owner
    if isinstance(op, MlirOperation) and op.name == "arith.andi":
        masks = [_constant(v.owner) for v in op.operands if isinstance(v.owner, MlirOperation)]
        return any(mask is not None and 0 <= mask < 1 << 31 for mask in masks)
    return _is_from_memory(value)


def _is_from_memory(value: MlirOperand) -> bool:
    return isinstance(value.owner, MlirOperation) and short(value.owner) in _MEMORY


def _place(location: Any) -> Place:
    """Read a location, with the innermost call first, as in the assembly."""
    kind = location["kind"]
    if kind == "file":
        return ((location["file"].rpartition("/")[2], location["line"], location["column"]),)
    if kind == "name":
        return _place(location["child"])
    if kind == "callsite":
        return _place(location["callee"]) + _place(location["caller"])
    if kind == "fused":
        return _place(location["parts"][0])
    return ()


def _is_tensor(kind: Any) -> bool:
    return isinstance(kind, dict) and kind["kind"] == "tensor"


def _element(kind: Any) -> Any:
    return kind["element"] if _is_tensor(kind) else kind


def _name(kind: Any) -> str:
    return str(kind.get("name", "")) if isinstance(kind, dict) else ""


def _is_pointer(kind: Any) -> bool:
    return _name(_element(kind)) == "!tt.ptr"


def _bytes(element: Any) -> int:
    """Return the bytes of a type: bf16, i64, f8E4M3FN."""
    digits = "".join(c if c.isdigit() else " " for c in str(element)).split()
    return max(int(digits[0]) // 8, 1)
