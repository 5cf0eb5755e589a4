"""The part of a world that is about streams: where work goes, and what orders it.

A rank starts on its stream 0. Work on one stream runs in turn; work on two streams runs in any
order, unless an event stands between:

    ready = world.record_event()          # on the stream that produced the data
    with world.stream(1):
        world.wait_event(ready)           # what follows on stream 1 comes behind it
        world.all_gather(x, out)
        done = world.record_event()
    world.wait_event(done)                # and what follows here comes behind the all-gather

None of these makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import Backend

__all__ = ["Streams"]


class Streams:
    """The same on every backend."""

    _backend: Backend

    def _check_open(self) -> None:
        raise NotImplementedError

    @property
    def stream_number(self) -> int:
        """Where a rank's work goes now. Groups share it: streams are the backend's."""
        return self._backend.stream_number

    def stream(self, number: int) -> AbstractContextManager[None]:
        """`with world.stream(1):` launches and torch operations inside go to that stream."""
        self._check_open()
        if type(number) is not int or number < 0:
            raise ValueError(f"stream {number!r}: expected a number, 0 or more")
        return self._switched(number)

    @contextmanager
    def _switched(self, number: int) -> Iterator[None]:
        backend, before = self._backend, self._backend.stream_number
        with backend.stream(number):
            backend.stream_number = number
            try:
                yield
            finally:
                backend.stream_number = before

    def record_event(self) -> Any:
        """A point on the current stream, behind all that was put there so far."""
        self._check_open()
        return self._backend.record_event()

    def wait_event(self, event: Any) -> None:
        """What is put on the current stream from now on comes behind the event."""
        self._check_open()
        self._backend.wait_event(event)
