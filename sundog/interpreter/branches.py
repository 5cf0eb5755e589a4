"""Branches that only some threads of a program take, and the variables that they assign.

A program is simulated as one. In such a branch its mask says which threads run: thread t is lane t
of a value per thread, and holds element t mod n of a tile of n elements. What the branch assigns,
the program computes for all. So after the branch each variable is put together: new where the
threads were in it, old elsewhere, and poison where there was no old value.
"""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from ..errors import CannotInterpret
from .numerics import Tile, Value, poison_like

if TYPE_CHECKING:
    from ..machine.tasks import Program


class Branch:
    """The body of an `if`. Entering it says whether it runs."""

    def __init__(self, is_taken: bool) -> None:
        self.is_taken = is_taken

    @property
    def splits(self) -> bool:
        """Whether only some threads run it."""
        return False

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *error: object) -> None:
        pass


TAKEN, NOT_TAKEN = Branch(True), Branch(False)


class SomeThreads(Branch):
    """A body that runs for some threads of a program, which are its mask inside."""

    def __init__(self, program: Program, holds: np.ndarray) -> None:
        self._program, self._before = program, program.mask
        mask = holds if self._before is None else self._before & holds
        self._mask = None if mask.all() and self._before is None else mask
        super().__init__(bool(mask.any()))

    def __enter__(self) -> Branch:
        self._program.mask = self._mask
        return self

    def __exit__(self, *error: object) -> None:
        self._program.mask = self._before

    @property
    def splits(self) -> bool:
        return self._program.mask is not None

    def note(self, variables: dict[str, Any]) -> None:
        """Remember the kernel's variables, before the body runs."""
        self._variables = dict(variables)

    def selects(self, name: str, line: int, variables: dict[str, Any]) -> bool:
        """Return whether the body has assigned a variable. Set `selected` to its value after it."""
        old, new = self._variables.get(name), variables.get(name)
        if new is old:
            return False
        self.selected = _selected(old, new, self._program.mask)
        if self.selected is None:
            self.selected = _Unselected(name, line)
        return True


class _Unselected(Tile):
    """A variable that threads disagree about, in a way that no value can hold. Any use says so."""

    def __init__(self, name: str, line: int) -> None:
        self._why = (
            f"{name} is used after the branch at line {line}, which only some threads take and "
            "which assigns it: only a tensor that keeps its shape and type has a value per thread. "
            "Use another name inside of the branch, or use it only there"
        )

    def __getattr__(self, name: object) -> Any:
        raise CannotInterpret(self._why)

    __getitem__ = __getattr__


def _selected(old: Any, new: Any, mask: Any) -> Any:
    """Return a variable after a branch that the threads of `mask` took; None if it has none."""
    if isinstance(old, _Unselected) or isinstance(new, _Unselected):
        return None
    if not isinstance(new, tl.tensor):
        return None
    if old is None:
        return _with(new, _filled(new, mask))
    if not isinstance(old, tl.tensor) or old.type != new.type:
        return None
    some, every = holders(mask, _shape(new))
    before, after = old.handle.data, new.handle.data
    differs = _bits(before) != _bits(after)
    if not differs.any():
        return old
    if (differs & (some != every)).any():
        return None
    return _with(new, np.where(some, after, before))


def _filled(new: Any, mask: np.ndarray) -> np.ndarray:
    """Return a value with poison in what a thread outside of the branch has."""
    _, every = holders(mask, _shape(new))
    data = new.handle.data
    return np.where(every, data, poison_like(every.shape, data.dtype, new.dtype))


def _with(like: Any, data: np.ndarray) -> Tile:
    return Tile(Value(data, like.handle.dtype), like.type)


def _shape(value: Any) -> tuple[int, ...]:
    return value.handle.data.shape if value.type.is_block() else ()


def _bits(data: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(data).view(f"u{data.itemsize}")


def holders(mask: np.ndarray, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return which elements of a tile some of these threads hold, and which only these do.

    A value without a shape has an element per thread.
    """
    if shape == ():
        return mask, mask
    size = math.prod(shape)
    rows = np.resize(mask, (max(1, mask.size // size), size))  # thread t, element t mod n
    return rows.any(axis=0).reshape(shape), rows.all(axis=0).reshape(shape)


def held(branch: Any, shape: tuple[int, ...], mask: np.ndarray | None) -> np.ndarray | None:
    """Return a mask without the elements that no thread of a branch has.

    A scalar is the program's, in a branch too.
    """
    if not isinstance(branch, np.ndarray) or math.prod(shape) == 1:
        return mask
    found, _ = holders(branch, shape)
    return found if mask is None else found & mask


def of_thread_zero(branch: Any, values: np.ndarray) -> np.ndarray:
    """Return the value that a branch of thread 0 stores to one address."""
    if not isinstance(branch, np.ndarray) or np.flatnonzero(branch).tolist() != [0]:
        raise CannotInterpret("a value per thread (%tid) is stored to one address")
    return values[:1]


def assigned_names(body: list[ast.stmt]) -> list[str]:
    """Return the variables that these statements assign."""
    nodes = (node for each in body for node in ast.walk(each))
    stored = (n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return [*dict.fromkeys(node.id for node in stored)]


def selecting(node: ast.If | ast.While, names: list[str], branch: str, helpers: str) -> list:
    """Return a body that puts these variables together at its end, if only some threads run it."""
    if not names:
        return node.body
    note = f"if {branch}.splits:\n    {branch}.note({helpers}.variables())"
    after = [
        f"    if {branch}.selects({name!r}, {node.lineno}, {helpers}.variables()):\n"
        f"        {name} = {branch}.selected"
        for name in names
    ]
    text = "\n".join([note, f"if {branch}.splits:", *after])
    first, last = ast.parse(text).body
    for each in (*ast.walk(first), *ast.walk(last)):
        if "lineno" in each._attributes:
            ast.copy_location(each, node)
    return [first, *node.body, last]
