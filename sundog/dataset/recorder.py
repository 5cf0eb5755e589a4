"""Record a tuning run: `<base>.csv`, `<base>.meta.jsonl`, `<base>.ir.jsonl`.

    with Recorder(base, describe_run(kernel, args), graph=ir_record) as recorder:
        trial = recorder.start({"BLOCK": 64}, decorator="BLOCK=64")
        trial.end("ok", samples=[0.71, 0.70, 0.72], compile_time_s=0.4)

Nothing here raises. What cannot be written is logged once, kept in `pending`, and tried again with
the next row; `check_base` checks beforehand whether a base can be written. What a reader would
refuse (a time below zero, a generation that is no integer) is logged once and left empty.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import operator
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from statistics import median
from typing import Any

from .files import MAX_LINE, AppendFile, why
from .graph_file import IrFile
from .identity import RunInfo, config_json, sample_id_of
from .ir_graph import IrGraphRecord, canonical_json
from .plain import plain, relative_text, safe_str
from .rows import format_row, percentiles
from .schema import (
    META_SCHEMA_VERSION,
    STATUSES,
    csv_header,
    file_names,
    is_sha256,
    why_no_event,
)

log = logging.getLogger("sundog.dataset")

_MAX_CONFIG = 1 << 20  # characters


@dataclass
class Trial:
    """One configuration being tried. `end` it once, and again for each re-measurement."""

    recorder: Recorder
    config_index: int
    sample_id: str
    config: str
    decorator: str
    generation: int | None
    times: list[float] = field(default_factory=list)
    repeats: int = 0

    def end(
        self,
        status: str,
        *,
        perf_ms: float | None = None,
        samples: Sequence[float] = (),
        compile_time_s: float | None = None,
        error: str | None = None,
        ir_id: str | Sequence[str] | None = None,
        timer: str | None = None,
        metrics: Mapping[str, object] | None = None,
    ) -> None:
        """Write the row that ends this measurement.

        `perf_ms` is the median of `samples` unless given. `ok` without a time that is a number from
        0 up is recorded as an error.
        """
        cells = {
            "perf_ms": perf_ms,
            "samples": samples,
            "compile_time_s": compile_time_s,
            "error": error,
            "ir_id": ir_id,
            "timer": timer,
            "metrics": metrics,
        }
        self.recorder._guard(lambda: self.recorder._end(self, status, cells))


class Recorder:
    """One tuning run on a base. Without `info` only the CSV is written, without `graph` no IR."""

    def __init__(
        self,
        base: str | os.PathLike[str],
        info: RunInfo | None = None,
        *,
        graph: IrGraphRecord | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base = os.fspath(base)
        self.session = uuid.uuid4().hex[:16]
        self.pending: list[tuple[str, str]] = []  # (path, line) that could not be written
        csv, meta, ir = file_names(self.base)
        self._csv, self._ir = AppendFile(csv, csv_header()), IrFile(ir)
        self._meta = AppendFile(meta, chained=True)
        self._lock = threading.RLock()
        self._clock, self._start = clock, clock()
        self._counts: Counter[str] = Counter()
        self._rows_hash, self._num_rows = hashlib.sha256(), 0  # of those in the file
        self._trials: list[Trial] = []
        self._warned: set[str] = set()
        self._closed = False
        self._info = info
        self.run_id = self.kernel_id = ""
        self._guard(lambda: self._begin(graph))

    def start(self, config: object, *, decorator: str = "", generation: int | None = None) -> Trial:
        """Record which configuration is tried next, so that a crash shows where it happened.

        A configuration that JSON cannot hold is not recorded, nor is what its trial ends with.
        """
        trial = Trial(self, 0, "", "", safe_str(decorator), None)
        self._guard(lambda: self._begin_trial(trial, config, generation))
        return trial

    def add_graph(self, record: IrGraphRecord) -> str | None:
        """Keep an IR graph, once per base; return its ir_id for the rows, or None if it failed."""
        if self._closed or self._info is None:
            return None
        path = self._ir.file.path
        try:
            # A front end may not know the run; the graph must name it, or a crash orphans it.
            return self._ir.add({**record, "run_id": record.get("run_id") or self.run_id})
        except Exception as error:
            self._warn(path, f"{why(path, error)}; rows go on without the IR graph")
            return None

    def close(self, error: str | None = None) -> None:
        """Write the end record; afterwards recording does nothing."""
        if self._closed:
            return
        self._guard(lambda: self._finish(error))
        self._closed = True
        for file in (self._csv, self._meta, self._ir.file):
            file.close()
        if self.pending:
            # Not lost even now, since a caller that keeps the log has the rows.
            lines = "".join(line for _, line in self.pending)
            log.warning("%s: %d lines were not written:\n%s", self.base, len(self.pending), lines)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close(None if kind is None else f"{kind.__name__}: {error}".rstrip(": "))

    # What follows may raise; _guard turns that into one warning.

    def _guard(self, work: Callable[[], None]) -> None:
        if self._closed:
            return
        try:
            with self._lock:
                work()
        except Exception as error:
            self._warn("record", f"could not record: {type(error).__name__}: {error}")

    def _begin(self, graph: IrGraphRecord | None) -> None:
        if self._info is None:
            return
        started_at = _now()
        try:
            info = asdict(self._info)
            ids = {"run_id": self._info.run_id, "kernel_id": self._info.kernel_id}
            wrong = self._why_no_event("start", ir_id=None, started_at=started_at, **ids, **info)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            self._info = None
            self._warn("info", f"the run is recorded without metadata: {wrong}")
            return
        self.run_id, self.kernel_id = ids["run_id"], ids["kernel_id"]
        # The graph first: a run that names a graph must have it, wherever the process dies.
        ir_id = self.add_graph(graph) if graph is not None else None
        self._put_meta(
            "start", kernel_id=self.kernel_id, started_at=started_at, ir_id=ir_id, **info
        )

    def _why_no_event(self, event: str, **fields: Any) -> str | None:
        record = {"schema_version": META_SCHEMA_VERSION, "event": event, "session": self.session}
        line = canonical_json(record | fields).encode()
        if len(line) > MAX_LINE - 1000:
            return f"{len(line)} bytes are too long for one line"
        # As a reader gets it, without the types that JSON lacks.
        return why_no_event(json.loads(line))

    def _begin_trial(self, trial: Trial, config: object, generation: object) -> None:
        try:
            text = config_json(config)
        except Exception as error:  # whatever a user's object does
            self._warn("config", f"a configuration is not recorded: {error}")
            return
        if len(text) > _MAX_CONFIG:
            self._warn("config", f"a configuration of {len(text)} characters is not recorded")
            return
        trial.config_index, trial.config = len(self._trials), text
        trial.generation = self._generation(generation)
        trial.sample_id = sample_id_of(self.run_id, text)
        self._trials.append(trial)
        self._put_row(trial, "started", repeat=0)

    def _end(self, trial: Trial, status: str, cells: dict[str, Any]) -> None:
        if not trial.sample_id:
            return  # its configuration could not be recorded
        if cells["error"] is not None:
            cells["error"] = relative_text(safe_str(cells["error"]))
        if status not in STATUSES or status == "started":
            self._warn(f"status {status}", f"unknown status {status!r} is recorded as an error")
            cells["error"] = f"status {status}: {cells['error'] or 'unknown'}"
            status = "error"
        timed = self._samples(cells.pop("samples"))
        given = cells["perf_ms"]
        for name in ("perf_ms", "compile_time_s"):
            cells[name] = self._number(name, cells[name])
        if cells["perf_ms"] is None and timed:
            cells["perf_ms"] = median(timed)
        if status == "ok" and cells["perf_ms"] is None:
            status = "error"
            cells["error"] = cells["error"] or f"ok without a time: {safe_str(given)[:40]}"
        if status == "ok":
            trial.times.append(cells["perf_ms"])
        cells["metrics"] = self._metrics(cells["metrics"])
        cells["ir_id"] = self._ir_ids(cells["ir_id"])
        if cells["timer"] is not None:
            cells["timer"] = safe_str(cells["timer"])
        self._put_row(trial, status, repeat=trial.repeats, **cells, **percentiles(timed))
        trial.repeats += 1

    def _samples(self, samples: Any) -> list[float]:
        try:
            numbers = [self._number("samples", sample) for sample in samples]
        except TypeError as error:
            self._warn("samples", f"samples are left out: {error}")
            return []
        return [number for number in numbers if number is not None]

    def _number(self, what: str, value: Any) -> float | None:
        """Return a finite float from 0 up, or None: with a warning if it is no such number."""
        try:
            number = None if value is None else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            self._warn(what, f"{what} is left empty: {error}")
            return None
        if number is not None and number < 0:
            self._warn(what, f"{what} is left empty: {number} is below zero")
        return number if number is not None and 0 <= number < math.inf else None

    def _generation(self, value: Any) -> int | None:
        """Return an integer of 64 bits, or None: with a warning if it is something else."""
        try:
            number = None if value is None else operator.index(value)
        except TypeError:
            number = 1 << 63
        if number is None or (-(1 << 63) <= number < 1 << 63 and not isinstance(value, bool)):
            return number
        self._warn("generation", f"generation {safe_str(value)[:40]!r} is no integer of 64 bits")
        return None

    def _metrics(self, metrics: Any) -> str | None:
        try:
            return None if metrics is None else canonical_json(plain(metrics))
        except Exception as error:  # whatever a user's object does
            self._warn("metrics", f"metrics are left empty: {error}")
            return None

    def _ir_ids(self, ir_id: Any) -> str | None:
        ids = ir_id.split() if isinstance(ir_id, str) else list(ir_id or ())
        known = [each for each in ids if is_sha256(each)]
        if len(known) < sum(each is not None for each in ids):
            self._warn("ir_id", f"ir_id {safe_str(ir_id)[:40]!r} is no sha256 in hex")
        return " ".join(known) or None

    def _put_row(self, trial: Trial, status: str, **cells: object) -> None:
        self._counts[status] += 1
        row = {
            "run_id": self.run_id,
            "kernel_id": self.kernel_id,
            "sample_id": trial.sample_id,
            "timestamp_s": self._clock() - self._start,
            "config_index": trial.config_index,
            "generation": trial.generation,
            "status": status,
            "decorator": trial.decorator,
            "config": trial.config,
            "session": self.session,
            "world": None if self._info is None else self._info.world,
        }
        line = format_row(row | cells)
        if len(line) > MAX_LINE // 4 and len(line.encode()) > MAX_LINE:
            self._warn("row", f"a row of {len(line)} characters is cut: its texts are too long")
            texts = ("error", "decorator", "timer")
            short = {name: str((row | cells).get(name) or "")[:_MAX_CONFIG] for name in texts}
            line = format_row(row | cells | short | {"metrics": None})
        self._put(self._csv, line)

    def _put_meta(self, event: str, **fields: object) -> None:
        record = {"schema_version": META_SCHEMA_VERSION, "event": event, "run_id": self.run_id}
        record |= {"session": self.session, **fields}
        self._put(self._meta, canonical_json(record) + "\n")

    def _put(self, file: AppendFile, line: str) -> None:
        self.pending.append((file.path, line))
        # Also the start record, if it is pending, since rows without it join nothing.
        for each in (self._meta, self._csv):
            if any(path == each.path for path, _ in self.pending):
                self._flush(each)

    def _flush(self, file: AppendFile) -> None:
        """Write what is pending for the file, in order, as far as it goes."""
        waiting = [text for path, text in self.pending if path == file.path]
        others = [item for item in self.pending if item[0] != file.path]
        before = file.num_appended
        try:
            for text in waiting:
                file.append(text)
        except (OSError, ValueError) as error:
            self._warn("write", f"{why(file.path, error)}; rows are kept in memory meanwhile")
        finally:
            # Counted from the file, since an interrupt (Ctrl-C) may come after a line was written.
            written, waiting = _cut(waiting, file.num_appended - before)
            if file is self._csv:
                self._num_rows += len(written)
                self._rows_hash.update("".join(written).encode())
            self.pending = others + [(file.path, text) for text in waiting]

    def _finish(self, error: str | None) -> None:
        self._flush(self._csv)
        if self._info is None:
            return
        seconds = self._clock() - self._start
        unwritten = sum(path == self._csv.path for path, _ in self.pending)
        self._put_meta(
            "end",
            ended_at=_now(),
            seconds=round(seconds, 6),
            num_configs=len(self._trials),
            counts=dict(self._counts),
            best=self._best(),
            error=None if error is None else relative_text(error),
            unwritten=unwritten,
            num_rows=self._num_rows,
            rows_hash=self._rows_hash.hexdigest(),
            span_hash=self._span_hash(),
            rows_end=self._csv.end,
        )

    def _span_hash(self) -> str:
        try:
            return self._csv.hash_between(self._csv.start, self._csv.end)
        except (OSError, ValueError) as error:  # the file is gone, which `validate` will report
            self._warn("span", why(self._csv.path, error))
            return hashlib.sha256().hexdigest()

    def _best(self) -> dict[str, Any] | None:
        """Return the configuration with the lowest median over its measurements."""
        timed = [trial for trial in self._trials if trial.times]
        if not timed:
            return None
        best = min(timed, key=lambda trial: median(trial.times))
        return {
            "config_index": best.config_index,
            "sample_id": best.sample_id,
            "perf_ms": median(best.times),
            "decorator": best.decorator,
            "config": json.loads(best.config),
        }

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", text)


def _cut(items: list[str], count: int) -> tuple[list[str], list[str]]:
    return items[:count], items[count:]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")
