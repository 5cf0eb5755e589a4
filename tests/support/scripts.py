"""Scripts in processes of their own, without the two seconds of CPU that `import torch` takes.

A `Script` is forked from the process that runs the tests, which has imported torch and sundog. What
`python` starts is forked from one that has imported torch alone, so it may import another sundog.
Both are made to look as an interpreter would find them: arguments, environment, folder, output,
exit functions. A test that is about what a script imports starts a real interpreter instead.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

import torch

__all__ = ["Script", "python", "torchrun"]


class Script:
    """A process that runs a script. Its output goes to files, so it never waits for a reader."""

    def __init__(self, path: Path, environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        more = environment or {}
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            words, environment = [str(path)], {**os.environ, **more}
            _become(words, environment, path.parent, [file.fileno() for file in self._output])
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


def torchrun(
    folder: Path, paths: Sequence[str], size: int, environment: Mapping[str, str]
) -> tuple[int, str, str]:
    """Do as `torchrun` does with scripts, one after the other; return status, output and errors.

    The ranks are forked by this process, and not by torchrun's agent: threads of the agent serve
    the store. A rank that is forked while one of them holds a lock of the C library (the server
    looks up the name of each caller) waits for that lock for ever. One rank in 60 did.
    """
    ranks, store = folder / "ranks.py", folder / "store.py"
    ranks.write_text(
        f"import runpy\nfor path in {list(paths)}:\n    runpy.run_path(path, run_name='__main__')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as door:  # open before anybody knocks
        port = door.getsockname()[1]
        store.write_text(
            "import signal\nfrom torch.distributed import TCPStore\n"
            f"store = TCPStore('127.0.0.1', {port}, is_master=True, wait_for_workers=False, "
            f"master_listen_fd={door.fileno()})\nsignal.pause()\n"
        )
        agent = Script(store)
    common = {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 opens none
    started = [Script(ranks, {**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(size)]
    try:
        statuses, outputs, errors = zip(*[rank.end(100) for rank in started], strict=True)
    finally:
        for process in (*started, agent):
            process.kill()
    return max(map(abs, statuses)), "".join(outputs), "".join(errors)


def python(
    words: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 100,
) -> subprocess.CompletedProcess[str]:
    """Do what `python words` does: a script, or `-c` or `-m` with its arguments."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    own = dict(os.environ if environment is None else environment)
    given = [str(word) for word in words]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
        order = given, own, str(folder or Path.cwd()), [out.name, errors.name]
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        in_time = bool(select.select([server.stdout], [], [], seconds)[0])
        if not in_time:
            os.kill(pid, signal.SIGKILL)  # it is not reaped before the next line
        status = int(server.stdout.readline())
        texts = [file.read().decode() for file in (out, errors)]
    assert in_time, f"it still ran after {seconds:g} s: {texts}"
    return subprocess.CompletedProcess(given, status, *texts)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that `python` forks from. It ends with this one, which closes its input."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import scripts; "
    code += "sys.path.pop(0); sys.modules.pop('scripts').serve(sys.stdin, sys.stdout)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=pipe, stdout=pipe, text=True
    )


def serve(orders: IO[str], answers: IO[str]) -> None:
    """Fork a process for each order; answer with its number, and with its status when it ends."""
    gc.freeze()
    while order := orders.readline():
        words, environment, folder, paths = json.loads(order)
        pid = os.fork()
        if pid == 0:
            output = [os.open(path, os.O_WRONLY) for path in paths]
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # its input is not that of the server
            given = environment.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:1] = ["", *filter(None, given)]
            _become(words, environment, Path(folder), output)
        print(pid, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


def _become(
    words: list[str], environment: Mapping[str, str], folder: Path, output: list[int]
) -> NoReturn:
    """Run what the words say in this child, and end as an interpreter would."""
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
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        status = _status_of(words)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status)


def _status_of(words: list[str]) -> int:
    try:
        _run(words)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run(words: list[str]) -> None:
    what, *rest = words
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(rest[0], vars(main))
    elif what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [os.path.dirname(what)]
        runpy.run_path(what, run_name="__main__")
