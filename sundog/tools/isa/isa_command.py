"""`sundog isa`: compile an op's kernels, print what came of them, and mark what falls short."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...compiled.kernels import Kernel
from ...ops import load
from ...ops.op import OPS
from .._console import (
    FINE,
    FOUND,
    check_writable,
    command,
    ensure_compiler_cache,
    progress,
    write_json,
)
from .._launches import check_target
from .inspect import inspect

__all__ = ["IsaOptions", "run"]


@dataclass(frozen=True)
class IsaOptions:
    op: str  # "" inspects all ops
    target: str  # architectures, with commas
    config: str = ""
    problem: str = ""
    world: int = 8
    json: str = ""


@command("isa")
def run(options: IsaOptions) -> int:
    """Exit with 1 if something is marked."""
    kernels = _inspect_all(options)
    console = Console()
    for _, group in itertools.groupby(sorted(kernels, key=_identity), key=_identity):
        _print(console, list(group))
    if options.json:
        write_json(options.json, [dataclasses.asdict(kernel) for kernel in kernels], indent=1)
    marked = sum(bool(kernel.marks) for kernel in kernels)
    console.print(f"{len(kernels)} kernels, {marked} marked")
    return FOUND if marked else FINE


def _inspect_all(options: IsaOptions) -> list[Kernel]:
    config, problem = load.parse(options.config), load.parse(options.problem)
    if options.world < 1:
        raise ValueError(f"--world {options.world}: a world has at least one rank")
    check_writable(options.json)
    targets = [target for target in options.target.split(",") if target] or [""]
    ensure_compiler_cache()
    for target in targets:
        check_target(target)
    names = [options.op] if options.op else list(OPS)
    kernels: list[Kernel] = []
    with progress() as show:
        for number, name in enumerate(names):

            def step(text: str, done: int = number) -> None:
                show("compiling", done, len(names), text)

            kernels += inspect(
                name, targets, config=config, problem=problem, world=options.world, step=step
            )
    return kernels


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
