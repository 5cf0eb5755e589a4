"""The machine: hosts and programs of many ranks, one of them running at a time.

Hosts are threads. Programs are coroutines of the machine's thread, and so is the hub, which decides
who runs next. A program lets others run before every atomic and volatile load, since only there can
it learn of other programs. A host does so where it launches, waits, or touches a tensor while its
stream has work (the operation comes after that work).

A program that polls memory which does not change is parked until that memory is written. When
nothing can run, parked programs get some more turns. Then it is a deadlock or, with `expire`, the
bounded waits expire.
"""

from __future__ import annotations

import threading
import time
from _thread import get_ident
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import greenlet
import numpy as np

from ..callsite import caller_frame
from ..errors import Deadlock, SundogError
from ..interpreter.interpreter import language
from . import deadlock
from .accesses import Accesses
from .baton import Runner, RunnerThread
from .deadlock import Repeats
from .host_ops import Sight
from .polling import Watch
from .queues import Streams
from .regions import Memory
from .rounds import Cycles, RoundSchedule
from .schedule import Schedule
from .tasks import Host, Program, Task
from .torch_state import ProcessState, ThreadState
from .undefined import Undefined

if TYPE_CHECKING:
    from ..checker.checker import Checker

_LAST_POLLS = 1024  # of all parked programs together, before it is a deadlock
_MOST_LAST_POLLS, _FEWEST_LAST_POLLS = 64, 8  # and of each
_BETWEEN_TRIES = 1e-3  # seconds, between attempts to interrupt a thread
_EXPIRY_POLLS = 200  # a bounded wait checks its bound only now and then


