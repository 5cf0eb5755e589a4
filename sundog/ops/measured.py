"""What was measured: one JSON file per target, of configs and the seconds that they took.

One file per target in the package (sundog/targets/nvidia-h200.json), overlaid by the user's own in
SUNDOG_CACHE, which has a folder for each version of torch and Triton. A file is a list, and
nothing is in it that was not measured:

    {"op": "all_gather.push", "problem": {"numel": 65536, "dtype": "bfloat16", "size": 8},
     "config": {"block": 2048, ...}, "seconds": 8.3e-06, "date": "2026-11-15", "run": "...",
     "num_sms": 16}
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from .. import knobs

__all__ = [
    "Entry", "entries", "key_of", "package_file", "read_entries", "stored", "user_file",
    "write_entries",
]  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One measurement of one algorithm."""

    op: str  # all_gather.push
    problem: dict[str, Any]
    config: dict[str, Any]
    seconds: float
    date: str
    run: str  # where it came from
    num_sms: int = 0  # of each rank; 0: it is not known, and counts for all


def entries(target: str) -> tuple[Entry, ...]:
    """Read what was measured on a target: the package's entries, then the user's, which win."""
    found: dict[tuple, Entry] = {}
    for path in (package_file(target), user_file(target)):
        for entry in read_entries(path):
            found[key_of(entry)] = entry
    return tuple(found.values())


def stored(entry: Entry, target: str) -> float:
    """Seconds that the same config took on the same problem when it was measured; 0: never was."""
    known = [each for each in entries(target) if key_of(each) == key_of(entry)]
    return sum(each.seconds for each in known if each.config == entry.config)


def write_entries(path: Path, new: list[Entry]) -> None:
    """Add entries to a target's file; those of the same op, problem and SMs are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        old = read_entries(path)
        kept = {key_of(entry): entry for entry in (*old, *new)}
        lines = ",\n".join(json.dumps(dataclasses.asdict(e)) for e in kept.values())
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(f"[\n{lines}\n]\n")
        beside.replace(path)  # a reader sees the old file or the new one


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock out other processes that add entries: each would drop what the other adds."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def key_of(entry: Entry) -> tuple[str, str, int]:
    """What an entry is for: of two with the same key the later one counts."""
    return entry.op, json.dumps(entry.problem, sort_keys=True), entry.num_sms


def package_file(target: str) -> Path:
    return Path(__file__).parent.parent / "targets" / f"{target}.json"


def user_file(target: str) -> Path:
    versions = f"torch-{torch.__version__}-triton-{triton.__version__}"
    return Path(knobs.cache.get()).expanduser() / versions / f"{target}.json"


def read_entries(path: Path) -> tuple[Entry, ...]:
    if not os.path.exists(path):  # also if its folder may not be looked into, as another's home
        return ()
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=16)
def _read(path: Path, mtime: int, inode: int) -> tuple[Entry, ...]:
    # The inode, too: two files that replace each other in one tick of the clock have one time.
    try:
        return tuple(Entry(**each) for each in json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a list of measurements ({error}); remove it") from None
