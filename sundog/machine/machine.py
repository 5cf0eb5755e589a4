"""The machine: hosts and programs of many ranks as coroutines, one of them running at a time.

A third coroutine, the hub, decides who goes on. A program gives way before every atomic and
volatile load, since only there can it learn of other programs; a host where it launches, waits, or
touches a tensor while its stream has work (the operation belongs behind that work).

A program that polls memory which does not change is parked until somebody writes it. When nothing
can run, parked programs get some more turns; then it is a deadlock or, with `expire`, the bounded
waits run out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import greenlet
import numpy as np

from ..callsite import caller_frame
from ..errors import Deadlock, SundogError
from ..interpreter.interpreter import language
from . import deadlock
from .accesses import Accesses, Observer
from .polling import Watch
from .queues import Streams
from .regions import Memory
from .schedule import Schedule
from .tasks import Host, Program, Task
from .torch_state import TorchState

__all__ = ["Machine"]

_LAST_POLLS = 1024  # before nothing more is expected of the parked programs, all together
_MOST_LAST_POLLS, _FEWEST_LAST_POLLS = 64, 8  # and of each
_EXPIRY_POLLS = 200  # a bounded wait looks at its bound only now and then


class Machine:
    """One process's share of a world: all ranks on `sim`, one rank on `shm`."""

    def __init__(self, schedule: Schedule, num_sms: int, expire: bool) -> None:
        self.schedule = schedule
        self.num_sms = num_sms
        self.expire = expire
        self.memory = Memory()
        self.watch = Watch()
        self.accesses = Accesses(self)
        self.hosts: list[Host] = []
        self.streams = Streams(self)
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self.checker: Observer | None = None
        self.loaded: set[tuple] = set()  # kernels that were launched, by what a binary depends on
        self.on_idle: Callable[[], bool] | None = None  # shm: look outside this process
        self.on_expire: Callable[[list[Program]], None] = lambda programs: None
        self._hub = greenlet.greenlet(self._loop)
        self._chosen: Task | None = None
        self._active: Host | None = None  # whose torch state is in force
        self._had_last_turn = False  # the parked programs, since anything happened
        self._ran_out = False  # and their time

    # hosts

    def add_host(self, rank: int, function: Callable[[], Any], modes: list[Any]) -> Host:
        stream, state = self.streams.add(rank), TorchState(modes)
        host = Host(rank, greenlet.greenlet(None, self._hub), stream, state)
        host.coroutine.run = lambda: self._run_host(host, function)
        self.ready.append(host)
        self.hosts.append(host)
        return host

    def attach_host(self, rank: int) -> Host:
        """The code that is running now becomes the rank's host, until the world is closed."""
        stream, state = self.streams.add(rank), TorchState([])
        host = Host(rank, greenlet.getcurrent(), stream, state, attached=True)
        self.current = self._active = host
        self.hosts.append(host)
        return host

    def _run_host(self, host: Host, function: Callable[[], Any]) -> None:
        try:
            host.result = function()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            host.error = error
            self.failure = self.failure or error
        host.done = True
        self._progress()

    def run(self) -> None:
        """Until every host and every program has ended, or one of them failed (`failure`)."""
        outside = TorchState([])
        outside.leave()
        try:
            self._hub.switch()
        finally:
            for host in self.hosts:
                host.state.forget()
            outside.enter()

    def close(self) -> None:
        """No more of it: ends the hub, and lets go of what would keep the heaps mapped."""
        if self._hub:
            self._hub.throw(greenlet.GreenletExit)
        self._hub = greenlet.greenlet()
        self.on_idle, self.on_expire = None, lambda programs: None

    @property
    def host(self) -> Host:
        assert isinstance(self.current, Host), "only a host can do this"
        return self.current

    @property
    def program(self) -> Program:
        assert isinstance(self.current, Program)
        return self.current

    def pause(self) -> None:
        """The host lets others run and stays runnable."""
        self.ready.append(self.host)
        self._to_hub()

    def block(self, waits_for: str) -> Any:
        """The host stops until `wake`, whose mail it gets; the text is for a deadlock report."""
        host = self.host
        host.waits_for, host.site = waits_for, caller_frame()
        self._to_hub()
        host.waits_for = ""
        return host.mail

    def wake(self, host: Host, mail: Any = None) -> None:
        host.mail = mail
        self.ready.append(host)
        self._progress()

    def _progress(self) -> None:
        self._had_last_turn = self._ran_out = False

    def _to_hub(self) -> None:
        host = self.host
        if self.failure is not None and not host.attached:
            raise greenlet.GreenletExit  # the run is ending; do not start anything new
        try:
            self._hub.switch()
        except greenlet.error:
            raise SundogError("a second thread uses a world: call it from its rank's") from None
        if host.attached and self.failure is not None:
            raise self.failure

    # programs

    def coroutine(self) -> greenlet.greenlet:
        """One that will run a program."""
        return greenlet.greenlet(self._run_program, self._hub)

    def _run_program(self, program: Program) -> None:
        launch = program.launch
        try:
            if launch.converted is None:
                launch.converted = launch.convert(launch.arguments)
            with np.errstate(all="ignore"):  # a GPU is silent; per coroutine, so it is ours alone
                launch.function(**launch.converted)
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self.failure = self.failure or deadlock.kernel_error(program, error)

    # the hub

    def _loop(self) -> None:
        try:
            while True:
                language().builder.machine = self
                while self.failure is None and (self.ready or self._idle()):
                    if self.ready:
                        self._go_on(self._next())
                language().restore()
                self._end()
                attached = next((h for h in self.hosts if h.attached), None)
                if attached is None:
                    return
                attached.coroutine.switch()
        finally:
            language().restore()

    def _next(self) -> Task:
        if self._chosen is not None:
            task, self._chosen = self._chosen, None
            return task
        return self._take(self.schedule.choose(self.ready))

    def _take(self, place: int) -> Task:
        task = self.ready[place]
        self.ready[place] = self.ready[-1]
        self.ready.pop()
        return task

    def _go_on(self, task: Task) -> None:
        self.current = task
        if isinstance(task, Program):
            language().patch()
            task.coroutine.switch(*(() if task.coroutine else (task,)))
            if task.coroutine.dead:
                self._progress()
                self.streams.program_ended(task)
            return
        language().restore()
        self._make_active(task)
        task.coroutine.switch()

    def _make_active(self, host: Host) -> None:
        if host is not self._active:
            if self._active is not None:
                self._active.state.leave()
            host.state.enter()
            self._active = host

    def _idle(self) -> bool:
        """Nothing is runnable. False if that is how it stays."""
        if self.on_idle is not None and self.on_idle():
            return True
        if all(host.done for host in self.hosts) and not any(s.queue for s in self.streams):
            return False
        parked = self.watch.parked()
        if parked and not self._had_last_turn:
            self._had_last_turn = True
            share = max(_LAST_POLLS // len(parked), _FEWEST_LAST_POLLS)
            self._resume(parked, min(share, _MOST_LAST_POLLS))
        elif self.on_idle is None and parked and self.expire and not self._ran_out:
            self.run_out(parked)
        elif self.on_idle is None:  # else it knows how long to wait
            self.failure = Deadlock(*deadlock.deadlock(self))
        return self.failure is None

    def run_out(self, programs: list[Program]) -> None:
        """Time has passed: bounded waits of these programs end without what they waited for.

        A second time without anything in between: what they poll has no bound.
        """
        if self._ran_out:
            self.failure = Deadlock(*deadlock.deadlock(self))
            return
        self._had_last_turn, self._ran_out = False, True
        self.on_expire(programs)
        for program in programs:
            program.expired = True
        self._resume(programs, _EXPIRY_POLLS)

    def _resume(self, programs: Iterable[Program], patience: int) -> None:
        for program in programs:
            self.watch.remove(program)
            program.patience = patience
            self.ready.append(program)

    def _end(self) -> None:
        """End what still runs, so that `finally` blocks and context managers are honoured."""
        for program in [*self.watch.parked(), *self.ready]:
            if isinstance(program, Program) and program.coroutine:
                program.coroutine.throw(greenlet.GreenletExit)
        for host in self.hosts:
            if not host.attached and host.coroutine:
                self._make_active(host)
                self.current = host
                host.coroutine.throw(greenlet.GreenletExit)
        if self._active is not None and not self._active.attached:
            self._active.state.leave()
            self._active = None

    # what the running program's accesses need (see `accesses`)

    def give_way(self) -> None:
        """The running program lets the schedule choose who goes on."""
        if self.ready:
            program = self.program
            self.ready.append(program)
            task = self._take(self.schedule.choose(self.ready))
            if task is not program:
                self._chosen = task
                self._hub.switch()

    def park(self, program: Program) -> None:
        """Until what it polls has changed."""
        self.watch.park(program)
        self._hub.switch()

    def wrote(self, addresses: np.ndarray, size: int) -> None:
        """Wake who waits for this memory."""
        self._had_last_turn = False
        if len(self.watch):
            self.ready.extend(self.watch.changed(addresses, size))

    def host_wrote(self) -> None:
        """A host, or another process, may have written anything that is being waited for."""
        if len(self.watch):
            self.ready.extend(self.watch.changed_anywhere())
