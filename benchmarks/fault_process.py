"""One case of a fault campaign, in its own session of processes, with a watchdog.

The campaign's process has imported torch and forks a leader per case; the leader forks the ranks
(`shm`, `symm`) or the one process that holds them all (`sim`, `virtual`). A forked process behaves
like a script: an exception goes to sys.excepthook, functions registered with atexit run, and its
exit status is what a shell would see.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import sundog

from .fault_programs import HEAP, Case, control_cases, run_rank

LIMIT = 25.0  # seconds after which the watchdog ends a case; control cases compile
_BY_PROCESS = ("shm", "symm")
_ON_GPU = ("virtual", "symm")
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000  # linux/sched.h, linux/mount.h


def lead(case: Case, folder: Path) -> None:
    """Run the case in a new session and write `result.json`. Ends this process."""
    os.setsid()
    apart = case.backend not in _ON_GPU and _own_shared_memory()
    port = _free_port()
    one_each = case.backend in _BY_PROCESS
    targets = (
        [partial(_rank_script, case, folder, rank, port) for rank in range(case.size)]
        if one_each
        else [partial(_world_script, case, folder)]
    )
    begin = time.monotonic()
    children = [
        _fork(target, folder / f"output{number}.txt") for number, target in enumerate(targets)
    ]
    store = None
    if one_each and not case.store_of_rank_0:  # after the forks: it has a thread
        store = dist.TCPStore("localhost", port, None, True, timedelta(seconds=30), False)
    limit = LIMIT if case.number >= 0 else 4 * LIMIT
    ends = _wait(children, begin + limit)
    result = {"seconds": time.monotonic() - begin, "processes": ends}
    result["shared"] = sorted(os.listdir("/dev/shm")) if apart else None
    (folder / "result.json").write_text(json.dumps(result))
    del store
    os._exit(0)


def _own_shared_memory() -> bool:
    """Give this session an empty /dev/shm, so that what it leaves there is its own. May fail.

    Not on a GPU, where MPS talks to its clients through files there.
    """
    libc = ctypes.CDLL(None)
    if libc.unshare(_CLONE_NEWNS) != 0:
        return False
    private = libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    return private == 0 and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None) == 0


def warm(backend: str) -> None:
    """Do once what every fork would do again: import, and make kernels ready to interpret."""
    importlib.import_module("torch._dynamo")  # torch.distributed imports it at its first use
    if backend == "shm":
        cases = [case for case in control_cases(backend) if case.size == 2]
        for case in cases:
            small = replace(case, steps=case.steps[:2])
            sundog.run(partial(run_rank, case=small, note=_silent), 2, "sim", heap_size=HEAP)


def _silent(event: str, **fields: Any) -> None:
    pass


def _wait(children: list[int], deadline: float) -> list[dict[str, Any]]:
    """Return how and when each process ended; those that did not are killed."""
    ends: dict[int, dict[str, Any]] = {}
    while len(ends) < len(children):
        for pid in children:
            if pid not in ends and (done := os.waitpid(pid, os.WNOHANG))[0]:
                status = os.waitstatus_to_exitcode(done[1])
                ends[pid] = {"status": status, "at": time.monotonic(), "hung": False}
        if time.monotonic() > deadline:
            hung = [pid for pid in children if pid not in ends]
            _end(hung)
            ends |= {pid: {"status": None, "at": time.monotonic(), "hung": True} for pid in hung}
        time.sleep(0.005)
    return [ends[pid] for pid in children]


def _end(hung: list[int]) -> None:
    """Kill processes, after each has written its stacks to its output."""
    for pid in hung:
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    for pid in hung:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _fork(target: Callable[[], None], output: Path) -> int:
    pid = os.fork()
    if pid == 0:
        out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.register(signal.SIGUSR1)
        as_script(target)
    return pid


def as_script(target: Callable[[], None]) -> None:
    """Call it and leave this process as the interpreter leaves a script."""
    torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
    try:
        target()
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        sys.last_value = error  # as the interpreter does, before it prints
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# in a rank's process, or in that of all ranks


def _rank_script(case: Case, folder: Path, rank: int, port: int) -> None:
    """Do what a script under torchrun does; `ending` is how it leaves its world."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.size), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(case.size), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(port)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if not case.store_of_rank_0:
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    note = partial(_note, folder, rank)
    world = sundog.init(case.backend, heap_size=HEAP, timeout=case.timeout)
    if case.ending == "with":
        with world:
            _noted(world, case, note)
        return
    _noted(world, case, note)
    if case.ending == "close":
        world.close()


def _world_script(case: Case, folder: Path) -> None:
    """Run all ranks. The error of the run is that of every rank which has said nothing by then."""
    if case.backend == "virtual":
        sys.stderr = _Stamped(partial(_noted_line, case, folder))
    try:
        sundog.run(
            lambda world: _noted(world, case, partial(_note, folder, world.rank)),
            case.size,
            case.backend,
            heap_size=HEAP,
            timeout=case.timeout,
        )
    except Exception as error:
        for rank in range(case.size):
            _note(folder, rank, "error", **_told(error))
        raise


class _Stamped(io.TextIOBase):
    """The error output of all ranks: what is written there is noted, with the time, and written."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def write(self, text: str) -> int:
        self._note(text)
        return os.write(self.fileno(), text.encode())

    def fileno(self) -> int:
        return 2  # where faulthandler writes


def _noted_line(case: Case, folder: Path, text: str) -> None:
    """Note a wait that expired and is printed, since no host can raise it yet."""
    if text.startswith("sundog: rank") and "WaitTimeout is raised when" in text:
        for rank in range(case.size):
            told = {"at": time.monotonic(), "type": "WaitTimeout", "text": text}
            _note(folder, rank, "error", **told)


def _noted(world: Any, case: Case, note: Callable[..., None]) -> None:
    try:
        run_rank(world, case, note)
    except BaseException as error:
        note("error", **_told(error))
        raise
    note("end", at=time.monotonic())


def _told(error: BaseException) -> dict[str, Any]:
    """Return what a traceback shows of an error, with the notes, which name the rank."""
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {"at": time.monotonic(), "type": type(error).__name__, "text": text}


def _note(folder: Path, rank: int, event: str, **fields: Any) -> None:
    """Append a line that is there even if the process dies at once."""
    line = json.dumps({"event": event, "rank": rank, **fields}) + "\n"
    file = os.open(folder / f"events{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def session_members(session: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if fields[3] == str(session) and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found
