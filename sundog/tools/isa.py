"""`sundog isa`: what the compilers make of an op's kernels, for GPUs that you do not have.

    for kernel in sundog.tools.isa.inspect("all_gather.push", targets=("sm_90", "gfx942")):
        print(kernel.name, kernel.target, kernel.stores, kernel.marks)

The op is planned on a simulated world, and its launches are recorded instead of run. Each kernel is
compiled for each target without a GPU, with the launch's specialisation. An op gets a problem that
is large enough for its wide path, and a config for the target.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import gpu_limits
from ..compiled.kernels import Kernel, inspect_launch
from ..errors import SundogError
from ..ops import load
from ..ops.op import OPS
from ..target import GPU_HEAP
from ..world.world import World
from ._console import (
    FINE,
    FOUND,
    command,
    ensure_compiler_cache,
    progress,
    write_results,
)
from ._launches import check_target, record
from ._options import IsaOptions
from ._primitives import PRIMITIVES
from ._subject import function_of, resolve, room


@command("isa")
def run(options: IsaOptions) -> int:
    """Exit with 1 if something is marked."""
    kernels = _inspect_all(options)
    console = Console(emoji=False)
    for _, group in itertools.groupby(sorted(kernels, key=_identity), key=_identity):
        _print(console, list(group))
    content = [dataclasses.asdict(kernel) for kernel in kernels]
    write_results(content, options.op or "all ops", options.json, options.html, indent=1)
    marked = sum(bool(kernel.marks) for kernel in kernels)
    console.print(f"{len(kernels)} kernels, {marked} marked")
    return FOUND if marked else FINE


def _inspect_all(options: IsaOptions) -> list[Kernel]:
    config, problem = load.parse(options.config), load.parse(options.problem)
    targets = [target for target in options.target.split(",") if target] or [""]
    ensure_compiler_cache()
    names = [options.op] if options.op else list(OPS)
    kernels: list[Kernel] = []
    with progress() as show:
        for number, name in enumerate(names):
            step = partial(show, "compiling", number, len(names))
            kernels += inspect(
                name, targets, config=config, problem=problem, world=options.world, step=step
            )
    return kernels


TARGETS = ("sm_90", "gfx942", "gfx950")
# No tails, and tiles for all SMs.
_LARGE = {"numel": 1 << 18, "m": 2048, "n": 4096, "k": 1024, "tokens": 64, "hidden": 4096}
_LEAST_HEAP = 64 << 20

Function = tuple[str, Callable[[World], Any], int]  # name, of a rank, bytes of the heap


@dataclass(frozen=True)
class Case:
    """How an op is inspected: changes to its problem and config, and the number of ranks."""

    problem: dict[str, Any]
    config: dict[str, Any]
    size: int


def inspect(
    op: str,
    targets: Sequence[str] = TARGETS,
    *,
    config: dict[str, Any] | None = None,
    problem: dict[str, Any] | None = None,
    world: int = 8,
    heap_size: int = GPU_HEAP,
    step: Callable[[str], None] = lambda _: None,
) -> list[Kernel]:
    """Inspect every kernel that one call of an op launches, for every target.

    `op` is an op (all its algorithms), one algorithm, a module of that shape, or a function of a
    world as module:function or file.py:function. `config` and `problem` change fields.
    """
    for target in targets:
        check_target(target)
    found: list[Kernel] = []
    for target in targets:
        with gpu_limits.aim(target):  # its FP8, its default, and its way to the data
            for name, fn, heap in functions(op, Case(problem or {}, config or {}, world)):
                launches = record(fn, world, heap, gpu_heap_size=heap_size)
                if not launches:
                    raise SundogError(f"{name} launched no kernel on rank 0 of {world}")
                for launch in launches:
                    step(f"{name} {launch.kernel.__name__} {target}")
                    kernel = inspect_launch(name, launch, target)
                    if kernel not in found:  # launched twice
                        found.append(kernel)
    return found


def functions(target: str, case: Case) -> Iterator[Function]:
    """Return one function per algorithm of an op, or the function that a target names."""
    algorithms = resolve(target).algorithms
    if target in PRIMITIVES:
        yield target, PRIMITIVES[target].run_once, _LEAST_HEAP
    elif not algorithms:
        yield target, function_of(target, case.size), _LEAST_HEAP
    for algorithm in algorithms:
        yield algorithm.name, *_of_op(algorithm.module, case)


def typical(module: ModuleType, size: int) -> Any:
    """Return the op's first case, without options, in a size that shows its wide path."""
    first = module.cases(size)[0]
    optional = {
        field.name: field.default
        for field in dataclasses.fields(first)
        if field.default is not dataclasses.MISSING and field.name != "scaling"  # FP8 needs one
    }
    larger: dict[str, Any] = {"dtype": torch.bfloat16, **_LARGE}
    if getattr(first, "scaling", ""):
        larger["dtype"] = first.dtype
    if hasattr(module, "LARGEST"):  # bytes
        larger["numel"] = min(larger["numel"], module.LARGEST // 4)  # of any dtype
        half = module.LARGEST // 8 // larger["hidden"]  # half of the most rows that it takes
        larger["tokens"] = max(min(larger["tokens"], half), 1)
    fitting = {name: value for name, value in larger.items() if hasattr(first, name)}
    return dataclasses.replace(first, **(optional | fitting))


def _of_op(module: ModuleType, case: Case) -> tuple[Callable[[World], Any], int]:
    problem = load.changed(typical(module, case.size), case.problem)
    moved = module.cost(problem).hbm_bytes

    def run(world: World) -> None:
        config = load.changed(module.default(problem, world.num_sms), case.config)
        plan = module.plan(world, problem, config)
        given = module.inputs(world, problem, 0)
        plan(*given, room(world, module, problem, given))

    return run, _LEAST_HEAP + 4 * moved


def _identity(kernel: Kernel) -> tuple[str, str]:
    return kernel.op, kernel.name


def _print(console: Console, kernels: list[Kernel]) -> None:
    """Print one kernel: a column per target, then what is marked."""
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
    """Show the narrowest load and store of the tiles that carry the data."""
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
