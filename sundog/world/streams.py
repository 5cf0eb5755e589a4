"""Which uses of a rank's streams come behind which, as far as its host has arranged it.

For one question: may a plan be called on this stream now, or could its last use, on another stream,
still be running? Two uses of one plan at a time would share its flags and workspaces.

The part of a world that is about streams: where work goes, and what orders it.

A rank starts on its stream 0. Work on one stream runs in turn; work on two streams runs in any
order, unless an event stands between:

    ready = world.record_event()          # on the stream that produced the data
    with world.stream(1):
        world.wait_event(ready)           # what follows on stream 1 comes behind it
        world.all_gather(x, out)
        done = world.record_event()
    world.wait_event(done)                # and what follows here comes behind the all-gather

None of these makes the host wait. `world.capture()` records what is put on streams: see `capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

from ..errors import NotOrdered, SundogError
from .capture import NESTED, Graph

if TYPE_CHECKING:
    from ..ops.op import Plan
    from .backend import Backend
    from .capture import Graph
    from .tensors import Symmetric

__all__ = ["Event", "Order", "Streams", "Use"]

Use = tuple[int, int]  # stream, count


@dataclass(frozen=True)
class Event:
    """What `world.record_event` returns: the backend's event, and what it is behind."""

    inner: object
    behind: dict[int, int]


@dataclass
class Order:
    """Of one rank. Uses are counted; a stream is behind some of each stream's uses."""

    count: int = 0
    finished: int = 0  # all uses up to here have ended
    behind: dict[int, dict[int, int]] = field(default_factory=dict)
    graphs: WeakSet[Graph] = field(default_factory=WeakSet)  # that may be replayed

    def use(self, stream: int) -> Use:
        self.count += 1
        self.behind.setdefault(stream, {})[stream] = self.count
        return stream, self.count

    def is_behind(self, stream: int, use: Use) -> bool:
        """Does what is put on the stream now come after that use?"""
        return use[1] <= max(self.finished, self.behind.get(stream, {}).get(use[0], 0))

    def of(self, stream: int) -> dict[int, int]:
        return dict(self.behind.get(stream, {}))

    def learn(self, stream: int, behind: dict[int, int]) -> None:
        own = self.behind.setdefault(stream, {})
        for other, count in behind.items():
            own[other] = max(own.get(other, 0), count)

    def synchronize(self) -> None:
        """The host has waited for all streams."""
        self.finished = self.count


class Streams:
    """The same on every backend."""

    _backend: Backend
    _memory: Symmetric

    def synchronize(self) -> None:
        raise NotImplementedError

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

    def record_event(self) -> Event:
        """A point on the current stream, behind all that was put there so far."""
        self._check_open()
        return Event(self._backend.record_event(), self._backend.order.of(self.stream_number))

    def wait_event(self, event: Event) -> None:
        """What is put on the current stream from now on comes behind the event."""
        self._check_open()
        if not isinstance(event, Event):
            raise ValueError(f"wait_event: {event!r} is not what world.record_event returned")
        self._backend.wait_event(event.inner)
        self._backend.order.learn(self.stream_number, event.behind)

    def capture(self) -> AbstractContextManager[Graph]:
        """`with world.capture() as graph:` what is launched inside runs at graph.replay() only."""
        self._refuse_in_capture("world.capture", NESTED, "A graph can't hold another.")
        return self._captured()

    @contextmanager
    def _captured(self) -> Iterator[Graph]:
        self.synchronize()
        graph = Graph(self, self._backend.begin_capture())
        self._backend.order.graphs.add(graph)
        self._backend.graph = graph
        try:
            yield graph
        except BaseException as error:
            told = graph.abort(error)
            if told is not None:
                raise told from error
            raise
        else:
            graph.end()
        finally:
            self._backend.graph = None

    @property
    def is_capturing(self) -> bool:
        """Is this rank inside `with world.capture()`?"""
        return self._backend.graph is not None

    def uses(self, plan: Plan) -> None:
        """A plan is called on the current stream; refused if another stream may still run it."""
        self._check_open()
        order, number = self._backend.order, self.stream_number
        if plan.used and not order.is_behind(number, plan.used[0]):
            raise NotOrdered(
                f"a plan of {plan.problem} is called on stream {number}, and its last call, on "
                f"stream {plan.used[0][0]}, may still be running. Wait for an event that was "
                "recorded behind that call, or make a plan for each stream."
            )
        plan.used[:] = [order.use(number)]
        graph = self._backend.graph
        if graph is not None and all(each is not plan for each in graph.plans):
            graph.plans.append(plan)

    def uses_stream(self) -> None:
        """A call (world.all_gather) has its plan from those of the current stream."""
        if self._backend.graph is not None:
            self._backend.graph.streams.add(self.stream_number)

    # inside

    def _replay(self, graph: Graph, start: Callable[[], None]) -> None:
        """In turn with what is on the streams whose plans the calls in it use."""
        self._check_open()
        self._refuse_in_capture("graph.replay", NESTED, "A graph can't hold another.")
        here = self.stream_number
        others = sorted(graph.streams - {here})
        for number in others:
            self._follow(number)
        for plan in graph.plans:
            self.uses(plan)
        start()
        for number in others:
            with self.stream(number):
                self._follow(here)

    def _follow(self, number: int) -> None:
        """What is put on the current stream from now on comes behind what is on that one."""
        with self.stream(number):
            before = self.record_event()
        self.wait_event(before)

    def _refuse_in_capture(self, call: str, reason: str, instead: str) -> None:
        if self._backend.graph is not None:
            raise self._backend.graph.refuse(call, reason, instead)

    def _check_no_graph_uses(self, offset: int) -> None:
        for graph in self._backend.order.graphs:
            for plan in graph.plans:
                blocks = [self._memory.find(tensor) for tensor in plan.workspaces]
                if any(block is not None and block.offset == offset for block in blocks):
                    raise SundogError(
                        f"a graph that was captured uses a plan of {plan.problem}, and this would "
                        "free its workspaces. Call graph.free() first, on every rank."
                    )
