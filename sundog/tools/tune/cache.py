"""Keep the best configs, by problem, target and versions.

They go into the user's file for the target (ops/select.py reads it). `promote` copies them into the
package, where everyone gets them.
"""

from __future__ import annotations

import csv
import logging
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...dataset.rows import split_row
from ...dataset.schema import CSV_COLUMNS, file_names
from ...ops import load, select
from ...ops.select import Entry
from .space import Job

log = logging.getLogger(__name__)


def check(target: str) -> None:
    """Raise a ValueError before anything is measured if a best config could not be kept."""
    path = select.user_file(target)
    select.read_entries(path)  # raises for another version
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(_unwritable(path, error)) from None
    if not os.access(path.parent, os.W_OK):
        raise ValueError(_unwritable(path, PermissionError("no permission")))


def _unwritable(path: Path, error: OSError) -> str:
    why = error.strerror or error
    return f"{path} cannot be written: {why}. SUNDOG_CACHE names another folder for the bests"


def keep(
    job: Job, config: Any, milliseconds: float, place: select.Place, run: str, whole: bool
) -> None:
    """Put a best config into the user's file. If that fails, the rows still have it.

    The best of a run that was not `whole` may be one of few configs, so it replaces nothing faster.
    """
    entry = Entry(
        job.op,
        load.plain(job.problem),
        load.plain(config),
        milliseconds * 1e-3,
        time.strftime("%Y-%m-%d", time.gmtime()),
        run,
        place.num_sms,
    )
    path = select.user_file(place.target)
    try:
        same = [e for e in select.read_entries(path) if select.key_of(e) == select.key_of(entry)]
        if whole or all(entry.seconds < each.seconds for each in same):
            select.write_entries(path, [entry])
    except (OSError, ValueError) as error:  # since `check`: a full disk, or another version
        text = _unwritable(path, error) if isinstance(error, OSError) else str(error)
        log.warning("%s", text)


def promote(targets: list[str]) -> list[tuple[Path, list[Entry]]]:
    """Copy the user's entries for these targets (default: all) into the package's files."""
    folder = select.user_file("any").parent
    names = targets or sorted(path.stem for path in folder.glob("*.json"))
    written = []
    for name in names:
        mine = list(select.read_entries(select.user_file(name)))
        if not mine:
            raise ValueError(f"nothing was tuned for {name!r} here: {folder} has no entry for it")
        path = select.package_file(name)
        try:
            select.write_entries(path, mine)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None
        written.append((path, mine))
    if not written:
        raise ValueError(f"nothing was tuned here: {folder} has no file of a target")
    return written


def known_results(base: str, run_id: str) -> dict[str, float | None]:
    """Read a run's results from a base: configs, as JSON, and milliseconds, or None without a time.

    A config that was started and never ended is left out, so it is tried again. So are those that
    failed last, with nothing timed after them, since the GPU may have been gone.
    """
    times: dict[str, list[float]] = {}
    failed_last: dict[str, list[str]] = {}  # by session
    for row in _rows(Path(file_names(base)[0])):
        if row["run_id"] != run_id or row["status"] == "started":
            continue
        found = times.setdefault(row["config"], [])
        failed = failed_last.setdefault(row["session"], [])
        if row["status"] == "ok":
            found.append(float(row["perf_ms"]))
        if row["status"] in ("ok", "compiled"):
            failed.clear()
        else:
            failed.append(row["config"])
    again = {config for configs in failed_last.values() for config in configs}
    known = {config: statistics.median(t) if t else None for config, t in times.items()}
    return {c: t for c, t in known.items() if t is not None or c not in again}


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            with suppress(csv.Error):  # torn by a crash
                cells = split_row(line.removesuffix("\n"))
                if len(cells) == len(CSV_COLUMNS):
                    yield dict(zip(CSV_COLUMNS, cells, strict=True))
