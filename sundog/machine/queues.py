"""Streams of the simulated GPUs: queues of launches, and of events that order them.

A rank starts on its stream 0 and may have others. Work on one stream runs in order. Only an event
orders two streams of a rank: one records it, the other waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import SundogError
from .tasks import Entry, Event, Host, Launch, Operation, Program, Record, Stream, Wait

if TYPE_CHECKING:
    from .machine import Machine


class Streams:
    """The streams of all ranks of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._all: list[Stream] = []
        self._resident: dict[int, int] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._all)

    def of(self, rank: int) -> list[Stream]:
        return [stream for stream in self._all if stream.rank == rank]

    def add(self, rank: int, number: int = 0) -> Stream:
        stream = Stream(rank, number)
        self._all.append(stream)
        self._resident.setdefault(rank, 0)
        return stream

    def remove(self, streams: list[Stream]) -> None:
        self._all = [stream for stream in self._all if stream not in streams]

    # what a host enqueues

    def launch(self, launch: Launch, stream: Stream) -> None:
        self.put(launch, stream)
        self._machine.pause()
        self.settle()

    def record(self, stream: Stream) -> Event:
        """Return an event after everything that is on the stream now."""
        recording = self._machine.host.recording
        if recording is not None:
            return recording.record()
        event = Event(stream.rank)
        self.put(Record(event), stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Order what is put on the stream from now on after the event. The host does not wait."""
        if not isinstance(event, Event) or event.rank != stream.rank:
            raise ValueError(
                f"wait_event on rank {stream.rank}: {event} is not an event of this rank. An event "
                "orders the streams of the rank that recorded it; ranks meet in kernels."
            )
        recording = self._machine.host.recording
        if recording is not None:
            recording.wait(event)
            return
        if event.recording is not None:
            raise ValueError(
                f"wait_event on rank {stream.rank}: the event was recorded during a capture, and "
                "is a part of that graph. Record one after graph.replay()."
            )
        self.put(Wait(event), stream)
        self.settle()

    def put(self, entry: Entry, stream: Stream) -> None:
        if self._machine.checker is not None:
            entry.known = self._machine.checker.streams.host(stream.rank)
        stream.queue.append(entry)
        self._dispatch(stream.rank)

    def settle(self) -> None:
        """Wait for what host code may read unnoticed when it continues, for example in C++.

        Do not wait if that can end only by what the host does next, nor on streams other than the
        first, so that they run side by side: there the host's torch operations are watched. The
        modes that watch do not outlast a node of a backward pass, nor see other threads, so in a
        backward pass and beside other threads the host waits.
        """
        machine, host = self._machine, self._machine.host
        in_backward = torch._C._current_graph_task_id() >= 0
        first = machine.checker is None and host.stream.number == 0
        try:
            if first or in_backward or machine.has_other_threads():
                self.drain(host.stream, may_go_on=not in_backward)
        finally:
            watched = machine.checker is not None or host.recording is not None
            host.sight.set(watched or bool(host.stream.queue))

    def before_thread(self) -> None:
        """Wait for pending work, since the host starts a thread, which may read it."""
        host = self._machine.host
        for stream in self.of(host.rank):
            self.drain(stream, may_go_on=True)
            if stream.queue:
                names = ", ".join(entry.name for entry in stream.queue)
                raise SundogError(
                    f"rank {host.rank} starts a thread while its kernels ({names}, stream "
                    f"{stream.number}) wait for what this rank does next: the thread could read "
                    "results before they are there. Start it earlier, or after world.synchronize()."
                )

    def drain(self, stream: Stream, may_go_on: bool = False) -> None:
        """Let the host continue when everything on the stream has ended.

        With `may_go_on` it also continues when nothing else can run.
        """
        while stream.queue:
            host = self._machine.host
            stream.waiters.append(host)
            names = ", ".join(entry.name for entry in stream.queue)
            self._machine.block(f"its kernels to end ({names})", may_go_on)
            if host in stream.waiters:
                stream.waiters.remove(host)
                return
        self._machine.host.on_drained()  # WaitTimeout if a wait in one of them expired

    def drain_all(self, rank: int) -> None:
        for stream in self.of(rank):
            self.drain(stream)

    def synchronize(self, rank: int) -> None:
        """Do the same for all streams of a rank. Its host then knows that they have ended."""
        self.drain_all(rank)
        self.settle()
        if self._machine.checker is not None:
            self._machine.checker.streams.synchronize(rank, self.of(rank))

    # progress

    def program_ended(self, program: Program) -> None:
        program.launch.running -= 1
        self._resident[program.rank] -= 1
        self._dispatch(program.rank)

    def _dispatch(self, rank: int) -> None:
        """Start what can start. A completed event may let another stream continue."""
        again = True
        while again:
            again = False
            for stream in self.of(rank):
                while stream.queue and self._ended(stream.queue[0], stream):
                    again |= isinstance(stream.queue.popleft(), Record)
                if not stream.queue:
                    waiters, stream.waiters = stream.waiters, []
                    for host in waiters:
                        self._machine.wake(host)

    def _ended(self, entry: Entry, stream: Stream) -> bool:
        """Begin or continue the first entry of a queue. Return True once it has ended."""
        if isinstance(entry, Launch):
            return self._start_programs(entry, stream)
        checker = self._machine.checker
        if isinstance(entry, Operation):
            if checker is not None:
                checker.streams.learn(stream, entry.known)
            try:
                entry.run(stream)
            except Exception as error:  # this may be the hub, with which the machine ends
                self._machine.failure = self._machine.failure or error
            return True
        if isinstance(entry, Record):
            entry.event.passed = True
            if checker is not None:
                entry.event.clock = checker.streams.record(stream, entry.known)
        elif entry.event.passed and checker is not None:
            checker.streams.learn(stream, entry.event.clock)
        return entry.event.passed

    def _has_room(self, launch: Launch) -> bool:
        """Return whether another program fits, since the kernels of a rank share its SMs.

        If the schedule limits resident programs, the limit is per kernel, except for one that was
        launched with all of them.
        """
        if not self._machine.schedule.residents:
            return self._resident[launch.rank] < self._machine.num_sms
        whole = launch.options.get("launch_cooperative_grid", False)
        return whole or launch.running < self._machine.num_sms

    def not_started(self) -> list[Launch]:
        """Return the kernels of which some programs run and others were never resident."""
        first = [stream.queue[0] for stream in self._all if stream.queue]
        return [e for e in first if isinstance(e, Launch) and 0 < e.next < e.total]

    def _start_programs(self, launch: Launch, stream: Stream) -> bool:
        """Fill the free SMs. Return True once the whole launch has ended."""
        machine = self._machine
        while launch.next < launch.total and self._has_room(launch):
            program = Program(launch, launch.next, launch.index(launch.next))
            launch.next += 1
            launch.running += 1
            self._resident[launch.rank] += 1
            machine.ready.append(program)
            if machine.checker is not None:
                machine.checker.start(program, stream)
        ended = launch.next == launch.total and launch.running == 0
        if ended:
            machine.memory.drop(launch.held)
            launch.arguments, launch.converted = {}, None  # so that a kept program keeps no tensors
            if machine.checker is not None:
                machine.checker.end(launch, stream)
        return ended


@contextmanager
def switched(machine: Machine, number: int) -> Iterator[None]:
    """Put the running host's work on its stream `number`, inside the block."""
    host: Host = machine.host
    before = host.stream
    known = {stream.number: stream for stream in machine.streams.of(host.rank)}
    host.stream = known[number] if number in known else machine.streams.add(host.rank, number)
    machine.streams.settle()
    try:
        yield
    finally:
        host.stream = before
        machine.streams.settle()
