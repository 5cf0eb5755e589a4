"""World: the ranks, seen from one of them. Memory, streams, barrier, groups, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .. import knobs, target
from ..collectives._mailbox import mailboxes
from ..device import context
from ..errors import RankMismatch, SundogError, WorldClosed, by_rank
from ..ops.load import functions
from ..ops.op import checked_rank, checked_tensor
from ..ops.plans import Plans, Progress
from ..torch import names
from ..torch.calls import routed
from .backend import Backend, Exchange
from .capture import ALLOCATION, BARRIER, COLLECTIVE, NESTED, PLAN, READ, Graph
from .heap import Heap, divergence
from .streams import RankStreams, StreamEvent
from .tensors import Shape, Symmetric
from .waits import Waits, signal_form, table

if TYPE_CHECKING:
    from ..collectives.all_gather import all_gather
    from ..collectives.all_reduce import all_reduce
    from ..collectives.all_to_all import all_to_all
    from ..collectives.broadcast import broadcast
    from ..collectives.device_barrier import device_barrier
    from ..collectives.gather import gather
    from ..collectives.reduce import reduce
    from ..collectives.reduce_scatter import reduce_scatter
    from ..collectives.scatter import scatter
    from ..collectives.send_recv import recv, send
    from ..fused.all_gather_matmul import all_gather_matmul
    from ..fused.all_reduce_rms_norm import all_reduce_rms_norm
    from ..fused.matmul_all_gather import matmul_all_gather
    from ..fused.matmul_all_reduce import matmul_all_reduce
    from ..fused.matmul_reduce_scatter import matmul_reduce_scatter


class World:
    """What a rank's function receives. Allocation is local; ranks agree at barriers."""

    if TYPE_CHECKING:  # the loop at the end of this file adds every op
        all_gather = all_gather
        all_reduce = all_reduce
        all_to_all = all_to_all
        broadcast = broadcast
        device_barrier = device_barrier
        gather = gather
        recv = recv
        reduce = reduce
        reduce_scatter = reduce_scatter
        scatter = scatter
        send = send
        all_gather_matmul = all_gather_matmul
        all_reduce_rms_norm = all_reduce_rms_norm
        matmul_all_gather = matmul_all_gather
        matmul_all_reduce = matmul_all_reduce
        matmul_reduce_scatter = matmul_reduce_scatter

    def __init__(
        self, backend: Backend, ranks: tuple[int, ...], channel: str, heap: Heap, origin: int = 0
    ) -> None:
        self.rank = self.local_rank = ranks.index(backend.rank)
        self.size, self.node, self.num_nodes = len(ranks), 0, 1  # one machine; nodes/ has several
        self.device, self.num_sms = backend.device, backend.num_sms
        self._target = target.key_of(backend.device)
        self.backend, self.passive, self.owns_gpu = backend.name, backend.passive, backend.owns_gpu
        self.kernel_mode = signal_form(knobs.signals.get(), self.device, backend.has_atomics)
        self._backend = backend
        self._ranks, self._channel, self._heap = ranks, channel, heap
        self._closed, self.tune = "", ""  # tune="online": see ops/online.py
        self.name = names.name_for(self, channel)  # for torch's ops: see sundog/torch/names.py
        self._num_groups = 0
        self._streams = RankStreams(backend)
        self._memory = Symmetric(backend, ranks, heap, origin, self._streams.check_unused)
        self.ctx = self._make_context()
        self._progress = Progress()
        self._plans = Plans(self, self._memory, self._waits, self._progress, knobs.max_plans.get())
        self._mail = mailboxes(self, heap.capacity)
        if channel == "world":
            backend.after_drain(self._raise_if_expired)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, backend={self.backend!r})"

    def __deepcopy__(self, memo: object) -> World:
        return self  # a copied layer keeps its world, as torch keeps a ProcessGroup

    # symmetric tensors

    def empty(
        self, shape: Shape, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """Make a symmetric tensor, at the same offset on every rank that makes the same calls.

        It does not wait: peers may touch it after a barrier. On the simulator it holds poison.
        """
        return self._allocate(shape, dtype, name, "data")

    def zeros(
        self, shape: Shape, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """Allocate like `empty`, filled with zeros."""
        return self.empty(shape, dtype, name).zero_()

    def full(
        self, shape: Shape, value: float, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """Allocate like `empty`, with all elements `value`."""
        return self.empty(shape, dtype, name).fill_(value)

    def randn(
        self, shape: Shape, dtype: torch.dtype = torch.float32, name: str = ""
    ) -> torch.Tensor:
        """Allocate like `empty`, filled by torch's generator, which each rank seeds itself."""
        return self.empty(shape, dtype, name).normal_()

    def empty_like(self, other: torch.Tensor, name: str = "") -> torch.Tensor:
        """Allocate like `empty`, with the shape and dtype of any tensor."""
        return self.empty(checked_tensor(other).shape, other.dtype, name)

    def zeros_like(self, other: torch.Tensor, name: str = "") -> torch.Tensor:
        """Allocate like `zeros`, with the shape and dtype of any tensor."""
        return self.empty_like(other, name).zero_()

    def signals(self, shape: Shape, name: str) -> torch.Tensor:
        """Make flags and epochs: zeroed int64, which a recovery of the world sets to zero again.

        Reach a peer's flags by `device.signal`, and its data by `device.memory`: across a link they
        are in different memories.
        """
        return self._allocate(shape, torch.int64, name, "flags")

    def free(self, tensor: torch.Tensor) -> None:
        """Free a symmetric tensor. Every rank must do so at the same place in its program."""
        self._check_open()
        self._refuse_in_capture("world.free", ALLOCATION, "Free it outside.")
        self._memory.free_tensor(tensor)

    def scope(self) -> AbstractContextManager[None]:
        """Free what is allocated inside `with world.scope():` at its end, the latest first."""
        return self._memory.scope()

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is, or is part of, a live tensor on this world's heap."""
        return self._memory.find(tensor) is not None

    def as_symmetric(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """Return the tensor if it is on the heap, else a copy that is."""
        if self.is_symmetric(tensor):
            return tensor
        return self.empty(tensor.shape, tensor.dtype, name).copy_(tensor)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Return where a symmetric tensor starts in its heap, in bytes, the same on every rank."""
        return self._memory.offset_of(tensor)

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View the peer's copy, if the host can reach its memory. Orders nothing."""
        self._check_open()
        return self._memory.peer(tensor, self._check_rank(rank))

    @property
    def rank_stride(self) -> int | None:
        """Return the bytes from each rank's copy to the next one's, if equal, for descriptors."""
        return self._memory.rank_stride

    # streams

    @property
    def stream_number(self) -> int:
        """The current stream of this rank. Groups share it: streams are the backend's."""
        return self._backend.stream_number

    def stream(self, number: int) -> AbstractContextManager[None]:
        """Send launches and torch operations inside `with world.stream(1):` to that stream."""
        self._check_open()
        if type(number) is not int or number < 0:
            raise ValueError(f"stream {number!r}: expected a number, 0 or more")
        return self._streams.switched(number)

    def record_event(self) -> StreamEvent:
        """Record a point on the current stream, after everything put there so far."""
        self._check_open()
        return self._streams.record()

    def wait_event(self, event: StreamEvent) -> None:
        """Order later work on the current stream after the event. The host does not wait."""
        self._check_open()
        self._streams.wait(event)

    def capture(self) -> AbstractContextManager[Graph]:
        """Record what is launched inside `with world.capture() as graph:` for graph.replay()."""
        self._refuse_in_capture("world.capture", NESTED, "A graph can't hold another.")
        self.synchronize()
        return self._streams.capture(self._replay)

    def _replay(self, graph: Graph, start: Callable[[], None]) -> None:
        self._check_open()
        self._refuse_in_capture("graph.replay", NESTED, "A graph can't hold another.")
        self._raise_if_expired()
        self._streams.replay(graph, start)

    @property
    def is_capturing(self) -> bool:
        """Whether this rank is inside `with world.capture()`."""
        return self._backend.graph is not None

    # plans

    @property
    def max_plans(self) -> int:
        """The number of plans that stay cached, besides those that captured graphs hold.

        Set it alike on every rank (default: SUNDOG_MAX_PLANS). The next plan takes it into account.
        """
        return self._plans.max_plans

    @max_plans.setter
    def max_plans(self, count: int) -> None:
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"max_plans must be at least 1, got {count!r}")
        self._plans.max_plans = count

    def free_plans(self) -> None:
        """Free the heap memory of cached plans, except of those that captured graphs hold.

        All ranks must call it, like a barrier. A later call makes its plan again.
        """
        self._refuse_in_capture("world.free_plans", ALLOCATION, "Free them outside.")
        self._plans.free()

    # ranks together

    def barrier(self) -> None:
        """Wait on the host for what this rank launched, then for the other ranks.

        It also raises HeapDivergence if the ranks' heaps differ. If a wait expired, it resets the
        flags of the world, which can then go on.
        """
        self._refuse_in_capture("world.barrier", BARRIER, "world.device_barrier() can be captured.")
        self.synchronize()
        mine = (self._heap.num_calls, self._heap.digest, self._waits.error is not None)
        everyone = self._exchange(mine, "barrier", Exchange.BARRIER)
        if len({tuple(state[:2]) for state in everyone}) > 1:
            raise divergence(self.exchange(list(self._heap.log), "heap logs"), self._ranks)
        self._heap.agree()
        if any(expired for _, _, expired in everyone):
            self._recover()

    def synchronize(self) -> None:
        """Wait for what this rank launched; raise WaitTimeout if a wait inside it expired."""
        self._check_open()
        self._refuse_in_capture("world.synchronize", READ, "Nothing runs during a capture.")
        self._backend.synchronize()
        self._backend.order.synchronize()
        self._raise_if_expired()

    def exchange(self, value: Any, what: str = "exchange", *, pickle: bool = False) -> list[Any]:
        """Return every rank's value, by rank. A collective on the host, with a timeout.

        `what` names it in messages. An exchange orders no memory. Values are data: numbers,
        strings, containers, tensors, dataclasses. Anything else needs `pickle`, which lets everyone
        who reaches the ranks' store run code in them (docs/security.md).
        """
        asked = pickle or knobs.allow_pickle.get()
        return self._exchange(value, what, Exchange.PICKLED if asked else Exchange.VALUES)

    def _compare(self, value: Any, what: str) -> list[Any]:
        """Exchange sundog's own values, when a plan is made, never by pickle."""
        return self._exchange(value, what, Exchange.VALUES, PLAN)

    def broadcast_object(self, value: Any, src: int = 0, *, pickle: bool = False) -> Any:
        """Return rank `src`'s value, on every rank. `exchange` says what it may be."""
        src = self._check_rank(src)
        mine = value if self.rank == src else None
        return self.exchange(mine, "broadcast_object", pickle=pickle)[src]

    def group(self, ranks: Sequence[int], heap_size: int = 0) -> World | None:
        """Make a world of some of the ranks. Every rank calls this; those outside get None.

        The group's heap is a part of this one, `heap_size` bytes (default: an eighth), so that its
        members can allocate without the others. The group ends with the scope in which it was made,
        or with this world.
        """
        if not isinstance(heap_size, int) or heap_size < 0:
            raise ValueError(
                f"group: heap_size must be >= 0 bytes (0 takes an eighth of this heap), got "
                f"{heap_size!r}"
            )
        members = self._check_members(ranks)
        self._num_groups += 1
        nbytes = heap_size or self._heap.capacity // 8
        arena = self._memory.allocate_arena(nbytes, f"group{self._num_groups}")
        if self.rank not in members:
            return None
        heap = Heap(nbytes, self._heap.guard)
        chosen = tuple(self._ranks[r] for r in members)
        channel = f"{self._channel}/{self._num_groups}"
        group = World(self._backend, chosen, channel, heap, self._memory.origin + arena.offset)
        group.max_plans, group.kernel_mode, group.tune = self.max_plans, self.kernel_mode, self.tune
        self._memory.groups[arena.offset] = group
        group.barrier()  # every member's context is there before a kernel uses it
        return group

    # the end

    def close(self) -> None:
        """Wait for what this rank launched, then free everything. Closing twice is fine.

        Raises WaitTimeout if a wait expired and nothing has reported it yet. Closing a group only
        ends it; its memory is freed with the scope in which it was made.
        """
        if self._closed:
            return
        error = self._failure()
        if error is not None:
            self._backend.fail(error)
        self._close()
        if error is not None:
            raise error

    def _failure(self) -> SundogError | None:
        """Wait for what this rank launched. Return the error that is not reported yet, if any."""
        try:
            self.synchronize()
        except SundogError as error:
            return error
        return None

    def _close(self) -> None:
        self._end("the world was closed")
        try:
            if self._channel == "world":
                self._backend.close()
        finally:
            self._forget()

    def _forget(self) -> None:
        """Drop the plans, which refer to their world and would keep it, and its heap, alive."""
        self._plans.clear()
        self._progress.close()
        self._mail = None
        if self._channel == "world":
            self._backend.after_drain(lambda: None)
        for group in self._memory.own_groups():
            group._forget()

    def _end(self, why: str) -> None:
        self._closed = self._closed or why
        names.forget(self)
        for group in self._memory.own_groups():
            group._end(why)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._backend.fail(error)
            self._close()

    # inside

    def _allocate(self, shape: Shape, dtype: torch.dtype, name: str, kind: str) -> torch.Tensor:
        self._check_open()
        self._refuse_in_capture("world.empty", ALLOCATION, "Allocate before the capture.")
        return self._memory.allocate(shape, dtype, name, kind)

    def _exchange(self, value: Any, what: str, kind: Exchange, why: str = COLLECTIVE) -> list[Any]:
        self._check_open()
        self._refuse_in_capture(f"world.exchange ({what})", why, "Do it before the capture.")
        mine = (kind.value, what, value)
        self._progress.note(f"its host waits for the other ranks at a {what}")
        everyone = self._backend.exchange(mine, what, self._ranks, self._channel, kind)
        self._progress.note("")
        calls = [tuple(call[:2]) for call in everyone]
        if len(set(calls)) > 1:
            same_name = len({what for _, what in calls}) == 1
            shown = [f"{what} ({kind})" if same_name else what for kind, what in calls]
            raise RankMismatch(
                f"ranks met in different calls:\n{by_rank(shown, self._ranks)}\nMake the same "
                "calls, in the same order, on every rank."
            )
        return [value for _, _, value in everyone]

    def _make_context(self) -> torch.Tensor:
        words = table(self.rank, self._memory.deltas(), self._backend.polls)
        ctx = self._allocate(len(words), torch.int64, "ctx", "context")
        self._waits = Waits(ctx, self._backend.record(context.RECORD_WORDS.value))
        words[context.RECORD.value] = self._waits.distance
        return ctx.copy_(torch.tensor(words, dtype=torch.int64))

    def _raise_if_expired(self) -> None:
        """Raise WaitTimeout, once, if a wait of this rank expired, in this world or a group."""
        if self._waits.word.value and not self._closed:
            shown = functools.partial(self._progress.shown, self._plans.name_of, self._ranks)
            self._waits.raise_if_expired(self.rank, self._ranks, self._memory.name_of, shown)
        for group in self._memory.own_groups():
            group._raise_if_expired()

    def _refuse_in_capture(self, call: str, reason: str, instead: str) -> None:
        if self._backend.graph is not None:
            raise self._backend.graph.refuse(call, reason, instead)

    def _check_open(self) -> None:
        if self._closed:
            raise WorldClosed(f"{self._closed}; open a new one with sundog.run or sundog.init")

    def _check_rank(self, rank: Any) -> int:
        return checked_rank(rank, self.size)

    def _check_members(self, ranks: Sequence[int]) -> list[int]:
        if not isinstance(ranks, Iterable):
            raise ValueError(f"group of ranks {ranks!r}: give all of them, for example [0, 1]")
        members = [self._check_rank(rank) for rank in ranks]
        if not members or len(set(members)) != len(members):
            raise ValueError(f"group of ranks {members}: name each member once, and at least one")
        everyone = self.exchange(tuple(members), "group")
        if len(set(map(tuple, everyone))) > 1:
            raise RankMismatch(
                f"group: ranks named different members:\n{by_rank(everyone, self._ranks)}\nName "
                "the same ones, in the same order, on every rank."
            )
        return members

    def _recover(self) -> None:
        for tensor in self._memory.flags.values():
            tensor.zero_()
        self._waits.set_back(self._backend.polls)
        self._backend.synchronize()
        # No rank signals before all ranks' flags are reset.
        self._exchange(None, "recovery", Exchange.BARRIER)


for _name, _function in functions().items():
    setattr(World, _name, routed(_name, _function))
