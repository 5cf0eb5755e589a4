"""Where a value of a kernel's TTGIR comes from, and what encloses an operation.

One step back at a time, through loops and branches: an argument of a loop's body comes from its
first value and from what the body yields. That is enough to say which kernel argument an address
is made of, which loads it needs, and whether it changes from one iteration to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..dataset.triton.mlir import MlirBlock, MlirModule, MlirOperand, MlirOperation

__all__ = ["Flow", "short"]

LOOPS = ("scf.for", "scf.while")


def short(op: MlirOperation) -> str:
    """An operation's name without its dialect: `amdg.buffer_load` is a buffer_load."""
    return op.name.rpartition(".")[2]


class Flow:
    """The kernel's operations in order, and the way back from each of them."""

    def __init__(self, module: MlirModule) -> None:
        self.operations: list[MlirOperation] = []
        self._parent: dict[int, MlirOperation] = {}  # of a block or an operation, by its id
        self._region: dict[int, int] = {}  # which of its parent's regions a block or op is in
        self._walk(module.operation)
        functions = [op for op in self.operations if op.name == "tt.func"]
        self.kernel = next(op for op in functions if _is_public(op))

    def arguments(self) -> list[str]:
        """The kernel's arguments in the order of its signature, as the source names them.

        The items of a tuple have its name; since Triton 3.9 they have one of their own behind it.
        """
        named = enumerate(self.kernel.regions[0][0].arg_locations)
        return [str(loc.get("name", f"argument {n}")).partition(".")[0] for n, loc in named]

    def parents(self, op: MlirOperation) -> Iterator[tuple[MlirOperation, int]]:
        """What encloses an operation, from the inside, and in which region of it."""
        while (parent := self._parent.get(id(op))) is not None:
            yield parent, self._region[id(op)]
            op = parent

    def loops(self, op: MlirOperation) -> list[MlirOperation]:
        """The loops around an operation, the outermost first."""
        return [parent for parent, _ in self.parents(op) if parent.name in LOOPS][::-1]

    def inputs(self, value: MlirOperand) -> list[MlirOperand]:
        """One step back."""
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
        """Everything that a value is made of; nothing behind a value where `stop` says so."""
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
        """Can it differ between two iterations? A load of one address is taken not to."""
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
    """What ends a region: its yield, or a while loop's condition."""
    return op.regions[region][0].operations[-1]


def _is_public(function: MlirOperation) -> bool:
    visibility = function.properties.get("sym_visibility")
    return isinstance(visibility, dict) and visibility.get("value") == "public"
