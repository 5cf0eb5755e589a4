"""Fold loops that only load blocks and multiply them, on a machine that computes no products.

Only the addresses and shapes of such a turn matter. So the body runs once for all turns but the
last, with an array for the loop's variable that has a value per turn. The loads and products are
noted, and then passed to the machine turn by turn, as if each turn had run. The last turn runs
normally. Anything that is not known for all turns at once (a branch that only some take, an access
other than a descriptor's block) ends the trial, and every turn runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorDescHandle

from .numerics import Tile, Value, np_dtype, scalar

if TYPE_CHECKING:
    from ..machine.machine import Machine

_FEWEST = 4  # turns: a trial costs as much as a turn


class Turns:
    """The turns of a `for` loop, and the context in which each body runs."""

    def __init__(self, builder: Any, numbers: range, dtype: tl.dtype) -> None:
        self._builder, self._numbers, self._dtype = builder, numbers, dtype
        self._carried: Callable[[], tuple] | None = None
        self._trial: _Trial | None = None
        self._is_known = False  # whether all turns but the last are known

    def carrying(self, carried: Callable[[], tuple]) -> Turns:
        """Set what a turn takes from the previous one: only tiles, whose values are not needed.

        The caller then enters this object for every turn.
        """
        self._carried = carried
        return self

    def __iter__(self) -> Iterator[Tile]:
        first = 0
        if self._carried is not None and len(self._numbers) >= _FEWEST and self._can_try():
            first = len(self._numbers) - 1
            trial = self._trial = _Trial(self._builder.machine)
            self._builder.machine = trial
            values = np.array(self._numbers[:first], np_dtype(self._dtype))
            yield Tile(Value(values, self._dtype), self._dtype)
            if self._is_known:
                trial.repeat(first)
            else:
                first = 0
        for number in self._numbers[first:]:
            yield scalar(number, self._dtype)

    def _can_try(self) -> bool:
        machine = self._builder.machine
        if isinstance(machine, _Trial) or not machine.accesses.dry or self._carried is None:
            return False
        try:
            values = self._carried()
        except NameError:
            return False
        return all(map(_is_tile_of_floats, values))

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if self._trial is None:
            return False
        self._builder.machine, self._trial = self._trial.machine, None
        self._is_known = error is None
        return isinstance(error, Exception)  # the error is dropped, and every turn runs now


class _Trial:
    """Stands in for the machine in a trial. What it lacks ends the trial."""

    dry = True

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.num_sms = machine.num_sms
        self._noted: list[Callable[[int], list[tuple]]] = []
        self._kinds: list[str] = []

    @property
    def accesses(self) -> _Trial:
        return self

    @property
    def program(self) -> _Trial:
        return self

    @property
    def index(self) -> tuple[int, int, int]:
        return self.machine.program.index

    @property
    def launch(self) -> Any:
        return self.machine.program.launch

    def compared_with(self, sign: str, other: np.ndarray) -> None:
        """Do nothing, since a turn that polls ends the trial."""

    def product(self, left: tuple[int, ...], right: tuple[int, ...], bits: int) -> bool:
        self._kinds.append("product")
        self._noted.append(lambda turns: [(left, right, bits)] * turns)
        return True

    def skipped_load(self, first: Any, last: Any, count: Any, size: int) -> None:
        def rows(turns: int) -> list[tuple]:
            columns = (np.broadcast_to(each, (turns,)).tolist() for each in (first, last, count))
            return [(*row, size) for row in zip(*columns, strict=True)]

        self._kinds.append("skipped_load")
        self._noted.append(rows)

    def repeat(self, turns: int) -> None:
        """Pass what was noted to the machine, turn by turn."""
        port = self.machine.accesses
        notes = [getattr(port, kind) for kind in self._kinds]
        for turn in zip(*(noted(turns) for noted in self._noted), strict=True):
            for note, what in zip(notes, turn, strict=True):
                note(*what)


def _is_tile_of_floats(value: Any) -> bool:
    return isinstance(value, tl.tensor) and value.type.is_block() and value.dtype.is_floating()


def carried_names(loop: ast.For) -> list[str] | None:
    """Return what a turn reads before setting it; None if the loop does more than assign."""
    statements = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.If
    inside = [node for each in loop.body for node in ast.walk(each)]
    if not isinstance(loop.target, ast.Name) or loop.orelse:
        return None
    if any(isinstance(node, ast.stmt) and not isinstance(node, statements) for node in inside):
        return None
    names = [node for node in inside if isinstance(node, ast.Name)]
    changed = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    if loop.target.id in changed or not _only_names(inside):
        return None
    found: dict[str, None] = {}
    known = {loop.target.id}
    for each in loop.body:
        for node in ast.walk(each):
            is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                node, is_read = node.target, True
            if is_read and isinstance(node, ast.Name) and node.id in changed - known:
                found[node.id] = None
        if not isinstance(each, ast.If):
            stored = (n for n in ast.walk(each) if isinstance(n, ast.Name))
            known |= {n.id for n in stored if isinstance(n.ctx, ast.Store)}
    return list(found)


def _only_names(nodes: list[ast.AST]) -> bool:
    """Return whether only names are set."""
    places = (node for node in nodes if isinstance(node, ast.Attribute | ast.Subscript))
    return all(isinstance(node.ctx, ast.Load) for node in places)


def watch_turns(loop: ast.For, carried: list[str], turns: str) -> None:
    """Let a loop over `Turns`, kept under this name, enter them for every turn."""
    nothing = ast.arguments([], [], None, [], [], None, [])
    names: list[ast.expr] = [ast.Name(name, ast.Load()) for name in carried]
    values = ast.Lambda(nothing, ast.Tuple(names, ast.Load()))
    kept = ast.NamedExpr(ast.Name(turns, ast.Store()), loop.iter)
    loop.iter = ast.Call(ast.Attribute(kept, "carrying", ast.Load()), [values], [])
    loop.body = [ast.With([ast.withitem(ast.Name(turns, ast.Load()), None)], loop.body)]


def corners(desc: TensorDescHandle, indices: list[Value]) -> tuple[int, int, int, int]:
    """Return where a descriptor's block begins and ends in its tensor, its elements, their size."""
    first = last = desc.base.data.item()
    size, count = desc.base.dtype.element_ty.primitive_bitwidth // 8, 1
    if any(index.data.size > 1 for index in indices):
        return _corners_of_turns(desc, indices)
    for index, extent, stride, block in zip(
        indices, desc.shape, desc.strides, desc.block_shape, strict=True
    ):
        low = max(index.data.item(), 0)
        high = min(index.data.item() + block, extent.data.item())
        count *= max(high - low, 0)
        first += size * low * stride.data.item()
        last += size * (high - 1) * stride.data.item()
    return first, last, count, size


def _corners_of_turns(desc: TensorDescHandle, indices: list[Value]) -> tuple[Any, Any, Any, int]:
    """Return the same for indices that are values per turn of a loop."""
    first = last = desc.base.data.astype(np.int64)
    size, count = desc.base.dtype.element_ty.primitive_bitwidth // 8, np.ones(1, np.int64)
    for index, extent, stride, block in zip(
        indices, desc.shape, desc.strides, desc.block_shape, strict=True
    ):
        at, step = index.data.astype(np.int64), stride.data.item()
        low, high = np.maximum(at, 0), np.minimum(at + block, extent.data.item())
        count = count * np.maximum(high - low, 0)
        first, last = first + size * low * step, last + size * (high - 1) * step
    return first, last, count, size
