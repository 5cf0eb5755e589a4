"""A text file that several processes append whole lines to, and that survives their death.

Every line is one write() under an exclusive flock. Before it, the file's end is looked at: what a
killed writer left torn is ended with a newline first, so that only that line is lost. A write that
fails half-way (full disk) is taken back, so that the file still ends with a whole line.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

try:
    import fcntl
except ImportError:  # no file locks on this system: single writes still do not mix in practice
    fcntl = None  # type: ignore[assignment]

__all__ = ["AppendFile", "shared_lock"]


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
