"""Append whole lines to files that survive the death of a writer, and read the whole lines.

Every line is one write() under an exclusive flock. A writer first looks at the end of the file: if
a killed writer left a torn line, it ends that line with a newline, so only that line is lost. A
write that fails half-way (full disk) is taken back, so the file still ends with a whole line. Each
JSON record has a hash of itself and of the line before it, so that a line that is gone is missed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from .schema import csv_header, file_names

try:
    import fcntl
except ImportError:  # no file locks on this system: single writes still do not mix in practice
    fcntl = None  # type: ignore[assignment]

MAX_LINE = 1 << 26  # bytes: a longer line is named and left out, so that memory is bounded
_NESTED = 100  # levels of lists and objects in a record
_STEP = 1 << 16
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)


class AppendFile:
    """Append lines. The header is written to a new file, and compared with that of an old one.

    The file is opened at the first use, and again in a forked child: a lock belongs to an open
    file, which parent and child would share. If `chained`, lines are JSON records, and each gets
    a hash of itself and of the line before it as `chain`.
    """

    def __init__(self, path: str, header: str = "", *, chained: bool = False) -> None:
        self.path = path
        self._header = header.encode()
        self._chained = chained
        self.num_appended = 0
        self.start = self.end = 0  # of the first and the last line that was appended, in bytes
        self._fd: int | None = None
        self._forget()

    def append(self, line: str) -> None:
        """Append a line. Raises OSError if that fails, ValueError if the file is another kind."""
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
        lead = self._lead(fd, size)
        if self._chained:
            chain = _digest(self._previous(fd, size).encode(), line[:-2].encode())
            line = f'{line[:-2]},"chain":"{chain}"}}\n'
        data = lead + line.encode()
        try:
            written = 0
            while written < len(data):
                written += os.write(fd, data[written:])
        except BaseException:
            # An interrupt may come after the last byte was written: then the line stays.
            if os.fstat(fd).st_size >= size + len(data):
                self._appended(size + len(data), line)
            elif self._has_lock:
                os.ftruncate(fd, size)
            raise
        self._appended(size + len(data), line)

    def hash_between(self, start: int, end: int) -> str:
        """Return the sha256 of some bytes of the file."""
        found = hashlib.sha256()
        if start < end:
            with self.locked() as fd:
                for part in _parts(fd, start, end):
                    found.update(part)
        return found.hexdigest()

    def check_locked(self, fd: int) -> None:
        """Raise ValueError if the file is another kind."""
        self._lead(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        with self._thread_lock:
            if self._fd is not None and self._pid == os.getpid():
                os.close(self._fd)
            self._fd = None

    def _appended(self, end: int, line: str) -> None:
        data = line.encode()
        self.start = end - len(data) if self.num_appended == 0 else self.start
        self.num_appended += 1
        self.end = end
        self._last = end, _digest(data[:-1])

    def _forget(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None
        self._pid = os.getpid()
        self._thread_lock = threading.Lock()
        self._checked = False
        self._has_lock = False
        self._last = -1, ""  # size of the file after our last line, and that line's hash

    def _open_and_lock(self) -> int:
        while True:
            if self._fd is None:
                self._fd = self._open()
            self._has_lock = _lock(self._fd, "LOCK_EX")
            if os.fstat(self._fd).st_nlink > 0:
                return self._fd
            os.close(self._fd)  # somebody removed the file: go on in a new one
            self._fd = None

    def _open(self) -> int:
        folder = os.path.dirname(self.path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(self.path, flags | _NONBLOCK, 0o644)
        self._checked, self._last = False, (-1, "")
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise ValueError(f"{self.path} is not a regular file: give another base name")
        return fd

    def _lead(self, fd: int, size: int) -> bytes:
        """Return what must come before the next line: the header, the end of a torn line, or
        nothing."""
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
        quotes = sum(part.count(b'"') for part in _parts(fd, _line_start(fd, size), size))
        return b'"\n' if quotes % 2 and self._header else b"\n"

    def _previous(self, fd: int, size: int) -> str:
        """Return the hash of the last line, whole or torn; nothing if there is none."""
        if self._last[0] == size:
            return self._last[1]
        end = size - (size > 0 and os.pread(fd, 1, size - 1) == b"\n")
        return _digest(*_parts(fd, _line_start(fd, end), end)) if size else ""


@contextmanager
def shared_lock(fd: int) -> Iterator[None]:
    """Hold off writers: while a reader has this lock, none is in the middle of a line."""
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


def _line_start(fd: int, end: int) -> int:
    """Return where the line starts that ends at `end`."""
    while end > 0:
        step = min(end, _STEP)
        at = os.pread(fd, step, end - step).rfind(b"\n")
        if at >= 0:
            return end - step + at + 1
        end -= step
    return 0


def _parts(fd: int, start: int, end: int) -> Iterator[bytes]:
    while start < end and (data := os.pread(fd, min(_STEP, end - start), start)):
        start += len(data)
        yield data


def _digest(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def _other_header(path: str, fd: int) -> str:
    first = os.pread(fd, 400, 0).partition(b"\n")[0].decode("utf-8", "replace")
    return (
        f"{path} has other columns than this version of sundog writes (its first line is "
        f"{first[:120]!r}): give another base name, or move the file away"
    )


@dataclass(frozen=True)
class Damage:
    """Something that could not be read, or does not fit; the rest of the data is there."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Line:
    """A record of a `.jsonl` file, and its place."""

    number: int
    offset: int
    length: int
    record: dict[str, Any]


