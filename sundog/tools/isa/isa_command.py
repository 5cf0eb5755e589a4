"""`sundog isa`: inspect an op's kernels, print what the compilers made of them, mark what is short.

Exit status: 0 nothing marked, 1 marked, 2 could not.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...errors import SundogError
from ...ops import load
from ...ops.op import OPS
from .._console import check_writable
from .inspect import Kernel, inspect

__all__ = ["run"]

NOTHING, MARKED, CANNOT = 0, 1, 2


def run(op: str, targets: str, config: str, problem: str, world: int, json_file: str) -> int:
    console, errors = Console(), Console(stderr=True)
    try:
        changes = load.parse(config), load.parse(problem)
        if world < 1:
            raise ValueError(f"--world {world}: a world has at least one rank")
        check_writable(json_file)
        with errors.status("planning") as status:
            names = [op] if op else list(OPS)
            named = [target for target in targets.split(",") if target] or [""]
            each = [inspect(n, named, *changes, world, step=status.update) for n in names]
    except (ValueError, SundogError) as error:
        errors.print(escape(f"sundog isa: {error}"), style="red", soft_wrap=True)
        return CANNOT
    kernels = list(itertools.chain.from_iterable(each))
    for _, group in itertools.groupby(sorted(kernels, key=_identity), key=_identity):
        _print(console, list(group))
    if json_file:
        with open(json_file, "w") as file:
            json.dump([dataclasses.asdict(kernel) for kernel in kernels], file, indent=1)
    marked = sum(bool(kernel.marks) for kernel in kernels)
    console.print(f"{len(kernels)} kernels, {marked} marked")
    return MARKED if marked else NOTHING


def _identity(kernel: Kernel) -> tuple[str, str]:
    return kernel.op, kernel.name


def _print(console: Console, kernels: list[Kernel]) -> None:
    """One kernel: a column per target, then what is marked."""
    table = Table("", *(k.target for k in kernels), title=escape(" ".join(_identity(kernels[0]))))
    for name, show in _ROWS.items():
        table.add_row(name, *(show(kernel) for kernel in kernels))
    console.print(table)
    for kernel in kernels:
        for mark in kernel.marks:
            at = f" at {mark.where}" if mark.where else ""
            text = f"{kernel.op} {kernel.target}: {mark.rule}{at}: {mark.text}"
            console.print(escape(text), style="red", soft_wrap=True, highlight=False)


def _counts(widths: dict[int, int]) -> str:
    return "\n".join(f"{n} x {nbytes} B" for nbytes, n in widths.items()) or "-"


def _wide(kernel: Kernel) -> str:
    """The narrowest load and store of the tiles that carry the data."""
    lines = []
    for kind in ("load", "store"):
        sites = [s for s in kernel.sites if s.kind == kind and s.role == "wide" and s.widths]
        least = min((min(site.widths) for site in sites), default=0)
        if least:
            lines.append(f"{kind} {least} B")
    return "\n".join(lines) or "-"


def _numbered(names: dict[str, int]) -> str:
    return "\n".join(f"{count} {name}" for name, count in names.items()) or "-"


_ROWS: dict[str, Callable[[Kernel], str]] = {
    "wide path": _wide,
    "global loads": lambda k: _counts(k.loads),
    "global stores": lambda k: _counts(k.stores),
    "atomics": lambda k: _numbered(k.atomics),
    "barriers": lambda k: str(k.barriers),
    "registers": lambda k: str(k.registers),
    "spilled": lambda k: f"{k.spills} B",
    "shared memory": lambda k: f"{k.shared:,} B",
    "tensor cores": lambda k: _numbered(k.tensor_cores),
    "TMA copies": lambda k: str(k.tma),
}
