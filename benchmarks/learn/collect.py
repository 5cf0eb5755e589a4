"""`python -m benchmarks.learn collect OUT --minutes 7`: fill a folder with rows.

Processes compile ahead, one process measures, this one hands out and writes. A run goes on from
what its folder has. What a config did, whatever it was, is a row.

| file | one line is |
|---|---|
| rows.xz | a measurement, or why there is none; the last ones are in rows.jsonl while it runs |
| binaries.jsonl | a compiled kernel: its rows name it |
| ir.xz | lines of JSON: TTIR and TTGIR as text, each once; several streams, one after the other |
| gpu.csv | clocks, temperature and power with the time |
| run.json | machine, versions, counts |
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sundog.tools._pool import Failure, Worker, finished, serve

from .compile_ahead import Binary, Cell, compiler
from .measure import MAX_SHARED, Measured, Unit, made_up, on_gpu
from .plan import CONTROLS, known_units, units
from .record import Records, known_cells, known_rows
from .subject import key_of

Measure = Callable[[Unit], list[Measured]]

_COMPILE_S, _MEASURE_S = 40.0, 60.0  # after which a compilation, or a unit, hangs
_AHEAD = 64  # units that wait, compiled, for the GPU
_CONTROL_S, _SHOW_S = 10.0, 15.0
_FAILURES, _MOST_FAILURES = ("error", "wrong", "crash", "timeout", "compile_error"), 60


@dataclass(frozen=True)
class Options:
    out: Path
    minutes: float
    names: list[str] = field(default_factory=list)
    workers: int = 0  # 0: all cores but one
    configs: int = 400  # of each kernel at most
    again: float = 0.06  # part of the time for measuring earlier rows again
    clock: str = "gpu"
    data: Path | None = None  # a dataset: what it has is not measured again
    remeasure: int = 0  # rows of `data` to measure again, and nothing else
    shapes: int = 0  # new ones to draw of each kernel, in the place of its own
    seed: int = 0


class Collector:
    """One run. `waiting` and `ready` are units before and after their compilation."""

    def __init__(self, options: Options, measure: Measure | None = None) -> None:
        """`measure` stands in for the GPU in tests."""
        self.begin = time.monotonic()
        self.records = Records(options.out)
        self.waiting = deque(_planned(options, self.records.known))
        self.waiting.extendleft([control] for control in reversed(CONTROLS))
        self.ready: deque[Unit] = deque()
        self.controls: list[Unit] = []
        self.done: list[Unit] = []  # measured, to be measured again
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self.options = options
        measure = measure or (None if options.clock == "gpu" else made_up)
        count = options.workers or max((os.cpu_count() or 2) - 1, 1)
        compile_body = functools.partial(_compile_body, options.clock == "gpu")
        self.compilers = [Worker(compile_body, _COMPILE_S) for _ in range(count)]
        self.gpu = Worker(functools.partial(_gpu_body, measure), _MEASURE_S)
        self._next_control = self._next_show = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def run(self) -> dict[str, Any]:
        """Collect until the time is over or nothing is left; return the counts."""
        end = 60 * self.options.minutes
        watch = self.records.watch_gpu() if self.options.clock == "gpu" else None
        try:
            while self.seconds < end and self._busy_or_left():
                self._hand_out(again=self.seconds > end * (1 - self.options.again))
                for worker, task, reply in finished([self.gpu, *self.compilers]):
                    if worker is self.gpu:
                        self._measured(task, reply)
                    else:
                        self._compiled(task, reply)
                self._show()
                self._check_that_it_works()
        finally:
            for worker in [self.gpu, *self.compilers]:
                worker.close()
            if watch is not None:
                watch.terminate()
            self.records.close(self.summary())
        return self.summary()

    def summary(self) -> dict[str, Any]:
        rows = sum(n for name, n in self.counts.items() if name.startswith("rows "))
        return {
            "clock": self.options.clock,
            "seconds": round(self.seconds, 1),
            "gpu_busy": round(self.gpu.busy_s / max(self.seconds, 1e-9), 3),
            "rows_per_second": round(rows / max(self.seconds, 1e-9), 1),
            "units_left": len(self.waiting),
            "minutes": self.options.minutes,
            "counts": dict(sorted(self.counts.items())),
        }

    # inside

    def _busy_or_left(self) -> bool:
        working = any(worker.task is not None for worker in [self.gpu, *self.compilers])
        return bool(self.waiting or self.ready or working)

    def _hand_out(self, again: bool) -> None:
        for worker in self.compilers:
            if worker.task is None and self.waiting and len(self.ready) < _AHEAD and not again:
                worker.submit(self.waiting.popleft())
        if self.gpu.task is not None:
            return
        if len(self.controls) == len(CONTROLS) and self.seconds > self._next_control:
            self._next_control = self.seconds + _CONTROL_S
            self.counts["controls"] += 1
            self.ready.extendleft(
                _repeated(each, self.counts["controls"]) for each in self.controls
            )
        elif again and self.done:
            number = random.Random(self.options.seed + len(self.done)).randrange(len(self.done))
            self.ready.appendleft(_repeated(self.done.pop(number), 1))
        if self.ready:
            self.gpu.submit(self.ready.popleft())

    def _compiled(self, cells: list[Cell], reply: Binary | Failure) -> None:
        self.counts["compilations"] += 1
        if isinstance(reply, Failure):
            status = "compile_timeout" if reply.status == "timeout" else "compile_error"
            self._write_all(cells, Measured(status, error=reply.error[:300]), None)
            return
        self.records.add_binary(_binary_key(reply, cells), cells[0], reply)
        unit = Unit(reply, cells)
        if cells[0].control:
            self.controls.append(unit)
        elif reply.shared > MAX_SHARED:
            text = f"{reply.shared} bytes of shared memory, of {MAX_SHARED}"
            self._write_all(cells, Measured("out_of_resources", error=text), reply)
        else:
            self.ready.append(unit)

    def _measured(self, unit: Unit, reply: list[Measured] | Failure) -> None:
        if not isinstance(reply, Failure):
            for cell, measured in zip(unit.cells, reply, strict=True):
                self._write(cell, measured, unit.binary)
            if not unit.cells[0].control and not unit.cells[0].repeat:
                self.done.append(unit)
        elif len(unit.cells) == 1:
            status = "timeout" if reply.status == "timeout" else "crash"
            self._write(
                unit.cells[0], Measured(status, error=reply.error, at=time.time()), unit.binary
            )
        else:  # one of them ended the process: which?
            self.counts["restarts"] += 1
            self.ready.extendleft(Unit(unit.binary, [cell]) for cell in unit.cells)

    def _write_all(self, cells: list[Cell], measured: Measured, binary: Binary | None) -> None:
        for cell in cells:
            self._write(cell, replace(measured, at=time.time()), binary)

    def _write(self, cell: Cell, measured: Measured, binary: Binary | None) -> None:
        sort = "control" if cell.control else "again" if cell.repeat else measured.status
        self.counts[f"rows {sort}"] += 1
        self.last_error = measured.error or self.last_error
        key = None if binary is None else _binary_key(binary, [cell])
        self.records.add_row(cell, measured, key)

    def _check_that_it_works(self) -> None:
        """End a run in which nothing can be measured: the time of a GPU is worth more."""
        failed = sum(self.counts[f"rows {status}"] for status in _FAILURES)
        if failed >= _MOST_FAILURES and not self.counts["rows ok"]:
            raise RuntimeError(
                f"{failed} rows were tried and none could be measured, the last one like this: "
                f"{self.last_error}. rows.xz has the others."
            )

    def _show(self) -> None:
        if self.seconds > self._next_show:
            self._next_show = self.seconds + _SHOW_S
            found = self.summary()
            rows = sum(n for name, n in self.counts.items() if name.startswith("rows "))
            print(
                f"{found['seconds']:6.0f} s  {rows} rows, {found['rows_per_second']} a second, "
                f"{self.counts['compilations']} compilations, {len(self.ready)} ready, GPU "
                f"{found['gpu_busy']:.0%}, {found['counts']}",
                flush=True,
            )


def _planned(options: Options, known: set[str]) -> list[list[Cell]]:
    if options.data and options.remeasure:
        return known_units(known_cells(options.data), options.remeasure, options.seed)
    known = known | (known_rows(options.data) if options.data else set())
    return units(options.names, known, options.configs, options.shapes)


def _repeated(unit: Unit, number: int) -> Unit:
    return Unit(unit.binary, [replace(cell, repeat=number) for cell in unit.cells])


def _binary_key(binary: Binary, cells: list[Cell]) -> str:
    return key_of(binary.hash, cells[0].name)


def _compile_body(with_launcher: bool, pipe: Any) -> None:
    compile_cell = compiler(with_launcher)
    serve(lambda cells: compile_cell(cells[0]))(pipe)


def _gpu_body(measure: Measure | None, pipe: Any) -> None:
    serve(measure or on_gpu())(pipe)