class TextLine(NamedTuple):
    """A whole line, or None where it is longer than MAX_LINE; the newline is not part of it."""

    number: int
    offset: int
    length: int  # with the newline
    data: bytes | None
    digest: str


def whole_size(path: str) -> tuple[int, int]:
    """Return the bytes up to the last whole line, and those after it (torn by a crash, or 0)."""
    with open_regular(path) as file:
        fd = file.fileno()
        with shared_lock(fd):  # so that no row is half written at this moment
            size = os.fstat(fd).st_size
        whole = _line_start(fd, size)
        return whole, size - whole


def open_regular(path: str) -> BinaryIO:
    """Open a file to read it; ValueError if it is a FIFO, a folder or a device."""
    # Without O_NONBLOCK, opening a FIFO that nobody writes to would never return.
    file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | _NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file")
    return file


def lines_of(path: str, size: int) -> Iterator[TextLine]:
    """Yield the lines in the first `size` bytes, in bounded memory."""
    with open_regular(path) as file:
        number = offset = 0
        while offset < size:
            data = file.readline(MAX_LINE + 1)
            length, digest, number = len(data), hashlib.sha256(data.removesuffix(b"\n")), number + 1
            too_long = not data.endswith(b"\n")
            while data and not data.endswith(b"\n") and offset + length < size:
                data = file.readline(1 << 20)
                digest.update(data.removesuffix(b"\n"))
                length += len(data)
            text = None if too_long else data[:-1]
            yield TextLine(number, offset, length, text, digest.hexdigest()[:16])
            offset += length or size


def read_records(
    path: str,
    versions: tuple[int, ...],
    damage: list[Damage],
    gaps: list[Damage],
    advance: Callable[[int], None],
) -> Iterator[Line]:
    """Yield the records of a `.jsonl` file. What cannot be read is added to `damage` and left out.

    A record whose `chain` is another hash is kept, and added to `gaps`.
    """
    size, torn = whole_size(path)
    number, before = 0, ""
    for number, offset, length, data, digest in lines_of(path, size):
        record, wrong = parse_record(data, versions)
        if record is None:
            damage.append(Damage(path, number, wrong))
        else:
            if not _is_chained(record.pop("chain", None), before, data or b"", record):
                gaps.append(Damage(path, number, _GAP))
            yield Line(number, offset, length, record)
        before = digest
        advance(length)
    if torn:
        damage.append(Damage(path, number + 1, torn_text(torn)))


_GAP = "this line was changed, or the one before it is another: removed, repeated, moved or changed"
_CHAIN = re.compile(rb',"chain":"[0-9a-f]{16}"\}$')


def _is_chained(chain: object, before: str, data: bytes, record: dict[str, Any]) -> bool:
    if chain is None:
        return bool(record["schema_version"] == 1)  # version 1 had no hashes
    match = _CHAIN.search(data)
    return match is not None and chain == _digest(before.encode(), data[: match.start()])


def torn_text(torn: int) -> str:
    return f"the last line is torn after {torn} bytes (its writer died?); it is left out"


def parse_record(
    data: bytes | None, versions: tuple[int, ...]
) -> tuple[dict[str, Any] | None, str]:
    """Return the record on a line, or None and what is wrong with it."""
    if data is None:
        return None, f"a line of more than {MAX_LINE} bytes"
    try:
        record = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        return None, f"not a JSON record ({type(error).__name__}: {str(error)[:80]})"
    if not isinstance(record, dict):
        return None, f"not a record but {type(record).__name__}"
    if _is_nested(record):
        return None, f"lists and objects in more than {_NESTED} levels"
    version, newest = record.get("schema_version", 0), max(versions)
    if type(version) is int and version in versions:
        return record, ""
    if type(version) is int and version > newest:
        return None, f"schema_version {version} is newer than {newest}: read it with a newer sundog"
    return None, f"schema_version {str(version)[:40]!r} is not one that this sundog reads"


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _is_nested(record: dict[str, Any]) -> bool:
    """Return True if writing the record as JSON might exceed Python's depth of calls."""
    level: list[Any] = [record]
    for _ in range(_NESTED):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [v for values in inner for v in values if isinstance(v, (dict, list))]
    return bool(level)


def check_base(base: str) -> str | None:
    """Check that rows can be appended to `<base>.csv`; return the reason if they cannot."""
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
