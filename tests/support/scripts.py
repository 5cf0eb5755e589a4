"""Scripts in processes of their own, without the two seconds of CPU that `import torch` takes.

A process is forked from the one that runs the tests, which has imported torch. Then it is made to
look as `python script.py` would find it: arguments, environment, folder, output, exit functions. A
test that is about what a script imports starts a real interpreter instead.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch

__all__ = ["Script"]


class Script:
    """A process that runs a script. Its output goes to files, so it never waits for a reader."""

    def __init__(self, path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        more = environment or {}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(path, more, [file.fileno() for file in self._output])
        self._pidfd = os.pidfd_open(self.pid)
        self.returncode: int | None = None  # negative: the signal that killed it

    def has_ended(self, seconds: float = 0) -> bool:
        """Wait for its end, up to a number of seconds."""
        if self.returncode is None and select.select([self._pidfd], [], [], seconds)[0]:
            status = os.waitpid(self.pid, 0)[1]
            self.returncode = os.waitstatus_to_exitcode(status)
            os.close(self._pidfd)
        return self.returncode is not None

    def end(self, seconds: float = 60) -> tuple[int, str, str]:
        """Return its exit status, output and errors; kill it, and fail, if it does not end."""
        in_time = self.has_ended(seconds)
        self.kill()
        texts = []
        for file in self._output:
            file.seek(0)
            texts.append(file.read().decode())
            file.close()
        assert in_time, f"it still ran after {seconds:g} s: {texts}"
        assert self.returncode is not None
        return self.returncode, texts[0], texts[1]

    def kill(self) -> None:
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            assert self.has_ended(60)


def _become(path: Path, environment: Mapping[str, str], output: list[int]) -> NoReturn:
    """Run the script in this child, and end as an interpreter would."""
    status = 1
    try:
        atexit._clear()
        gc.freeze()  # nothing of the parent's is collected here
        torch.set_num_threads(1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for fd, file in enumerate(output, 1):
            os.dup2(file, fd)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, closefd=False)  # noqa: SIM115
        sys.excepthook = sys.__excepthook__
        os.environ.update(environment)
        os.chdir(path.parent)
        sys.argv, sys.path[:0] = [str(path)], [str(path.parent)]
        status = _status_of(path)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _status_of(path: Path) -> int:
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
