"""Which threads run a block of inline PTX, and where each instruction is in the kernel's file.

A program is simulated as one, so a value per thread (from `%tid`) is an array with an element per
thread, and `if` on such a value runs its body for the threads for which it is true. A block runs
once per **lane**:

- on tiles, lane i is element i. Thread t holds element t mod n of a tile of n elements, as Triton
  lays out a small tile; in a branch only the elements of the threads in it are lanes.
- on values per thread, lane t is thread t.
- on scalars all threads do the same. One lane stands for them, except where the block has an `atom`
or `red`, which happens once per thread, and for a small tile once per copy.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import triton

from .ptx_parse import PtxBlock, PtxInstruction

LOOP = " in a loop"  # at the end of an instruction's name, if it may be repeated without end
_PER_THREAD = ("%tid", "%laneid", "%warpid", "%lanemask")
_SKIP = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, triton.__file__)
)


@dataclass(frozen=True)
class Lanes:
    """The lanes of one block: each one's thread, and its element."""

    threads: np.ndarray
    elements: np.ndarray
    num_threads: int
    is_uniform: bool  # one lane, for all threads of the program
    size: int  # of the arguments

    @property
    def count(self) -> int:
        return len(self.threads)

    @property
    def is_thread_zero(self) -> bool:
        return not self.is_uniform and self.threads.tolist() == [0]

    def spread(self, values: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray:
        """Return an output as a tile of this shape, or as a scalar, maybe one per thread."""
        if shape is not None:
            whole = np.zeros(self.size, values.dtype)
            whole[self.elements] = values
            return whole.reshape(shape)
        if self.count and (self.is_uniform or (self.count > 1 and (values == values[0]).all())):
            return values[:1]
        per_thread = np.zeros(self.num_threads, values.dtype)
        per_thread[self.threads] = values
        return per_thread


def choose_lanes(
    assembly: PtxBlock, size: int, is_tile: bool, num_threads: int, mask: np.ndarray | None
) -> Lanes:
    """Choose the lanes of a block for arguments of `size` elements, in the threads of `mask`."""
    changes = assembly.uses("atom", "red")
    every = np.arange(num_threads) if mask is None else np.flatnonzero(mask)
    if is_tile and size >= num_threads:
        elements = np.arange(size)
        if mask is not None:
            elements = elements[mask[elements % num_threads]]
        return Lanes(elements % num_threads, elements, num_threads, False, size)
    if is_tile:
        elements = every % size
        if not changes:
            elements, first = np.unique(elements, return_index=True)
            every = every[first]
        return Lanes(every, elements, num_threads, False, size)
    if size > 1:
        return Lanes(every, every, num_threads, False, size)
    if changes or assembly.mentions(*_PER_THREAD):
        return Lanes(every, np.zeros(len(every), int), num_threads, False, size)
    one = every[:1]
    return Lanes(one, np.zeros(len(one), int), num_threads, mask is None, size)


# the place of an instruction


def locate(text: str) -> Callable[[PtxInstruction], Callable]:
    """Return a function that returns, per instruction, one that calls from its line in the file.

    The stack then shows the kernel's file, the line and the instruction.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIP):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno or 0
    lines = _literal_lines(path, line, text.count("\n"))

    def at(instruction: PtxInstruction) -> Callable:
        name = instruction.opcode + (LOOP if instruction.in_loop else "")
        return _caller(path, lines[instruction.line - 1] if lines else line, name)

    return at


_call = lambda function: function()  # noqa: E731 -- one line, so that its line is the first one


@functools.lru_cache(maxsize=4096)
def _caller(path: str, line: int, name: str) -> Callable:
    code = _call.__code__.replace(co_filename=path, co_firstlineno=line, co_name=name)
    return FunctionType(code, {})


def _literal_lines(path: str, line: int, num_breaks: int) -> list[int]:
    """Return the line in the file of each line of the text; none if it is no literal there."""
    for first, last, lines in _calls(path):
        if first <= line <= last and len(lines) == num_breaks + 1:
            return lines
    return []


@functools.lru_cache(maxsize=256)
def _calls(path: str) -> list[tuple[int, int, list[int]]]:
    """Return the calls of inline_asm_elementwise in a file: lines, and those of their text."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _named(node.func) == "inline_asm_elementwise":
            given = {word.arg: word.value for word in node.keywords}
            text = node.args[0] if node.args else given.get("asm")
            if text is not None:
                found.append((node.lineno, node.end_lineno or node.lineno, _lines(text)))
    return found


def _lines(text: ast.expr) -> list[int]:
    """Return the lines of a text: of a literal, or of literals and names joined by `+`."""
    if isinstance(text, ast.BinOp):
        left, right = _lines(text.left), _lines(text.right)
        return [*left, *right[1:]] if left else right
    if isinstance(text, ast.Constant | ast.JoinedStr):
        return [*range(text.lineno, (text.end_lineno or text.lineno) + 1)]
    return []


def _named(function: Any) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))
