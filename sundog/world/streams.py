"""A rank's streams: where its work goes, what orders it, and what a capture records of it.

A rank starts on its stream 0. Work on one stream runs in order; work on two streams runs in any
order unless an event orders it:

    ready = world.record_event()          # on the stream that produced the data
    with world.stream(1):
        world.wait_event(ready)           # what follows on stream 1 comes after it
        world.all_gather(x, out)
        done = world.record_event()
    world.wait_event(done)                # and what follows here comes after the all-gather

None of these makes the host wait. `Order` records which uses of streams come after which. It
answers one question: may a plan be called on this stream now, or could its last call, on another
stream, still be running? Two calls at a time would share the plan's flags.

Ops on two streams wait for peers at the same time, and ranks may launch them in different orders.
If one filled all SMs, it could wait forever for a peer that runs the other. So the widest ops of
all streams must fit side by side: `RankStreams.share`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from ..errors import NotOrdered, SundogError
from .capture import Graph

if TYPE_CHECKING:
    from ..ops.dispatch import CachedCall
    from ..ops.op import Plan
    from .backend import Backend
    from .tensors import Symmetric

Use = tuple[int, int]  # stream, count


@dataclass(frozen=True)
class StreamEvent:
    """What `world.record_event` returns: the backend's event, and the uses that come before it."""

    inner: object
    after: dict[int, int]


@dataclass
class Order:
    """The counted uses of one rank's streams. Each stream comes after some uses of each stream."""

    count: int = 0
    finished: int = 0  # all uses up to this one have ended
    after: dict[int, dict[int, int]] = field(default_factory=dict)
    graphs: WeakSet[Graph] = field(default_factory=WeakSet)  # that may be replayed
    callers: dict[int, int] = field(default_factory=dict)  # the thread whose calls are on a stream

    def claim(self, stream: int) -> None:
        """Note that this thread calls an op on a stream. Refuse if another thread may do so too.

        The thread that starts a backward pass waits for the threads of that pass. So those claim
        nothing, and the stream stays with the thread that started the pass.
        """
        ident = get_ident()
        caller = self.callers.get(stream)
        if caller == ident or torch._C._current_graph_task_id() >= 0:
            return
        alive = {each.ident: each.name for each in threading.enumerate()}
        if caller in alive:
            raise NotOrdered(
                f"threads {alive[caller]!r} and {alive.get(ident, ident)!r} both call ops on stream"
                f" {stream}: they could come in another order on every rank, and wait for ever. "
                "Call them in `with world.stream(n)`, another n for each thread, or call "
                "world.synchronize() where one thread hands the stream over to the other."
            )
        self.callers[stream] = ident

    def use(self, stream: int) -> Use:
        self.count += 1
        self.after.setdefault(stream, {})[stream] = self.count
        return stream, self.count

    def is_after(self, stream: int, use: Use) -> bool:
        """Return whether new work on the stream comes after that use."""
        return use[1] <= max(self.finished, self.after.get(stream, {}).get(use[0], 0))

    def of(self, stream: int) -> dict[int, int]:
        return dict(self.after.get(stream, {}))

    def learn(self, stream: int, after: dict[int, int]) -> None:
        own = self.after.setdefault(stream, {})
        for other, count in after.items():
            own[other] = max(own.get(other, 0), count)

    def synchronize(self) -> None:
        """Note that the host waited for all streams: now any thread may call ops on them."""
        self.finished = self.count
        self.callers.clear()


