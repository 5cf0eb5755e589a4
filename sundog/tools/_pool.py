"""A pool of processes that do one task at a time. A crash or a hang costs only its own task.

A worker's process starts with its first task, and again after it died. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LONGEST_WAIT = 0.2  # seconds between two looks at the clock and the processes

_LONGEST_ANSWER = 1800.0  # seconds: a schedule that takes longer hangs

Body = Callable[[Connection], None]  # receives tasks and sends answers, until the pipe ends
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Failure:
    """Returned instead of an answer."""

    status: str  # as in the dataset: error, timeout or accuracy_error
    error: str
    last: bool = False  # of this process, which ends


def serve(answer: Callable[[Any], Any]) -> Body:
    """Make a body that answers each task by a function. What this raises becomes a Failure."""
    return functools.partial(_answer_all, answer)


def _answer_all(answer: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        task = pipe.recv()
        try:
            reply = answer(task)
        except Exception as error:
            reply = Failure("error", f"{type(error).__name__}: {error}")
        pipe.send(reply)


class Worker:
    """One process at a time. A task that takes more than `seconds` counts as hung.

    `start` is fork, or spawn where CUDA is used, which does not survive a fork; then the body must
    be picklable. `fresh` starts a new process for every task.
    """

    def __init__(
        self,
        body: Body,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        start: str = "fork",
        fresh: bool = False,
    ) -> None:
        self.task: Any = None  # what it is doing
        self.busy_s = 0.0  # with tasks that have ended
        self._body = body
        self._seconds = seconds
        self._clock = clock
        self._start_method = start
        self._fresh = fresh
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._since = 0.0

    def submit(self, task: Any) -> None:
        assert self.task is None
        if self._process is None:
            self._start()
        assert self._pipe is not None
        self.task, self._since = task, self._clock()
        with suppress(OSError):  # it died between two tasks: `answer` says so
            self._pipe.send(task)

    def answer(self) -> Any:
        """Return what it sent, or a Failure, or None while it still works."""
        assert self._pipe is not None
        assert self._process is not None
        late = self._clock() - self._since > self._seconds
        try:
            if self._pipe.poll():
                reply = self._pipe.recv()
                if isinstance(reply, Failure) and reply.last:
                    self._wait_for_death()
                return self._ended(reply)
        except (EOFError, OSError):
            return self._ended(Failure("error", f"the process {_how(self._wait_for_death())}"))
        if late:
            self.close()
            text = f"no answer after {self._seconds:.0f} s: it hangs, and was ended"
            return self._ended(Failure("timeout", text))
        return None

    def wait(self) -> Any:
        """Wait for the answer."""
        while True:
            for _, _, reply in finished([self]):
                return reply

    @staticmethod
    def wait_some(workers: Sequence[Any]) -> None:
        """Wait a moment for one of these busy workers."""
        wait([worker.pipe for worker in workers], LONGEST_WAIT)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._wait_for_death()

    @property
    def pipe(self) -> Connection:
        assert self._pipe is not None
        return self._pipe

    def _ended(self, reply: Any) -> Any:
        self.busy_s += self._clock() - self._since
        self.task = None
        if self._fresh:
            self.close()
        return reply

    def _start(self) -> None:
        context = multiprocessing.get_context(self._start_method)
        self._pipe, theirs = context.Pipe()
        arguments = (self._body, theirs, os.getpid())
        # Not a daemon: its ranks may be processes too.
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_child, args=arguments, daemon=False
        )
        self._process.start()
        theirs.close()

    def _wait_for_death(self) -> int | None:
        assert self._process is not None
        assert self._pipe is not None
        self._process.join(5)
        self._process.kill()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        self._pipe.close()
        self._process = self._pipe = None
        return code


def finished(workers: Sequence[Worker]) -> list[tuple[Worker, Any, Any]]:
    """Wait a moment for busy workers. Return worker, task and answer of those that are done."""
    busy = [worker for worker in workers if worker.task is not None]
    if busy:  # all are of one kind
        busy[0].wait_some(busy)
    found = []
    for worker in busy:
        task = worker.task
        reply = worker.answer()
        if reply is not None:
            found.append((worker, task, reply))
    return found


def run_all(workers: Sequence[Worker], tasks: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Hand all tasks to the workers; yield each task and its answer as they are done."""
    waiting = deque(tasks)
    try:
        while waiting or any(worker.task is not None for worker in workers):
            for worker in workers:
                if worker.task is None and waiting:
                    worker.submit(waiting.popleft())
            for _, task, reply in finished(workers):
                yield task, reply
    finally:  # Ctrl-C too
        for worker in workers:
            worker.close()


def each_forked(
    answer: Callable[[int], Answer], count: int
) -> Iterator[tuple[int, Answer | Failure]]:
    """Call `answer` for every number below `count`, on all CPUs; yield answers as they come.

    An answer travels through a pipe, so it must be picklable. A process that dies or raises leaves
    a Failure for its number, and the other numbers go on.
    """
    num_workers = min(len(os.sched_getaffinity(0)), count)
    workers = [Worker(serve(answer), _LONGEST_ANSWER) for _ in range(num_workers)]
    yield from run_all(workers, range(count))


def in_order(answer: Callable[[int], Answer], count: int) -> Iterator[Answer | Failure]:
    """Do as `each_forked`, and yield the answers in the order of their numbers."""
    early: dict[int, Answer | Failure] = {}
    following = 0
    for number, reply in each_forked(answer, count):
        early[number] = reply
        while following in early:
            yield early.pop(following)
            following += 1


def _child(body: Body, pipe: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # don't outlive the caller
    if os.getppid() != parent:
        os._exit(1)  # the caller died before the line above
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who ends this one
    torch.set_num_threads(1)  # the parent's OpenMP threads did not come along
    try:
        body(pipe)
    except EOFError:
        return  # the caller has no more tasks
    except Exception as error:
        pipe.send(Failure("error", f"{type(error).__name__}: {error}", last=True))


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"ended with status {code}"
