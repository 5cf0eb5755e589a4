"""Capture on the simulator: what a host does is recorded instead of done, then replayed.

Launches are kept with their arguments; torch operations are kept by `operations`. What a GPU can't
capture is refused, with the line that did it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..callsite import caller_frame
from ..errors import CaptureError
from ..world.capture import LOAD, STREAM, refusal
from .launcher import repeat
from .machine import Machine
from .operations import Operations
from .tasks import Entry, Event, Launch, Operation, Record, Stream, Wait

__all__ = ["Recording"]


class Recording:
    """What one host records, from the beginning of its capture on."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._host = machine.host
        self._origin = machine.host.stream
        self._entries: list[tuple[Stream, Entry]] = []
        # How many entries of each stream a captured stream is behind: have all been joined?
        self._behind: dict[Stream, dict[int, int]] = {self._origin: {}}
        self._latest: dict[Stream, tuple] = {}  # the line of each stream's latest entry
        self._private: dict[Stream, Stream] = {}
        self._refused: CaptureError | None = None
        self._operations = Operations(machine, self)
        self._host.recording = self
        machine.streams.settle()

    # during the capture

    def refuse(self, call: str, reason: str, instead: str, at: Any = None) -> CaptureError:
        error = refusal(call, reason, instead, at)
        self._refused = self._refused or error
        return error

    def explain(self, error: RuntimeError) -> CaptureError | None:
        """What is refused here says so itself."""
        return None

    def launch(self, launch: Launch, loaded: bool) -> None:
        self._machine.memory.drop(launch.held)
        if not loaded:
            raise self.refuse(
                f"launch of {launch.name}",
                LOAD,
                "Call it once with such arguments before the capture, so that it is compiled.",
            )
        self.add(launch)

    def torch_function(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        return self._operations.call(func, args, kwargs)

    def operator(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator of torch that no function of Python called: jit code, say."""
        return self._operations.operator(func, args, kwargs)

    def add(self, entry: Entry) -> None:
        stream = self._host.stream
        if stream not in self._behind:
            raise self.refuse(
                f"{entry.name} on stream {stream.number}",
                STREAM,
                f"Let it wait for an event that was recorded on stream {self._origin.number} in "
                "this capture; then it is a part of it.",
            )
        self._entries.append((stream, entry))
        self._latest[stream] = caller_frame()
        self._behind[stream][id(stream)] = len(self._entries)

    def record(self) -> Event:
        event = Event(self._host.rank, recording=self)
        self.add(Record(event))
        event.clock = dict(self._behind[self._host.stream])
        return event

    def wait(self, event: Event) -> None:
        if event.recording is not self:
            raise self.refuse(
                "wait_event",
                STREAM,
                "The event was not recorded in this capture: a replay could not wait for it. Wait "
                "before the capture, or before graph.replay().",
            )
        behind = self._behind.setdefault(self._host.stream, {})
        for stream, entries in event.clock.items():
            behind[stream] = max(behind.get(stream, 0), entries)
        self.add(Wait(event))

    def end(self) -> None:
        self.abort()
        known = self._behind[self._origin]
        loose = [s for s, own in self._behind.items() if own.get(id(s), 0) > known.get(id(s), 0)]
        if loose and self._refused is None:
            self.refuse(
                f"work on stream {loose[0].number} that nothing waits for",
                STREAM,
                f"Record an event behind it, and wait for that on stream {self._origin.number}.",
                self._latest[loose[0]],
            )
        if self._refused is not None:
            raise self._refused

    def abort(self) -> None:
        self._host.recording = None
        self._machine.streams.settle()

    # afterwards

    def replay(self) -> None:
        events: dict[Event, Event] = {}
        for stream, entry in self._entries:
            self._machine.streams.put(self._again(entry, events), self._target(stream))
        self._machine.pause()
        self._machine.streams.settle()

    def _again(self, entry: Entry, events: dict[Event, Event]) -> Entry:
        if isinstance(entry, Launch):
            return repeat(self._machine, entry)
        if isinstance(entry, Operation):
            return Operation(entry.name, entry.run)
        event = events.setdefault(entry.event, Event(self._host.rank))
        return Record(event) if isinstance(entry, Record) else Wait(event)

    def _target(self, stream: Stream) -> Stream:
        """The stream of the replay, or one of the graph's own for a branch of it."""
        if stream is self._origin:
            return self._machine.host.stream
        if stream not in self._private:
            self._private[stream] = self._machine.streams.add(self._host.rank, -1)
        return self._private[stream]

    def free(self) -> None:
        for stream in self._private.values():
            self._machine.streams.drain(stream)
        self._machine.streams.remove(list(self._private.values()))
        self._entries.clear()
