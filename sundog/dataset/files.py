"""Files that survive the death of a writer: append whole lines, read what is whole, name the rest.

Every line is one write() under an exclusive flock. A writer first looks at the end of the file: if
a killed writer left a torn line, it ends that line with a newline, so only that line is lost. A
write that fails half-way (full disk) is taken back, so the file still ends with a whole line.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from .schema import csv_header, file_names

try:
    import fcntl
except ImportError:  # no file locks on this system: single writes still do not mix in practice
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "AppendFile",
    "Damage",
    "Line",
    "check_base",
    "read_records",
    "shared_lock",
    "whole_size",
    "why",
]


class AppendFile:
    """`append` a line; the header is written where the file is new, and checked where it is not.

    Opened at the first use, and again in a forked child: a lock belongs to an open file, which
    parent and child would share.
    """

    def __init__(self, path: str, header: str = "") -> None:
        self.path = path
        self._header = header.encode()
        self.num_appended = 0
        self._fd: int | None = None
        self._forget()

    def append(self, line: str) -> None:
        """Raises OSError if it cannot be written, ValueError if the file is another kind."""
        assert line.find("\n") == len(line) - 1, line
        with self.locked() as fd:
            self.append_locked(fd, line)

    @contextmanager
    def locked(self) -> Iterator[int]:
        if self._pid != os.getpid():
            self._forget()
        with self._thread_lock:
            fd = self._open_and_lock()
            try:
                yield fd
            finally:
                _lock(fd, "LOCK_UN")

    def append_locked(self, fd: int, line: str) -> None:
        size = os.fstat(fd).st_size
        data = self._lead(fd, size) + line.encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(fd, data[written:])
        except BaseException:
            # An interrupt may come after the last byte was written: then the line stays.
            if os.fstat(fd).st_size >= size + len(data):
                self.num_appended += 1
            elif self._has_lock:
                os.ftruncate(fd, size)
            raise
        self.num_appended += 1

    def check_locked(self, fd: int) -> None:
        """Raises ValueError if the file is another kind."""
        self._lead(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        with self._thread_lock:
            if self._fd is not None and self._pid == os.getpid():
                os.close(self._fd)
            self._fd = None

    def _forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._pid = os.getpid()
        self._thread_lock = threading.Lock()
        self._checked = False
        self._has_lock = False

    def _open_and_lock(self) -> int:
        while True:
            if self._fd is None:
                folder = os.path.dirname(self.path)
                if folder:
                    os.makedirs(folder, exist_ok=True)
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
                self._fd = os.open(self.path, flags, 0o644)
                self._checked = False
            self._has_lock = _lock(self._fd, "LOCK_EX")
            if os.fstat(self._fd).st_nlink > 0:
                return self._fd
            os.close(self._fd)  # somebody removed the file: go on in a new one
            self._fd = None

    def _lead(self, fd: int, size: int) -> bytes:
        """What must come before the next line: the header, the end of a torn line, or nothing."""
        if not self._checked or size < len(self._header):
            start = os.pread(fd, len(self._header), 0)
            if self._header.startswith(start) and size < len(self._header):
                return self._header[size:]  # new, or its first writer died in the header
            if start != self._header:
                raise ValueError(_other_header(self.path, fd))
            self._checked = True
        if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
            return b""
        # A torn CSV line may stop inside quotes, which would swallow the lines after it.
        return b'"\n' if _torn_line(fd, size).count(b'"') % 2 and self._header else b"\n"


@contextmanager
def shared_lock(fd: int) -> Iterator[None]:
    """For readers: while it is held no writer is in the middle of a line."""
    _lock(fd, "LOCK_SH")
    try:
        yield
    finally:
        _lock(fd, "LOCK_UN")


def _lock(fd: int, how: str) -> bool:
    with suppress(OSError, AttributeError):  # a file system, or a system, without locks
        fcntl.flock(fd, getattr(fcntl, how))
        return True
    return False


def _torn_line(fd: int, size: int) -> bytes:
    tail = b""
    while size > 0 and b"\n" not in tail:
        step = min(size, 1 << 16)
        size -= step
        tail = os.pread(fd, step, size) + tail
    return tail.rpartition(b"\n")[2]


def _other_header(path: str, fd: int) -> str:
    first = os.pread(fd, 400, 0).partition(b"\n")[0].decode("utf-8", "replace")
    return (
        f"{path} has other columns than this version of sundog writes (its first line is "
        f"{first[:120]!r}): give another base name, or move the file away"
    )


@dataclass(frozen=True)
class Damage:
    """What could not be read, or does not fit; the rest of the data is there."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Line:
    number: int
    offset: int
    length: int
    record: dict[str, Any]


def whole_size(path: str) -> tuple[int, bytes]:
    """Bytes up to the last whole line, and what follows it (torn by a crash, or nothing)."""
    with open(path, "rb") as file:
        with shared_lock(file.fileno()):  # so that no row is half-way at this moment
            end = size = os.fstat(file.fileno()).st_size
        tail = b""
        while end > 0 and b"\n" not in tail:
            step = min(end, 1 << 16)
            end -= step
            file.seek(end)
            tail = file.read(step) + tail
        torn = tail.rpartition(b"\n")[2][: size - end]
        return size - len(torn), torn


def read_records(
    path: str, newest: int, damage: list[Damage], advance: Callable[[int], None]
) -> Iterator[Line]:
    """The records of a `.jsonl` file; what cannot be read is added to `damage` and left out."""
    size, torn = whole_size(path)
    offset = number = 0
    with open(path, "rb") as file:
        while offset < size:
            data = file.readline()
            number += 1
            record, wrong = _parse(data, newest)
            if record is not None:
                yield Line(number, offset, len(data), record)
            else:
                damage.append(Damage(path, number, wrong))
            offset += len(data)
            advance(len(data))
    if torn:
        damage.append(Damage(path, number + 1, torn_text(torn)))


def torn_text(torn: bytes) -> str:
    return f"the last line is torn after {len(torn)} bytes (its writer died?); it is left out"


def _parse(data: bytes, newest: int) -> tuple[dict[str, Any] | None, str]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        return None, f"not a JSON record ({type(error).__name__}: {str(error)[:80]})"
    if not isinstance(record, dict):
        return None, f"not a record but {type(record).__name__}"
    version = record.get("schema_version", 0)
    if version == newest:
        return record, ""
    if isinstance(version, int) and version > newest:
        return None, f"schema_version {version} is newer than {newest}: read it with a newer sundog"
    return None, f"schema_version {version!r} is not one that this sundog reads ({newest})"


def check_base(base: str) -> str | None:
    """None, or the sentence that says why rows cannot be appended to `<base>.csv`."""
    for path, first in zip(file_names(base), (csv_header(), "", ""), strict=True):
        existed = os.path.exists(path)
        file = AppendFile(path, first)
        try:
            with file.locked() as fd:
                file.check_locked(fd)
                # Another writer may have made it meanwhile: only an empty file is ours.
                if not existed and os.fstat(fd).st_size == 0:
                    os.unlink(path)
        except (OSError, ValueError) as error:
            return why(path, error)
        finally:
            file.close()
    return None


def why(path: str, error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{path} cannot be written: {error.strerror or error}"
    return str(error)
