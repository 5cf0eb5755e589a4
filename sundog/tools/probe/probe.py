"""`probe` tests whether a function can be captured in a graph and its replays are correct.

    row = sundog.probe(fn, make_inputs=make_inputs, reference=reference, world=2)
    assert row.verdict == "CAPTURABLE", row

`fn(world, *inputs)` runs on every rank. It is warmed up, captured, and replayed with fresh random
inputs into poisoned outputs, in several ways (the columns), each in a fresh world. Where ranks are
processes, which take seconds to start on a GPU, all columns are first tried in one world. On the
simulator the race checker watches, so a replay that is right by luck is found too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ... import knobs
from ...backends.sim import simulate
from ...callsite import raised_at, relative
from ...checker.checker import Checker
from ...errors import CaptureError, Deadlock, WaitTimeout
from ...launch import run
from ...machine.deadlock import Wait
from ...machine.machine import Machine
from ...machine.schedule import from_token
from ...target import has_gpu
from ...world.world import World
from .columns import COLUMNS, run_column
from .fresh_data import Observed, Subject, Tensors, as_tuple

CAPTURABLE, NOT_CAPTURABLE, STALE, WRONG, HANGS, ERROR = VERDICTS = (
    "CAPTURABLE", "NOT CAPTURABLE", "STALE", "WRONG", "HANGS", "ERROR",
)  # fmt: skip
_HEAP = 16 << 20
_GPU_HEAP = 64 << 20  # several rows at once; SUNDOG_HEAP_SIZE for an op that needs more
_SECONDS = 10.0  # until a wait in a kernel expires, where waits take time
_SIM_REPLAYS, _GPU_REPLAYS = 12, 100


@dataclass(frozen=True)
class Cell:
    """One column of a row."""

    verdict: str
    detail: str = ""  # a text with the line or the wait
    replay: int = -1  # the first one that went wrong; 0: without a graph
    reason: str = ""  # why it can't be captured
    where: str = ""  # the line that did it


@dataclass
class ProbeRow:
    """The verdicts on one subject."""

    name: str
    expected: str = CAPTURABLE
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[str, Cell]:
        """The first column that is not CAPTURABLE, or the first one."""
        bad = [item for item in self.cells.items() if item[1].verdict != CAPTURABLE]
        return (bad or list(self.cells.items()))[0]

    @property
    def verdict(self) -> str:
        return self.worst[1].verdict

    def add(self, other: ProbeRow, case: str) -> None:
        """Add another case of the same subject, whose failures count for the subject."""
        for column, cell in other.cells.items():
            if column not in self.cells or self.cells[column].verdict == CAPTURABLE:
                self.cells[column] = replace(cell, detail=f"{case}: {cell.detail}")

    def __str__(self) -> str:
        column, cell = self.worst
        if cell.verdict == CAPTURABLE:
            return f"{self.name}: {CAPTURABLE} ({', '.join(self.cells)})"
        return f"{self.name}: {cell.verdict} ({column})\n{cell.detail}"


def probe(
    fn: Callable[..., Any],
    make_inputs: Callable[[World, int], Any],
    reference: Callable[..., Any],
    world: int = 2,
    backend: str = "",
    replays: int = 0,
    tolerance: float = 0.0,
) -> ProbeRow:
    """Probe `fn(world, *inputs)` on `world` ranks.

    `make_inputs(world, seed)` returns a rank's tensors: random, the same for the same seed, and
    symmetric if `fn` needs that. `reference(rank, *parts)` returns the answer, from all ranks'
    first, second, ... input. `tolerance` is relative to the largest element; 0 compares bits.
    """
    name = getattr(fn, "__name__", "function")

    def prepare(own: World) -> Callable[..., Any]:
        return functools.partial(fn, own)

    def inputs(own: World, seed: int) -> Tensors:
        return as_tuple(make_inputs(own, seed))

    subject = Subject(name, prepare, inputs, reference, tolerance)
    return probe_subject(subject, world, backend, replays)


def probe_subject(
    subject: Subject, world: int = 2, backend: str = "", replays: int = 0, seed: int = 0
) -> ProbeRow:
    """Run all columns, until one shows that the subject is not capturable."""
    name, many = defaults(backend, replays)
    row = ProbeRow(subject.name, subject.expected)
    counts = {column: max(many // 4, min(many, 3)) for column in subject.columns or COLUMNS}
    counts[next(iter(counts))] = many
    if name in ("shm", "symm") and _all_right(subject, counts, world, name):
        row.cells = dict.fromkeys(counts, Cell(CAPTURABLE))
        return row
    for place, (column, count) in enumerate(counts.items()):
        row.cells[column] = _cell(subject, column, world, name, count, f"random:{seed + place}")
        if row.cells[column].verdict != CAPTURABLE:
            break
    return row


def _all_right(subject: Subject, counts: dict[str, int], size: int, backend: str) -> bool:
    """Run all columns in one world. If one goes wrong, run each again in its own world."""

    def rank(world: World) -> bool:
        return all(
            all(world.exchange(run_column(*item, world, subject).replay < 0, "verdict"))
            for item in counts.items()
        )

    try:
        return all(run(rank, size, backend, heap_size=_gpu_heap(), timeout=_SECONDS))
    except Exception:
        return False


def defaults(backend: str, replays: int) -> tuple[str, int]:
    """Return the default backend and number of replays."""
    name = backend or knobs.backend.get() or ("virtual" if has_gpu() else "sim")
    return name, replays or (_GPU_REPLAYS if name in ("virtual", "symm") else _SIM_REPLAYS)


def _cell(
    subject: Subject, column: str, size: int, backend: str, replays: int, schedule: str
) -> Cell:
    def rank(world: World) -> Observed:
        return run_column(column, replays, world, subject)

    try:
        if backend == "sim":
            return _simulated(rank, size, schedule)
        return _judged(run(rank, size, backend, heap_size=_gpu_heap(), timeout=_SECONDS))
    except Exception as error:
        return _failed(error)


def _gpu_heap() -> int:
    return knobs.heap_size.get() or _GPU_HEAP


def _simulated(rank: Callable[[World], Observed], size: int, schedule: str) -> Cell:
    machine = Machine(from_token(schedule), knobs.num_sms.get(), expire=False)
    checker = machine.checker = Checker(machine.memory)
    simulate(machine, rank, size, knobs.heap_size.get() or _HEAP)
    if machine.failure is not None:
        return _failed(machine.failure)
    cell = _judged([host.result for host in machine.hosts])
    checker.ask_compiler()
    findings = list(checker.findings.values())
    if findings:  # whatever the result was, another schedule may give another one
        findings[0].token = schedule
        return Cell(WRONG, str(findings[0]), cell.replay)
    return cell


def _judged(observed: list[Observed]) -> Cell:
    bad = [each for each in observed if each.replay >= 0]
    if not bad:
        return Cell(CAPTURABLE)
    first = min(bad, key=lambda each: each.replay)
    if first.replay == 0:
        return Cell(WRONG, f"also without a graph: {first.text}", 0)
    if all(each.stale for each in bad):
        return Cell(
            STALE, f"replay {first.replay} did not see its data: {first.text}", first.replay
        )
    return Cell(WRONG, f"replay {first.replay}: {first.text}", first.replay)


def _failed(error: BaseException) -> Cell:
    if not isinstance(error, Exception):
        raise error
    if isinstance(error, CaptureError):
        return Cell(NOT_CAPTURABLE, str(error), -1, error.reason, error.where)
    if isinstance(error, WaitTimeout):
        return Cell(HANGS, str(error))
    if isinstance(error, Deadlock):
        waits = [each for each in error.waits if isinstance(each, Wait)]
        return Cell(HANGS, f"{_wait(waits[0])}\n{error}" if waits else str(error))
    path, line, _ = raised_at(error)
    return Cell(ERROR, f"{relative(path)}:{line}: {type(error).__name__}: {error}")


def _wait(wait: Wait) -> str:
    flags = ", ".join(f"{f} = {v}" for f, v in zip(wait.flags[:3], wait.seen[:3], strict=True))
    owed = f"; rank {wait.owes} owes the signal" if wait.owes is not None else ""
    return f"rank {wait.rank}, {wait.kernel}: waits while {flags} is {wait.expected}{owed}"
