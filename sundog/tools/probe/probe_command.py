"""`sundog probe`: ops, primitives, torch's own ops and a user's functions, a table row for each.

Every row is probed in its own process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ...knobs import BACKENDS
from ...ops import load
from ...ops import op as ops
from ...target import has_gpu
from ...world.world import World
from .._console import (
    FINE,
    FOUND,
    INTERRUPTED,
    command,
    ensure_compiler_cache,
    progress,
    write_results,
)
from .._options import ProbeOptions
from .._pool import Failure, Worker, run_all, serve
from .._primitives import PRIMITIVES
from .._subject import Resolved, expected, output, resolve
from ..timing import machine
from .columns import COLUMNS
from .fresh_data import Subject, Tensors, as_tuple
from .probe import CAPTURABLE, ERROR, Cell, ProbeRow, defaults, probe_subject

_WIDTH = 132  # of the table in a file
_LIMIT = 600.0  # seconds for a row


@command("probe")
def run(options: ProbeOptions) -> int:
    """Exit with 1 if a verdict is not the expected one. Ctrl-C keeps the rows that are done."""
    names = _checked_names(options)
    if has_gpu():
        ensure_compiler_cache()
    found = _probe_all(names, options)
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    _print(console, found, options.details)
    write_results(_content(found, options), "probe", options.json, options.html)
    if len(found) < len(names):
        console.print(f"interrupted: {len(names) - len(found)} of {len(names)} were not probed")
        return INTERRUPTED
    return FINE if all(row.verdict == row.expected for row in found) else FOUND


def _checked_names(options: ProbeOptions) -> list[str]:
    """List the rows to probe. Raise ValueError, before anything runs, if one does not exist."""
    if options.world < 1 or options.replays < 0:
        raise ValueError("--world must be at least 1, and --replays not negative")
    _check_backend(options.backend)
    targets = options.targets or all_names(options.backend, options.world)
    names = [row for target in targets for row in rows(target)]
    for name in names:
        next(iter(subjects(name, options.world)))
    return names


# Torch's own ops on `symm`, where ranks are processes: baselines of all_reduce.
_OF_TORCH = {
    f"torch.{name}": name for name in ("nccl", "gloo", "symm_mem.one_shot", "symm_mem.two_shot")
}


def all_names(backend: str = "", size: int = 0) -> list[str]:
    """List what is probed by default: algorithms, primitives, and on `symm` torch's own ops.

    Where `size` ranks have fewer GPUs, leave out NCCL and what needs a GPU for each rank.
    """
    of_torch, there = list(_OF_TORCH) if backend == "symm" else [], list(ops.OPS)
    if backend in ("virtual", "symm") and torch.cuda.device_count() < size:
        of_torch = [name for name in of_torch if name != "torch.nccl"]
        there = [n for n in there if not getattr(load.find(n), "OWN_GPU", False)]
    return [*there, *PRIMITIVES, *of_torch]


def rows(target: str) -> list[str]:
    """List the rows of a target: itself or, if it names a dict of Subjects, each of them."""
    found = resolve(target).found if ":" in target else None
    return [f"{target}.{key}" for key in found] if isinstance(found, dict) else [target]


def subjects(target: str, size: int) -> Iterator[Subject]:
    """Return what a target names, ready to be probed. An algorithm has several cases."""
    if target in _OF_TORCH:
        yield _all_reduce_of_torch(target, size)
    elif target in PRIMITIVES:
        made = PRIMITIVES[target]
        verdict = "CAPTURABLE" if made.can_capture else "NOT CAPTURABLE"
        yield Subject(target, made.prepare, made.inputs, made.reference, expected=verdict)
    else:
        resolved = resolve(target)
        for algorithm in resolved.algorithms:
            yield from _of_op(algorithm.name, algorithm.module, size)
        if not resolved.algorithms:
            yield _of_user(resolved)


def _of_op(name: str, op: ModuleType, size: int) -> Iterator[Subject]:
    """Return a subject for each case of an op, of which only the first goes through all columns."""
    for place, problem in enumerate(op.cases(size)):
        yield Subject(
            name,
            partial(_planned, op=op, problem=problem),
            partial(_inputs, op=op, problem=problem),
            partial(op.reference, problem),
            beside=True,
            case=_short(problem),
            columns=("replays",) if place else (),
        )


def _inputs(world: World, seed: int, op: ModuleType, problem: Any) -> Tensors:
    return as_tuple(op.inputs(world, problem, seed))


def _planned(world: World, op: ModuleType, problem: Any) -> Callable[..., Any]:
    plan = op.plan(world, problem, op.default(problem, world.num_sms))
    outs: dict[tuple, torch.Tensor] = {}  # an output for every set of inputs

    def call(*inputs: torch.Tensor) -> Any:
        key = tuple(tensor.data_ptr() for tensor in inputs)
        if key not in outs:
            outs[key] = output(world, expected(world, op, problem, inputs))
            world.barrier()  # peers may be touched
        return plan(*inputs, outs[key])

    return call


def _short(problem: Any) -> str:
    values = vars(problem).items()
    return ",".join(str(value).removeprefix("torch.") for name, value in values if name != "size")


def _of_user(resolved: Resolved) -> Subject:
    """Return a `Subject`, or make one of a function, `make_inputs` and `reference`."""
    found, target = resolved.found, resolved.target
    if isinstance(found, Subject):
        return found
    names = ("make_inputs", "reference")
    make_inputs, reference = (getattr(resolved.module, name, None) for name in names)
    if not callable(found) or make_inputs is None or reference is None:
        name = target.partition(":")[2] or "main"
        raise ValueError(
            f"{target}: expected a function {name}(world, *inputs), with make_inputs(world, seed) "
            "and reference(rank, *parts) beside it, a sundog.tools.probe.probe.Subject, or a dict "
            "of them"
        )

    def inputs(world: World, seed: int) -> Tensors:
        return as_tuple(make_inputs(world, seed))

    return Subject(target, lambda world: partial(found, world), inputs, reference)


def _all_reduce_of_torch(target: str, size: int) -> Subject:
    from ..baselines import BASELINES  # torch.distributed is slow to import

    baseline = BASELINES["all_reduce"][_OF_TORCH[target]]
    op = load.find("all_reduce")
    problem = op.Problem(4096, torch.bfloat16, size)  # an aligned size, as torch's ops require

    def prepare(world: World) -> Callable[..., Any]:
        calls: dict[tuple, tuple] = {}

        def call(*inputs: torch.Tensor) -> torch.Tensor:
            key = tuple(tensor.data_ptr() for tensor in inputs)
            if key not in calls:
                out = torch.empty_like(inputs[0])
                calls[key] = baseline.make(world, problem, inputs, out), out
            launch, out = calls[key]
            launch()
            return out

        return call

    inputs = partial(_inputs, op=op, problem=problem)
    reference = partial(op.reference, problem)
    verdict = "CAPTURABLE" if baseline.graph else "NOT CAPTURABLE"
    return Subject(target, prepare, inputs, reference, expected=verdict, columns=("replays",))


def _check_backend(asked: str) -> None:
    name, _ = defaults(asked, 0)
    if name not in BACKENDS:
        raise ValueError(f"--backend {name}: expected one of {', '.join(BACKENDS)}")
    if name in ("virtual", "symm") and not has_gpu():
        raise ValueError(f"--backend {name} needs a GPU, and torch finds none: take sim or shm")


def _probe_all(names: list[str], options: ProbeOptions) -> list[ProbeRow]:
    """Probe each name in its own process, so that no failure reaches the next."""
    backend, _ = defaults(options.backend, 0)
    # A forked process has everything imported; CUDA does not survive a fork.
    start = "spawn" if backend in ("virtual", "symm") else "fork"
    body = serve(partial(_probe, options=options))
    count = min(_at_once(backend, options.world), len(names))
    workers = [Worker(body, _LIMIT, start=start, fresh=True) for _ in range(count)]
    found: dict[str, ProbeRow] = {}
    with progress() as show, suppress(KeyboardInterrupt):
        for name, reply in run_all(workers, names):
            if isinstance(reply, Failure):
                reply = ProbeRow(name, cells={next(iter(COLUMNS)): Cell(ERROR, reply.error)})
            found[name] = reply
            show("probing", len(found), len(names), name)
    return [found[name] for name in names if name in found]


def _at_once(backend: str, world: int) -> int:
    """Return how many rows are probed at a time.

    Processes alternate on a GPU, and most of a row is the host's work. Ranks of `symm` are
    processes that must run side by side, so there are only as many rows as their shares of MPS
    allow.
    """
    if backend == "virtual":
        return max((os.cpu_count() or 1) // 2, 1)
    if backend == "symm":
        share = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
        return max(100 // (share * world), 1)
    return 2


def _probe(name: str, options: ProbeOptions) -> ProbeRow:
    how = options.world, options.backend, options.replays, options.seed
    first, *others = subjects(name, options.world)
    row = probe_subject(first, *how)
    for subject in others:
        row.add(probe_subject(subject, *how), subject.case)
    return row


def _print(console: Console, rows: list[ProbeRow], details: bool) -> None:
    names = [Column(name, no_wrap=True) for name in ("op", "verdict")]
    table = Table(*names, *COLUMNS)
    for row in rows:
        style = "green" if row.verdict == row.expected else "red"
        note = "" if row.expected == CAPTURABLE else " (expected)" * (row.verdict == row.expected)
        cells = [_mark(row.cells.get(column)) for column in COLUMNS]
        table.add_row(escape(row.name), f"[{style}]{row.verdict}[/]{note}", *cells)
    console.print(table)
    for row in rows:
        if row.verdict != CAPTURABLE:
            text = str(row) if details else "\n".join(str(row).splitlines()[:4])
            console.print(escape(text), highlight=False, soft_wrap=True)


def _mark(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return "ok" if cell.verdict == CAPTURABLE else cell.verdict.lower()


def _content(found: list[ProbeRow], options: ProbeOptions) -> dict[str, Any]:
    backend, replays = defaults(options.backend, options.replays)
    return {
        "kind": "probe",
        "machine": machine(),
        "world": options.world,
        "backend": backend,
        "replays": replays,
        "rows": [_as_json(row) for row in found],
    }


def _as_json(row: ProbeRow) -> dict[str, Any]:
    cells = {column: asdict(cell) for column, cell in row.cells.items()}
    return {"name": row.name, "verdict": row.verdict, "expected": row.expected, "columns": cells}
