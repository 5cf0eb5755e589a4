"""Threads that run one at a time: the machine has one, and so has every rank's host.

torch keeps its autograd engine, mode stacks, grad mode, autocast and compiler state per thread,
also in C++ frames, so ranks that shared a thread would mix them up. Passing the baton takes about
10 us. Programs of kernels switch far more often, so they are coroutines of the machine's thread.
"""

from __future__ import annotations

import contextvars
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

_BETWEEN_LOOKS = 2e-5  # seconds, while a thread exits
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = [ctypes.c_ulong, ctypes.py_object]


def _released_log_locks() -> list[tuple[Any, Any]]:
    """Release the locks of logging that this thread holds.

    The thread waits for a tensor that it logs, and the thread that runs next may log too.
    """
    handlers = logging._handlerList  # type: ignore[attr-defined]
    locks = [getattr(handler(), "lock", None) for handler in handlers]
    owned = [lock for lock in locks if lock is not None and lock._is_owned()]
    return [(lock, lock._release_save()) for lock in owned]


def _wait_for_exit(thread: threading.Thread) -> None:
    """Wait for what C++ code does at the end of the thread, before which `join` returns.

    torch takes the GIL there. If the interpreter were ending, that would abort the process.
    """
    task = f"/proc/self/task/{thread.native_id}"
    while os.path.exists(task):
        time.sleep(_BETWEEN_LOOKS)


class RunnerThread(threading.Thread):
    """One of our threads, as opposed to the user's."""


class Runner:
    """A thread that runs while it has the baton.

    A new thread runs `function`, which returns the Runner that gets the baton next. Without a
    function this is the thread that makes the object. `on_interrupt` gets an error that a signal
    handler raises while this thread waits. A new thread runs `first` in `prepare`, without the
    baton.
    """

    def __init__(
        self,
        function: Callable[[], Runner] | None = None,
        on_interrupt: Callable[[BaseException], None] | None = None,
        first: Callable[[], None] | None = None,
    ) -> None:
        self._function = function
        self._on_interrupt = on_interrupt
        self._first, self._is_prepared = first, threading.Event()
        context = contextvars.copy_context()
        self._thread = RunnerThread(target=context.run, args=(self._run,), daemon=True)
        self._wakes = threading.Lock()
        self._wakes.acquire()
        self.has_baton = function is None
        self._can_interrupt = False
        self._thrown: type[BaseException] | None = None
        self.ident = threading.get_ident() if function is None else 0
        self.is_alive = function is None

    def start(self) -> None:
        """Make the thread, which waits for the baton. A main thread calls this before `hand_to`
        would: a signal handler may raise here, and then no thread runs."""
        if self._thread.ident is None:
            self._thread.start()
        self.is_alive = True

    def prepare(self) -> None:
        """Make the thread of a Runner with `first`, and return when that is done.

        What a library keeps for this thread is then freed within `end`, not at some later time.
        """
        if self._first is not None:
            self._thread.start()
            self._is_prepared.wait()

    def hand_to(self, other: Runner) -> None:
        """Let the other run, and return when the baton comes back. Call it in this thread."""
        before, self._can_interrupt = self._can_interrupt, False
        held = _released_log_locks()
        self.has_baton = False
        other._receive()
        self._wait()
        for lock, state in held:
            lock._acquire_restore(state)
        self._can_interrupt = before
        if self._thrown is not None:
            kind, self._thrown = self._thrown, None
            raise kind

    def end(self) -> None:
        """Wait for the thread of a Runner that won't run any more, and release its function."""
        self._function = self._on_interrupt = None
        if self._thread.ident is not None:
            self._wake()  # it waits here if it was prepared
            self._thread.join()
            _wait_for_exit(self._thread)
        self._first = None

    def throw(self, kind: type[BaseException]) -> None:
        """Raise this error when the baton arrives. Call it before passing the baton."""
        self._thrown = kind

    def interrupt(self, kind: type[BaseException]) -> bool:
        """Raise this here, at the next step of Python code. Call it from another thread.

        Returns False if that is not possible now, since the thread passes the baton on or is not in
        `interruptible`. Python raises pending errors, and lets other threads run, only where a call
        begins or returns and where a loop repeats. So nothing is raised after the line that forbids
        it.
        """
        if self._can_interrupt:
            _raise_in(self.ident, kind)
        return self._can_interrupt

    def interruptible(self, function: Callable[[], Any]) -> Any:
        """Call the function, which may be interrupted, in this thread."""
        try:
            self._can_interrupt = True
            return function()
        finally:
            self._can_interrupt = False

    def _receive(self) -> None:
        if not self.is_alive:
            self.start()
        self._wake()

    def _wake(self) -> None:
        self.has_baton = True
        if self._wakes.locked():  # otherwise it has not begun to wait
            self._wakes.release()

    def _run(self) -> None:
        self.ident = threading.get_ident()
        if self._first is not None:
            self._first()
            self._is_prepared.set()
        self._wait()
        if self._function is not None:  # otherwise it ends before its turn
            following = self._function()
            self.is_alive = self.has_baton = False
            following._receive()
            if self._first is not None:
                self._wait()

    def _wait(self) -> None:
        while not self.has_baton:
            try:
                self._wakes.acquire()
            except BaseException as error:  # a signal's handler raised: the running host must stop
                if self._on_interrupt is None:
                    raise
                self._on_interrupt(error)