class Machine:
    """One process's share of a world: all ranks on `sim`, one rank on `shm`."""

    def __init__(self, schedule: Schedule, num_sms: int, expire: bool) -> None:
        self.schedule = schedule
        self.num_sms = schedule.residents or num_sms
        self.expire = expire
        self.memory = Memory()
        self.watch = Watch()
        self.accesses = Accesses(self)
        self.undefined = Undefined(self)
        self.rounds = schedule if isinstance(schedule, RoundSchedule) else None
        self.cycles = Cycles(self)
        self.repeats = Repeats(self)
        self.hosts: list[Host] = []
        self.streams = Streams(self)
        self.ready: list[Task] = []
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self.checker: Checker | None = None
        self.loaded: set[tuple] = set()  # launched kernels, by what their binary depends on
        self.on_idle: Callable[[], bool] | None = None  # on shm: looks outside this process
        self.on_expire: Callable[[list[Program]], None] = lambda programs: None
        self._runner = Runner(self._run_hub)
        self._caller: Runner  # waits for the machine to end, or is its only host
        self._thread: ThreadState
        self._known_threads = {thread.ident for thread in threading.enumerate()}
        self._hub: Any = None  # a coroutine, like programs
        self._chosen: Task | None = None
        self._state: ProcessState | None = None  # whose generators and default dtype are active
        self._is_closed = False
        self.had_last_turn = False  # the parked programs, since anything happened
        self._ran_out = False  # and their time

    # hosts

    def add_host(
        self,
        rank: int,
        function: Callable[[], Any],
        modes: list[Any],
        prepare: Callable[[], None] | None = None,
    ) -> Host:
        """Add a rank. Its thread first calls `prepare`, in the order of ranks."""

        def run() -> Runner:
            self._run_host(host, lambda: self._run_function(host, function, thread, modes))
            return self._runner

        def first() -> None:
            try:
                assert prepare is not None
                prepare()
            except BaseException as error:
                host.error = error
                self.failure = self.failure or error

        thread, runner = ThreadState(), Runner(run, first=None if prepare is None else first)
        host = Host(rank, runner, self.streams.add(rank), ProcessState(), Sight(self))
        self.ready.append(host)
        self.hosts.append(host)
        return host

    def attach_host(self, rank: int) -> Host:
        """Make the running code the rank's host until the world is closed."""
        self._thread, self._caller = ThreadState(), Runner(on_interrupt=self._interrupt)
        stream, state = self.streams.add(rank), ProcessState()
        host = Host(rank, self._caller, stream, state, Sight(self), attached=True)
        self.current, self._state = host, state
        self._runner.start()
        self.hosts.append(host)
        return host

    def _run_host(self, host: Host, function: Callable[[], Any]) -> None:
        try:
            host.result = host.runner.interruptible(function)
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            host.error = error
            self.failure = self.failure or error
        host.done = True
        self._progress()

    def _run_function(
        self, host: Host, function: Callable[[], Any], thread: ThreadState, modes: list[Any]
    ) -> Any:
        self._enter(host.state)
        with thread.entered(modes):
            host.sight.set(self.checker is not None)
            return function()

    def run(self) -> None:
        """Run until every host and program has ended, or one has failed (`failure`)."""
        outside = ProcessState()
        self._thread, self._caller = ThreadState(), Runner(on_interrupt=self._interrupt)
        for host in self.hosts:
            host.runner.prepare()
        self._runner.start()
        self._caller.hand_to(self._runner)
        self._enter(outside)
        self._join()

    def _join(self) -> None:
        for host in reversed(self.hosts):
            host.runner.end()
        self._runner.end()

    def close(self) -> None:
        """End the hub, and release what would keep the heaps mapped."""
        self._is_closed = True
        if self._runner.is_alive:
            self._caller.hand_to(self._runner)
            self._join()
        self.on_idle, self.on_expire = None, lambda programs: None

    def _interrupt(self, error: BaseException) -> None:
        """Stop the machine: the caller was interrupted (Ctrl-C) while another thread runs."""
        self.failure = self.failure or error
        while not self._caller.has_baton:
            running, runner = self.current, self._runner
            if isinstance(running, Host) and not running.attached:
                runner = running.runner
            if runner.interrupt(greenlet.GreenletExit):
                return
            time.sleep(_BETWEEN_TRIES)

    def _enter(self, state: ProcessState) -> None:
        """Activate the running host's generators and default dtype."""
        if state is not self._state:
            if self._state is not None:
                self._state.save()
            state.load()
            self._state = state

    @property
    def host(self) -> Host:
        host = self.current
        if not isinstance(host, Host) or host.runner.ident != get_ident():  # as is_host_running
            raise SundogError(
                "a second thread uses a world: call it from its rank's thread, and hand results "
                "over to the other one"
            )
        return host

    def is_host_running(self) -> bool:
        """Return whether the calling thread is a host whose turn it is."""
        return isinstance(self.current, Host) and self.current.runner.ident == get_ident()

    def has_other_threads(self) -> bool:
        """Return whether a thread that is not this machine's could read memory.

        For the checker only threads count that began after it: earlier ones show its progress.
        """
        every = [each for each in threading.enumerate() if not isinstance(each, RunnerThread)]
        others = {each.ident for each in every} - {self._caller.ident}
        return bool(others if self.checker is None else others - self._known_threads)

    @property
    def program(self) -> Program:
        assert isinstance(self.current, Program)
        return self.current

    def pause(self) -> None:
        """Let others run; the host stays runnable."""
        self.ready.append(self.host)
        self._to_hub()

    def block(self, waits_for: str, may_go_on: bool = False) -> Any:
        """Stop the host until `wake`, and return its mail, or raise it if that is an error.

        `waits_for` is for a deadlock report. With `may_go_on` it also stops waiting when nothing
        else can run.
        """
        host = self.host
        host.waits_for, host.site, host.may_go_on = waits_for, caller_frame(), may_go_on
        self._to_hub()
        host.waits_for, host.may_go_on = "", False
        mail, host.mail = host.mail, None
        if isinstance(mail, BaseException):
            raise mail
        return mail

    def wake(self, host: Host, mail: Any = None) -> None:
        host.mail = mail
        self.ready.append(host)
        self._progress()

    def _progress(self) -> None:
        self.had_last_turn = self._ran_out = False
        self.repeats.made()

    def _to_hub(self) -> None:
        host = self.host
        if self.failure is not None and not host.attached:
            raise greenlet.GreenletExit  # the run is ending; do not start anything new
        self.host_wrote()
        host.runner.hand_to(self._runner)
        self._enter(host.state)
        if host.attached and self.failure is not None:
            raise self.failure

    # programs

    def _run_program(self, program: Program) -> None:
        launch = program.launch
        try:
            if launch.converted is None:
                launch.converted = launch.convert(launch.arguments)
            with np.errstate(all="ignore"):  # a GPU is silent; set per coroutine, so only for us
                launch.function(**launch.converted)
                while program.late:
                    program.late.pop(0)()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self.failure = self.failure or deadlock.kernel_error(program, error)

    # the hub

    def _run_hub(self) -> Runner:
        self._hub = greenlet.getcurrent()
        attached = next((host for host in self.hosts if host.attached), None)
        while True:
            try:
                self._runner.interruptible(self._loop)
            except BaseException as error:
                self.failure = self.failure or error
            language().restore()
            self._end()
            if attached is None or self._is_closed:
                break
            self.current = attached
            self._runner.hand_to(attached.runner)
        self._hub = None  # or greenlet searches all objects for its holder: 20 ms
        return self._caller

    def _loop(self) -> None:
        self._thread.enter_device()
        while self.failure is None and not self._is_closed and (self.ready or self._idle()):
            if self.ready:
                self._go_on(self._next())

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
            language().builder.machine = self  # a process may have several machines
            language().patch()
            if task.coroutine is None:
                task.coroutine = greenlet.greenlet(self._run_program, self._hub)
                task.coroutine.switch(task)
            else:
                task.coroutine.switch()
            if task.coroutine.dead:
                self._progress()
                if self.rounds is not None:
                    self.rounds.ended(task)
                self.streams.program_ended(task)
            return
        language().restore()
        self._runner.hand_to(task.runner)

    def _idle(self) -> bool:
        """Try to continue when nothing is runnable. Return False if nothing helps."""
        if self.on_idle is not None and self.on_idle():
            return True
        if all(host.done for host in self.hosts) and not any(s.queue for s in self.streams):
            return False
        parked = self.watch.parked()
        if parked and not self.had_last_turn:
            self.had_last_turn = True
            share = max(_LAST_POLLS // len(parked), _FEWEST_LAST_POLLS)
            self._resume(parked, min(share, _MOST_LAST_POLLS))
        elif self.on_idle is None and self.let_go_on():
            pass
        elif self.on_idle is None and parked and self.expire and not self._ran_out:
            self.run_out(parked)
        elif self.on_idle is None:  # otherwise it knows how long to wait
            self.failure = Deadlock(*deadlock.deadlock(self))
        return self.failure is None

    def let_go_on(self) -> bool:
        """Let hosts continue that need not wait. Return False if there are none."""
        hosts = [host for host in self.hosts if host.may_go_on]
        for host in hosts:
            host.may_go_on = False
            self.wake(host)
        return bool(hosts)

    def run_out(self, programs: list[Program]) -> None:
        """Let time pass, so that these programs' bounded waits expire.

        If they are here again without anything in between, their polls have no bound.
        """
        if self._ran_out:
            self.failure = Deadlock(*deadlock.deadlock(self))
            return
        self.had_last_turn, self._ran_out = False, True
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
        """End what still runs, so that `finally` blocks and context managers run."""
        for program in [*self.watch.parked(), *self.ready]:
            if isinstance(program, Program) and program.coroutine:
                program.coroutine.throw(greenlet.GreenletExit)
        for host in self.hosts:
            if not host.attached and host.runner.is_alive and not host.done:
                self.current = host
                host.runner.throw(greenlet.GreenletExit)
                self._runner.hand_to(host.runner)

    # what the running program's accesses need (see `accesses`)

    def give_way(self) -> None:
        """Let the schedule choose who runs after the running program."""
        if self.ready:
            program = self.program
            self.ready.append(program)
            task = self._take(self.schedule.choose(self.ready))
            if task is not program:
                self._chosen = task
                self._hub.switch()

    def park(self, program: Program) -> None:
        """Stop the program until what it polls has changed."""
        self.watch.park(program)
        self._hub.switch()

    def wrote(self, addresses: np.ndarray, size: int) -> None:
        """Wake the programs that wait for this memory."""
        self.had_last_turn = False
        if self.rounds is not None:
            self.cycles.wrote(addresses, size)
        if len(self.watch):
            self.ready.extend(self.watch.changed(addresses, size))

    def host_wrote(self) -> None:
        """Wake all that wait: a host or another process may have written anything."""
        if len(self.watch):
            self.ready.extend(self.watch.changed_anywhere())
