"""World: the ranks, seen from one of them. Memory, barrier, groups; the same on every backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .. import knobs
from ..collectives.all_gather import all_gather
from ..collectives.all_reduce import all_reduce
from ..collectives.all_to_all import all_to_all
from ..collectives.broadcast import broadcast
from ..collectives.device_barrier import device_barrier
from ..collectives.gather import gather
from ..collectives.reduce import reduce
from ..collectives.reduce_scatter import reduce_scatter
from ..collectives.scatter import scatter
from ..collectives.send_recv import mailboxes, recv, send
from ..device import context
from ..errors import OutOfHeap, RankMismatch, WorldClosed, by_rank
from ..fused.all_gather_matmul import all_gather_matmul
from ..fused.matmul_all_reduce import matmul_all_reduce
from ..fused.matmul_reduce_scatter import matmul_reduce_scatter
from .backend import Backend, Exchange
from .capture import BARRIER, COLLECTIVE, PLAN, READ
from .heap import Heap, divergence
from .tensors import Symmetric, Tensors
from .waits import Waits, table

__all__ = ["World"]


class World(Tensors):
    """What a rank's function gets. Allocation is local, a barrier is where ranks agree."""

    def __init__(
        self, backend: Backend, ranks: tuple[int, ...], channel: str, heap: Heap, origin: int = 0
    ) -> None:
        self.rank = ranks.index(backend.rank)
        self.size = len(ranks)
        self.device = backend.device
        self.num_sms = backend.num_sms
        self.backend = backend.name
        self.passive = backend.passive
        self.trace = 0  # the clock that kernels read at their trace points; 0: they have none
        self._backend = backend
        self._ranks = ranks
        self._channel = channel
        self._heap = heap
        self._memory = Symmetric(backend, ranks, heap, origin)
        self._closed = ""
        self._num_groups = 0
        self._groups: dict[int, World | None] = {}  # by the offset of their heaps in this one
        self._scopes: list[list[int]] = []
        self._signals: dict[int, torch.Tensor] = {}  # by offset
        self._plans: dict[Hashable, Any] = {}
        self.recent: dict[Hashable, Any] = {}  # calls with these very tensors (ops/dispatch.py)
        self.ctx = self._make_context()
        self._mail = mailboxes(self, heap.capacity)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, backend={self.backend!r})"

    # ops: functions of a world, one file each

    all_gather = all_gather
    all_to_all = all_to_all
    broadcast = broadcast
    device_barrier = device_barrier
    gather = gather
    recv = recv
    scatter = scatter
    send = send
    all_reduce = all_reduce
    reduce_scatter = reduce_scatter
    reduce = reduce
    all_gather_matmul = all_gather_matmul
    matmul_all_reduce = matmul_all_reduce
    matmul_reduce_scatter = matmul_reduce_scatter

    def cached_plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan made for this key before, or a new one (a collective on the host)."""
        self.uses_stream()
        if key not in self._plans:
            self._refuse_in_capture("this call", PLAN, "Call it once before, with such tensors.")
            # A plan outlives the scope that asked for it, but what it allocated before all ranks
            # were refused it goes back: the caller may ask for another algorithm.
            scopes, self._scopes = self._scopes, [[]]
            try:
                self._plans[key] = make()
            except (OutOfHeap, RankMismatch, ValueError):
                self._end_scope()
                raise
            finally:
                self._scopes = scopes
        return self._plans[key]

    def again(self, run: Callable[[], None], *given: torch.Tensor) -> Callable[[], bool] | None:
        """Run a call with these tensors; what repeats it faster, if that can be (see `Backend`)."""
        return self._backend.again(run, given)

    # ranks together

    def barrier(self) -> None:
        """All ranks: wait for what this rank launched, then for the others. On the host.

        Also where ranks find out that their heaps differ, and where a world whose waits ran out
        sets its flags back and goes on.
        """
        self._refuse_in_capture("world.barrier", BARRIER, "world.device_barrier() can be captured.")
        self.synchronize()
        mine = (self._heap.num_calls, self._heap.digest, self._waits.expired)
        everyone = self._exchange(mine, "barrier", Exchange.BARRIER)
        if len({state[:2] for state in everyone}) > 1:
            raise divergence(self.exchange(list(self._heap.log), "heap logs"))
        self._heap.agree()
        if any(expired for _, _, expired in everyone):
            self._recover()

    def synchronize(self) -> None:
        """Wait for what this rank launched; raises WaitTimeout if a wait inside it ran out."""
        self._check_open()
        self._refuse_in_capture("world.synchronize", READ, "Nothing runs during a capture.")
        self._backend.synchronize()
        self._backend.order.synchronize()
        self._waits.raise_if_expired(self.rank, self._memory.name_of)

    def exchange(self, value: Any, what: str = "exchange", *, pickle: bool = False) -> list[Any]:
        """Every rank's value, by rank. A collective on the host, with a timeout.

        `what` names it in messages. It orders no memory, whatever its name. Values are data:
        numbers, strings, containers, tensors, dataclasses. Anything else needs `pickle`, which
        lets everybody who reaches the ranks' store run code in them (docs/security.md).
        """
        asked = pickle or knobs.allow_pickle.get()
        return self._exchange(value, what, Exchange.PICKLED if asked else Exchange.VALUES)

    def _exchange(self, value: Any, what: str, kind: Exchange) -> list[Any]:
        self._check_open()
        reason = PLAN if what.startswith("plan of") else COLLECTIVE
        self._refuse_in_capture(f"world.exchange ({what})", reason, "Do it before the capture.")
        mine = (kind.value, what, value)
        everyone = self._backend.exchange(mine, what, self._ranks, self._channel, kind)
        calls = [call[:2] for call in everyone]
        if len(set(calls)) > 1:
            same_name = len({what for _, what in calls}) == 1
            shown = [f"{what} ({kind})" if same_name else what for kind, what in calls]
            raise RankMismatch(
                f"ranks met in different calls:\n{by_rank(shown)}\nMake the same calls, in the "
                "same order, on every rank."
            )
        return [value for _, _, value in everyone]

    def broadcast_object(self, value: Any, src: int = 0, *, pickle: bool = False) -> Any:
        """Rank `src`'s value, on every rank. What it may be, `exchange` says."""
        self._check_rank(src)
        mine = value if self.rank == src else None
        return self.exchange(mine, "broadcast_object", pickle=pickle)[src]

    def group(self, ranks: Sequence[int], heap_size: int = 0) -> World | None:
        """A world of some of the ranks. Every rank calls this; those outside get None.

        The group has a heap of its own, `heap_size` bytes of this one (default: an eighth), so
        that its members may allocate without the others. It ends with the scope that it was made
        in, or with this world.
        """
        if not isinstance(heap_size, int) or heap_size < 0:
            raise ValueError(f"group: heap_size {heap_size!r}: expected bytes, or 0 for an eighth")
        members = self._check_members(ranks)
        self._num_groups += 1
        nbytes = heap_size or self._heap.capacity // 8
        arena = self._heap.alloc(nbytes, f"group{self._num_groups}", kind="arena")
        self._groups[arena.offset] = None
        if self._scopes:
            self._scopes[-1].append(arena.offset)
        if self.rank not in members:
            return None
        heap = Heap(nbytes, self._heap.guard)
        chosen = tuple(self._ranks[r] for r in members)
        channel = f"{self._channel}/{self._num_groups}"
        group = World(self._backend, chosen, channel, heap, self._memory.origin + arena.offset)
        self._groups[arena.offset] = group
        group.barrier()  # nobody talks to a member whose context is not there yet
        return group

    def close(self) -> None:
        """Wait for what this rank launched and give everything back. Closing twice is fine.

        A group only ends: its memory goes back with the scope that it was made in.
        """
        if self._closed:
            return
        self._end("the world was closed")
        if self._channel == "world":
            self._backend.close()
        else:
            self._backend.synchronize()
        self.forget()

    def forget(self) -> None:
        """At the end: plans know their world, and would keep it and its heap."""
        self._plans.clear()
        self.recent.clear()
        self._mail = None
        for group in self._groups.values():
            if group is not None:
                group.forget()

    def _end(self, why: str) -> None:
        self._closed = self._closed or why
        for group in self._groups.values():
            if group is not None:
                group._end(why)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._backend.fail(error)
        self.close()

    # inside

    def _make_context(self) -> torch.Tensor:
        words = table(self.rank, self._memory.deltas(), self._backend.polls)
        ctx = self._allocate(len(words), torch.int64, "ctx", "context")
        self._waits = Waits(ctx, self._backend.record(context.RECORD_WORDS.value))
        words[context.RECORD.value] = self._waits.distance
        return ctx.copy_(torch.tensor(words, dtype=torch.int64))

    def _check_open(self) -> None:
        if self._closed:
            raise WorldClosed(f"{self._closed}; open a new one with sundog.run or sundog.init")

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(
                f"rank {rank} is outside this world of {self.size} ranks (0 to {self.size - 1})"
            )

    def _check_members(self, ranks: Sequence[int]) -> list[int]:
        members = list(ranks)
        for rank in members:
            self._check_rank(rank)
        if not members or len(set(members)) != len(members):
            raise ValueError(f"group of ranks {members}: name each member once, and at least one")
        everyone = self.exchange(tuple(members), "group")
        if len(set(everyone)) > 1:
            raise RankMismatch(
                f"group: ranks named different members:\n{by_rank(everyone)}\nName the same ones, "
                "in the same order, on every rank."
            )
        return members

    def _recover(self) -> None:
        for tensor in self._signals.values():
            tensor.zero_()
        self._waits.set_back(self._backend.polls)
        self._backend.synchronize()
        # Nobody signals before everybody's flags are back.
        self._exchange(None, "recovery", Exchange.BARRIER)