class RankStreams:
    """A world's use of its rank's streams. Its groups use the same ones: they are the backend's."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._has_graphs = backend.device.type == "cuda"  # torch may capture its own
        self.kept: set[CachedCall] = set()  # calls in torch's graphs
        self.numbers = [0]  # streams that plans were made on, besides the first

    def share(self) -> int:
        """Note that ops run on the current stream. Return how many SMs they may fill.

        All streams but the first share a quarter of them.
        """
        number = self._backend.stream_number
        if number not in self.numbers:
            self.numbers.append(number)
        return self._share_of(number)

    def _share_of(self, number: int) -> int:
        others, all_sms = len(self.numbers) - 1, self._backend.num_sms
        each = max(all_sms // 4 // max(others, 1), 1)
        if others * each >= all_sms:
            raise ValueError(
                f"ops on {others + 1} streams need as many SMs at least, and a rank has {all_sms}"
            )
        return each if number else all_sms - others * each

    def wide(self, calls: list[CachedCall]) -> list[CachedCall]:
        """Return calls wider than their stream's share. A call's key ends with its stream."""
        if len(self.numbers) == 1:
            return []
        shares = {number: self._share_of(number) for number in self.numbers}
        return [c for c in calls if getattr(c.plan.config, "programs", 0) > shares[c.key[-1]]]

    def refuse_wide(self, op: str, config: Any) -> str | None:
        """Return why a requested config can't run beside the other streams' ops, or None."""
        programs, most = getattr(config, "programs", 0), self.share()
        if len(self.numbers) == 1 or programs <= most:
            return None
        return (
            f"{op}: programs {programs}, but {len(self.numbers)} streams of this world run ops, "
            f"and stream {self._backend.stream_number} may fill {most} SMs; use fewer"
        )

    def refuse_graphs(self, calls: list[CachedCall]) -> None:
        """Raise if a captured graph holds one of these calls, since the current stream is new."""
        for call in calls:
            raise ValueError(
                f"stream {self._backend.stream_number} is new, and a captured graph holds {call!r},"
                " which leaves it no room: each could wait for the other. Call an op once on each "
                "stream before you capture a graph."
            )

    @contextmanager
    def switched(self, number: int) -> Iterator[None]:
        backend, before = self._backend, self._backend.stream_number
        with backend.stream(number):
            backend.stream_number = number
            try:
                yield
            finally:
                backend.stream_number = before

    def record(self) -> StreamEvent:
        backend = self._backend
        return StreamEvent(backend.record_event(), backend.order.of(backend.stream_number))

    def wait(self, event: StreamEvent) -> None:
        if not isinstance(event, StreamEvent):
            raise ValueError(f"wait_event: {event!r} is not what world.record_event returned")
        self._backend.wait_event(event.inner)
        self._backend.order.learn(self._backend.stream_number, event.after)

    @contextmanager
    def capture(self, replay: Callable[[Graph, Callable[[], None]], None]) -> Iterator[Graph]:
        graph = Graph(replay, self._backend.begin_capture())
        self._backend.order.graphs.add(graph)
        self._backend.graph = graph
        try:
            yield graph
        except BaseException as error:
            explained = graph.abort(error)
            if explained is not None:
                raise explained from error
            raise
        else:
            graph.end()
        finally:
            self._backend.graph = None

    def replay(self, graph: Graph, start: Callable[[], None]) -> None:
        """Start a graph, ordered with the streams whose plans its calls use."""
        here = self._backend.stream_number
        self._backend.order.claim(here)
        others = sorted(graph.streams - {here})
        for number in others:
            self._follow(number)
        for plan in graph.plans:
            self.mark_used(plan)
        start()
        for number in others:
            with self.switched(number):
                self._follow(here)

    def _follow(self, number: int) -> None:
        """Order new work on the current stream after what is on that stream."""
        with self.switched(number):
            before = self.record()
        self.wait(before)

    def mark_used(self, plan: Plan) -> None:
        """Note a plan's call on the current stream. Refuse if another stream may still run it."""
        order, number = self._backend.order, self._backend.stream_number
        order.claim(number)
        if plan.used and not order.is_after(number, plan.used[0]):
            raise NotOrdered(
                f"a plan of {plan.problem} is called on stream {number}, and its last call, on "
                f"stream {plan.used[0][0]}, may still be running. Wait for an event that was "
                "recorded after that call, or make a plan for each stream."
            )
        plan.used[:] = [order.use(number)]
        graph = self._backend.graph
        if graph is not None and all(each is not plan for each in graph.plans):
            graph.plans.append(plan)

    def mark_captured(self, call: CachedCall | None = None) -> None:
        """Keep the plan of a call that a capture records, and its stream's order.

        torch.cuda.graph and cudagraph trees do not say when a graph ends, so a plan that one of
        them holds is kept as long as the world.
        """
        graph = self._backend.graph
        if graph is None:
            if call is not None and self._has_graphs and torch.cuda.is_current_stream_capturing():
                self.kept.add(call)
        else:
            graph.streams.add(self._backend.stream_number)
            if call is not None:
                graph.calls.add(call)

    def captured_calls(self) -> set[Any]:
        """Return the cached calls that a graph of this rank holds."""
        return self.kept.union(*[graph.calls for graph in self._backend.order.graphs])

    def check_unused(self, memory: Symmetric, offset: int) -> None:
        """Raise if a graph uses a plan that has a workspace at this offset."""
        for graph in self._backend.order.graphs:
            for plan in graph.plans:
                blocks = [memory.find(tensor) for tensor in plan.workspaces]
                if any(block is not None and block.offset == offset for block in blocks):
                    raise SundogError(
                        f"a graph that was captured uses a plan of {plan.problem}, and this would "
                        "free its workspaces. Call graph.free() first, on every rank."
                    )
