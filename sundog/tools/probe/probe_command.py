"""`sundog probe`: every row in a process of its own, a table, details, the exit status."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from ...knobs import BACKENDS
from ...target import has_gpu
from .._console import check_writable
from .columns import COLUMNS
from .probe import CAPTURABLE, ERROR, Cell, Row, defaults, probe_subject
from .probe_subjects import all_names, rows, subjects

__all__ = ["Options", "run"]

AS_EXPECTED, UNEXPECTED, CANNOT, INTERRUPTED = 0, 1, 2, 130
_WIDTH = 132  # of the table in a file
_LIMIT = 600.0  # seconds for a row


@dataclass(frozen=True)
class Options:
    targets: tuple[str, ...]
    world: int
    backend: str
    replays: int
    seed: int
    details: bool
    json: str


def run(options: Options) -> int:
    """0: every verdict is the expected one. 1: one is not. 2: it can't be probed. 130: Ctrl-C."""
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    try:
        if options.world < 1 or options.replays < 0:
            raise ValueError("--world must be at least 1, and --replays not negative")
        check_writable(options.json)
        _check_backend(options.backend)
        targets = list(options.targets) or all_names(options.backend)
        names = [row for target in targets for row in rows(target)]
        for name in names:  # what is not there is said before anything runs
            next(iter(subjects(name, options.world)))
    except ValueError as error:
        errors.print(escape(f"sundog probe: {error}"), style="red", soft_wrap=True)
        return CANNOT
    found = _probe_all(names, options)
    _print(console, found, options.details)
    if options.json:
        _write(found, options)
    if len(found) < len(names):
        console.print(f"interrupted: {len(names) - len(found)} of {len(names)} were not probed")
        return INTERRUPTED
    return AS_EXPECTED if all(row.verdict == row.expected for row in found) else UNEXPECTED


def _check_backend(asked: str) -> None:
    name, _ = defaults(asked, 0)
    if name not in BACKENDS:
        raise ValueError(f"--backend {name}: expected one of {', '.join(BACKENDS)}")
    if name in ("virtual", "symm") and not has_gpu():
        raise ValueError(f"--backend {name} needs a GPU, and torch finds none: take sim or shm")


def _probe_all(names: list[str], options: Options) -> list[Row]:
    """A process per name, so that no failure reaches the next."""
    backend, _ = defaults(options.backend, 0)
    on_gpu = backend in ("virtual", "symm")
    at_once = _at_once(backend, options.world)
    # A process that is forked has everything imported; CUDA does not live through a fork.
    context: Any = multiprocessing.get_context("spawn" if on_gpu else "fork")
    waiting = list(names)
    running: dict[Connection, tuple[str, Any, float]] = {}
    found: dict[str, Row] = {}
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("probing", total=len(names))
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(theirs, name, options))
                process.start()
                theirs.close()
                running[mine] = name, process, time.monotonic()
            try:
                answers = _answered(running)
            except KeyboardInterrupt:  # of a table, what there is of it
                for _, process, _ in running.values():
                    process.kill()
                break
            for answer in answers:
                name, process, _ = running.pop(answer)
                found[name] = _row(answer, name, process)
                progress.update(task, advance=1, description=name)
    return [found[name] for name in names if name in found]


def _at_once(backend: str, world: int) -> int:
    """A GPU lets processes take turns, and most of a row is the host's; ranks of `symm` are
    processes that must run side by side, so only as many rows as their shares of MPS allow."""
    if backend == "virtual":
        return max((os.cpu_count() or 1) // 2, 1)
    if backend == "symm":
        share = int(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"))
        return max(100 // (share * world), 1)
    return 2


def _answered(running: dict[Connection, tuple[str, Any, float]]) -> list[Connection]:
    """Those that have something to say; who says nothing for too long is ended."""
    for _, process, since in running.values():
        if time.monotonic() - since > _LIMIT:
            process.kill()
    return [each for each in wait(list(running), 1.0) if isinstance(each, Connection)]


def _child(answer: Connection, name: str, options: Options) -> None:
    torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
    answer.send(_probe(name, options))
    answer.close()


def _probe(name: str, options: Options) -> Row:
    row: Row | None = None
    for subject in subjects(name, options.world):
        size, backend, replays, seed = options.world, options.backend, options.replays, options.seed
        made = probe_subject(subject, size, backend, replays, seed)
        if row is None:
            row = made
        else:
            row.add(made, subject.case)
    assert row is not None
    return row


def _row(answer: Connection, name: str, process: Any) -> Row:
    try:
        row: Row = answer.recv()
    except EOFError:
        process.join()
        cell = Cell(ERROR, f"the process that probed it ended with status {process.exitcode}")
        row = Row(name, cells={next(iter(COLUMNS)): cell})
    process.join()
    return row


def _print(console: Console, rows: list[Row], details: bool) -> None:
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


def _write(found: list[Row], options: Options) -> None:
    from ..bench import results  # as every file with measurements

    backend, replays = defaults(options.backend, options.replays)
    content = {"kind": "probe", "machine": results.machine(), "world": options.world}
    content |= {"backend": backend, "replays": replays}
    results.write(options.json, content | {"rows": [_as_json(row) for row in found]})


def _as_json(row: Row) -> dict[str, Any]:
    cells = {column: asdict(cell) for column, cell in row.cells.items()}
    return {"name": row.name, "verdict": row.verdict, "expected": row.expected, "columns": cells}
