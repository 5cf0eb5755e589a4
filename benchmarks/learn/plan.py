"""What to measure, and in which order: a run that is cut at any time has measured all alike.

Cells that share a binary are one unit. The first config of every kernel, dtype and class of shapes
comes before the second of any. Binaries that serve few shapes come less often.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from .compile_ahead import Cell, cell_key
from .draw import drawn
from .kernels import SUBJECTS
from .subject import Config, Subject, Task

CONTROLS = (
    Cell("matmul", "bfloat16", {"m": 2048, "n": 4096, "k": 2048, "layout": "nn"},
         {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3,
          "GROUP_M": 8}, control=True),
    Cell("swiglu", "bfloat16", {"m": 2048, "n": 4096},
         {"BLOCK": 1024, "num_warps": 4, "num_stages": 1, "WAVES": 0}, control=True),
)  # fmt: skip
_VARIANTS = 2  # configs of one binary on one shape, which differ at the launch alone
_FEW = 3  # shapes: a binary that serves fewer comes at _LESS of the pace
_LESS = 0.35


def units(
    names: Sequence[str], known: Collection[str], most: int, shapes: int = 0
) -> list[list[Cell]]:
    """Return all units in order, without cells whose key is known; at most `most` configs.

    `shapes`: draw this number of new ones of each kernel, and take none of its own.
    """
    subjects = [SUBJECTS[name] for name in names or SUBJECTS]
    subjects = [drawn(each, shapes) if shapes else each for each in subjects]
    ranked = [pair for subject in subjects for pair in _of(subject, most)]
    ranked.sort(key=lambda pair: pair[0])
    left = [[cell for cell in cells if cell_key(cell) not in known] for _, cells in ranked]
    return [cells for cells in left if cells]


def known_units(cells: Sequence[Cell], count: int, seed: int = 0) -> list[list[Cell]]:
    """Draw cells that were measured before; return them as repeats, by binary."""
    drawn = random.Random(seed).sample(cells, min(count, len(cells)))
    by_key: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in drawn:
        key = (cell.name, cell.dtype, cell.task.binary_key(cell.config))
        by_key[key].append(replace(cell, repeat=1))
    return list(by_key.values())


def _of(subject: Subject, most: int) -> list[tuple[tuple[float, str], list[Cell]]]:
    found = []
    for dtype in subject.dtypes:
        tasks = [Task(subject, shape, dtype) for shape in subject.shapes]
        by_key: dict[str, list[Cell]] = {}
        order: dict[str, int] = {}
        for number, config in enumerate(subject.configs[:most]):
            for task in filter(lambda task: task.takes(config), tasks):
                key = task.binary_key(config)
                order.setdefault(key, number)
                _add(by_key.setdefault(key, []), task, config)
        found += [(_rank(order[key], cells, key), cells) for key, cells in by_key.items()]
    return found


def _add(cells: list[Cell], task: Task, config: Config) -> None:
    if sum(cell.shape is task.shape for cell in cells) < _VARIANTS:
        cells.append(Cell(task.subject.name, task.dtype, task.shape, config))


def _rank(number: int, cells: list[Cell], key: str) -> tuple[float, str]:
    shapes: dict[int, int] = defaultdict(int)
    for cell in cells:
        shapes[id(cell.shape)] += 1
    return (number if len(shapes) >= _FEW else number / _LESS), key
