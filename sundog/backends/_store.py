"""The ranks' key-value store: torch's, with a bound on every call and better errors.

Without torchrun the store is a thread of rank 0's process. If that process is stopped, torch waits
forever for an answer, in C++. So calls are made by a thread that can be abandoned.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from ..errors import PeerLost
from ..machine.baton import RunnerThread

# By group: how many worlds this process has opened over it, which is equal on all of its members.
# One count for all groups would differ between members of different groups.
_opened: Counter[str] = Counter()


class StoreLost(PeerLost):
    """The ranks' store can't be reached: the process that holds it has ended or is stopped."""


def open_store(store: Any, timeout: float, group: str = "") -> RankStore:
    """Return the part of a group's store for the next world. Members open them in one order."""
    number = _opened[group]
    _opened[group] += 1
    return RankStore(dist.PrefixStore(f"sundog/{number}", store), timeout)


class RankStore:
    """torch's key-value store, whose errors mean that another process has ended or is stopped.

    With `expects_loss` a rank has died and may have taken the store with it. Then torch's warning,
    with its C++ frames, is not shown, since the error that follows says more.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._caller = _Caller()
        self.expects_loss: Callable[[], bool] = lambda: False
        self._lost: StoreLost | None = None

    def set(self, key: str, value: bytes) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._ask(self._store.get, key)
        return value

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(self._store.check, keys))

    def delete_key(self, key: str) -> None:
        self._ask(self._store.delete_key, key)

    def close(self) -> None:
        self._caller.end()

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._lost is not None:  # there will be no answer
            raise self._lost
        try:
            with _no_stderr() if self.expects_loss() else nullcontext():
                return self._caller.call(call, arguments, self._timeout)
        except dist.DistError as error:
            what = f"has ended ({str(error).splitlines()[0]})"
        except Empty:
            what = f"is stopped or hangs: it did not answer within {self._timeout:g} s"
        self._lost = StoreLost(
            "the ranks' store can't be reached any more: the process that holds it, torchrun or "
            f"rank 0, {what}. This world is over: close it, and start all ranks again."
        )
        raise self._lost


class _Caller:
    """A thread for calls that may never return. Passing one to it takes about 20 us."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[Any] = SimpleQueue()
        self._told: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._thread: RunnerThread | None = None
        self._count = 0

    def call(self, function: Callable[..., Any], arguments: tuple, seconds: float) -> Any:
        """Return what the function returns, or raise what it raises; Empty if it takes too long."""
        if self._thread is None:
            self._thread = RunnerThread(target=self._run, daemon=True)
            self._thread.start()
        self._count += 1
        self._asked.put((self._count, function, arguments))
        number = 0
        while number != self._count:  # an earlier answer, if its caller was interrupted
            number, value, error = self._told.get(timeout=seconds)
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """End the thread. One that still waits for an answer ends with the process."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(_LONGEST_END)
            self._thread = None

    def _run(self) -> None:
        for number, function, arguments in iter(self._asked.get, None):
            try:
                self._told.put((number, function(*arguments), None))
            except BaseException as error:
                self._told.put((number, None, error))


_LONGEST_END = 0.1  # seconds


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Discard what C++ code writes to stderr meanwhile."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)
