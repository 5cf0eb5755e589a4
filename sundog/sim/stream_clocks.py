"""What the streams and the hosts know to have happened, for the checker.

A host knows what it waited for: it hands that on to whatever it then puts on any stream. An event
carries what its stream knew, to the streams that wait for it.
"""

from __future__ import annotations

from .clocks import Clock, Clocks, StreamActor, join
from .tasks import Stream

__all__ = ["StreamClocks"]


class StreamClocks:
    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._streams: dict[Stream, StreamActor] = {}
        self._hosts: dict[int, Clock] = {}  # by rank; replaced, never changed

    def of(self, stream: Stream) -> StreamActor:
        if stream not in self._streams:
            self._streams[stream] = StreamActor(stream.rank, self._clocks.component())
        return self._streams[stream]

    def host(self, rank: int) -> Clock:
        """What the host of a rank knows now."""
        return self._hosts.get(rank, {})

    def synchronize(self, rank: int, streams: list[Stream]) -> None:
        """The host has waited for the end of all that is on these streams."""
        known = dict(self.host(rank))
        for stream in streams:
            self.of(stream).advance()
            join(known, self.of(stream).clock)
        self._hosts[rank] = known

    def barrier(self, streams: list[Stream]) -> None:
        """All ranks of these streams have waited for them, and then for each other."""
        everything: Clock = {}
        for stream in streams:
            self.of(stream).advance()
            join(everything, self.of(stream).clock)
        for stream in streams:
            join(self.of(stream).clock, everything)
            known = dict(self.host(stream.rank))
            join(known, everything)
            self._hosts[stream.rank] = known

    def record(self, stream: Stream, known: Clock) -> Clock:
        """What an event carries that is reached now, and that a host put there who knew this."""
        actor = self.of(stream)
        self.learn(stream, known)
        actor.advance()
        return dict(actor.clock)

    def learn(self, stream: Stream, known: Clock) -> None:
        join(self.of(stream).clock, known)
