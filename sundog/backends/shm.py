"""Backend `shm`: one process per rank, heaps in shared memory, kernels on the simulator in each.

It has real bootstrap and real process faults. Heaps are anonymous (memfd) and mapped by peers
through /proc, so names can't clash and nothing is left behind, however the ranks end. Values are
exchanged through torch's key-value store. A pidfd shows when a rank dies.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from .. import knobs
from ..errors import RankMismatch, by_rank
from ..machine.launcher import Installed
from ..machine.machine import Machine
from ..machine.schedule import RandomSchedule
from ..machine.tasks import Program
from ..world.backend import Exchange, Ranks
from ..world.heap import Allocation
from ..world.streams import Order
from ..world.world import World
from . import Capabilities, WorldOptions, _processes
from ._processes import opened
from ._rendezvous import KERNELS_WAIT, Locality, Peers, Pending, StoreExchange, locality
from ._store import StoreLost, open_store
from .sim import OnMachine, end_waits, region_of

NBYTES = mmap.PAGESIZE  # at the end of each rank's shared memory
_STARTS, _LOOKS, _IDLE = range(3)


class Quiet:
    """Finds out whether any rank can still run, from three words of each in shared memory.

    A rank counts how often it began to run, and how often it looked at everything that it waits for
    and found no change. No rank can run any more if all are idle, each has made one complete look
    since then, and none ran in between: so none has missed what another did last.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.share([], 0)

    def share(self, memories: list[mmap.mmap], end: int) -> None:
        """Use the ranks with these memories from now on; the words are at their end."""
        words = [np.frombuffer(m, np.int64, 3, end + -end % 8) for m in memories]
        self._ranks = words
        self._mine = words[self._rank] if words else np.zeros(3, np.int64)
        self._seen: list[list[int]] = []  # the words of all ranks, when all had become idle

    def runs(self) -> None:
        """Note that this rank runs, before it does anything that another one could notice."""
        self._mine[_IDLE] = 0
        self._mine[_STARTS] += 1
        self._seen = []

    def is_everywhere(self) -> bool:
        """Return whether all ranks are idle. Call it after each look that found no change."""
        self._mine[_LOOKS] += 1
        self._mine[_IDLE] = 1
        now = [words.tolist() for words in self._ranks]
        if not all(words[_IDLE] for words in now):
            self._seen = []
        elif [w[_STARTS] for w in self._seen] != [w[_STARTS] for w in now]:
            self._seen = now
        else:
            pairs = zip(self._seen, now, strict=True)
            return all(new[_LOOKS] >= old[_LOOKS] + 2 for old, new in pairs)
        return False


CAPABILITIES = Capabilities(on_gpu=False, processes=True)

_LONGEST_NAP = 1e-3
_LOOK_AT_PEERS = 0.02  # seconds between two looks


def run(fn: Callable[[World], Any], world_size: int, options: WorldOptions) -> list[Any]:
    """Fork a process per rank and run `fn` in each."""
    how: dict[str, Any] = {"heap_size": options.heap_size, "timeout": options.timeout}
    return _processes.run(fn, world_size, partial(open_world, **how))


def open_world(
    rank: int,
    size: int,
    store: Any,
    heap_size: int,
    timeout: float,
    group: str = "",
    everyone: Sequence[ShmFacts] = (),
) -> World:
    """Map all ranks' heaps and become this rank's host. All ranks call it together.

    `everyone` has the facts of all ranks; without it they exchange them here.
    """
    mine = everyone[rank] if everyone else facts(rank, heap_size)
    backend = ShmBackend(rank, size, open_store(store, timeout, group), mine, timeout)
    return opened(backend, lambda: backend.attach(mine, everyone), heap_size)


@dataclass(frozen=True)
class ShmFacts:
    """What one rank tells the others about itself before they map its heap."""

    where: Locality
    pid: int
    fd: int  # of its heap, in its process
    heap_size: int
    versions: tuple[str, str]  # of torch and Triton

    def close(self) -> None:
        """Free the heap if no world was opened with it."""
        os.close(self.fd)


def facts(rank: int, heap_size: int) -> ShmFacts:
    """Make this rank's heap. Return what the others must know of it."""
    fd = os.memfd_create("sundog-heap")
    os.ftruncate(fd, heap_size + NBYTES)
    versions = (str(torch.__version__), triton.__version__)
    return ShmFacts(locality(), os.getpid(), fd, heap_size, versions)


def check_same(everyone: Sequence[ShmFacts]) -> None:
    """Raise RankMismatch if ranks can't map each other's heaps: a pid means nothing elsewhere."""
    for rank, each in enumerate(everyone):
        apart = everyone[0].where.why_apart(each.where)
        if apart:
            raise RankMismatch(
                f"backend 'shm' shares memory between processes of one machine, and ranks 0 and "
                f"{rank} run {apart}."
            )
    if len({(each.heap_size, each.versions) for each in everyone}) > 1:
        lines = [f"heap {each.heap_size}, {each.versions}" for each in everyone]
        raise RankMismatch(
            f"ranks opened different worlds (heap size, torch, triton):\n{by_rank(lines)}"
        )


class ShmBackend(OnMachine):
    """One rank: its process, its machine with one host, and maps of all heaps.

    `_look_outside` counts the seconds of waits.
    """

    name = "shm"

    def __init__(self, rank: int, size: int, store: Any, mine: ShmFacts, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.num_sms = knobs.num_sms.get()
        self.machine = Machine(RandomSchedule(knobs.seed.get() + rank), self.num_sms, expire=True)
        self.order = Order()
        self._exchange = StoreExchange(rank, store)
        self._pending: Pending | None = None  # the exchange that the host waits in
        self._peers = Peers()
        store.expects_loss = self._peers.has_dead
        self._timeout = timeout
        self._failed = False
        self._idle_since = 0.0
        self._nap = 0.0
        self._looked = 0.0  # at the peers
        self._segments = [torch.empty(0, dtype=torch.uint8)] * size
        self.bases: list[int] = []
        self.flag_bases: list[int] = []
        self._quiet = Quiet(rank)
        self._own_fd = mine.fd
        self._installed = Installed(self.machine, owns=self.owns)

    def attach(self, mine: ShmFacts, everyone: Sequence[ShmFacts]) -> None:
        self.machine.attach_host(self.rank)
        self.machine.on_idle = self._look_outside
        self.machine.on_expire = lambda programs: end_waits(self.machine.memory, programs)
        self._installed.__enter__()
        what, ranks, heap_size = "opening of the world", tuple(range(self.size)), mine.heap_size
        everyone = everyone or self.exchange(mine, what, ranks, "open")
        check_same(everyone)
        whole = [self._map(r, each.pid, each.fd, heap_size) for r, each in enumerate(everyone)]
        self._segments = [
            torch.frombuffer(memory, dtype=torch.uint8, count=heap_size) for memory in whole
        ]
        self._quiet.share(whole, heap_size)
        self.bases = self.flag_bases = [segment.data_ptr() for segment in self._segments]
        self.exchange(None, what, ranks, "open")
        self._close_fd()  # all ranks have mapped it; the maps keep it alive

    def _map(self, rank: int, pid: int, fd: int, heap_size: int) -> mmap.mmap:
        if rank == self.rank:
            return mmap.mmap(fd, heap_size + NBYTES)
        self._peers.watch(rank, pid)
        try:
            theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except PermissionError as error:
            raise RankMismatch(
                f"rank {self.rank} (user {os.getuid()}) may not open the heap of rank {rank} "
                f"({error}): start all ranks as one user, without limits on ptrace between them"
            ) from None
        try:
            return mmap.mmap(theirs, heap_size + NBYTES)
        finally:
            os.close(theirs)

    def _close_fd(self) -> None:
        if self._own_fd >= 0:
            os.close(self._own_fd)
            self._own_fd = -1

    def segment(self, rank: int, is_flags: bool = False) -> torch.Tensor:
        return self._segments[rank]

    def exchange(
        self, value: Any, what: str, ranks: Ranks, channel: str, kind: Exchange = Exchange.VALUES
    ) -> list[Any]:
        self._raise_if_lost()
        try:
            self._pending = self._exchange.come(value, what, ranks, channel, kind)
            if not self._pending.arrived():
                self._idle_since = 0.0
                self.machine.block(f"the other ranks at a {what}")
            values = self._pending.values()
        except StoreLost as error:
            raise self._exchange.without_store(error, self._peers, self.size) from None
        self._pending = None
        return values

    def synchronize(self) -> None:
        self._raise_if_lost()
        super().synchronize()

    def after_drain(self, check: Callable[[], None]) -> None:
        self.machine.hosts[0].on_drained = check

    def allocated(self, base: int, allocation: Allocation) -> None:
        for rank in range(self.size):  # the peer, doing the same, has put its copy there
            there = base - self.bases[self.rank] + self.bases[rank]
            self.machine.memory.add(region_of(there, allocation, rank))

    def freed(self, base: int, allocation: Allocation) -> None:
        for rank in range(self.size):
            there = base - self.bases[self.rank] + self.bases[rank]
            self.machine.memory.remove(there + allocation.offset)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank leaves with an error, so that they do not wait for it."""
        self._failed = True
        self._exchange.leave(error)

    def close(self) -> None:
        try:
            if self.machine.failure is None and not self._failed:
                self.synchronize()
                # No rank leaves while a peer may still wait for its memory.
                self.exchange(None, "closing of the world", tuple(range(self.size)), "close")
                self._exchange.part(self.exchange, self.size)
        finally:
            self.machine.host.sight.set(False)
            self._installed.__exit__(None, None, None)
            self._peers.close()
            self._exchange.close()
            self._close_fd()
            self._quiet.share([], 0)
            self._segments.clear()  # tensors in use keep their heap mapped
            self.machine.close()

    def _raise_if_lost(self) -> None:
        """Raise again at every later call: the machine has stopped in the middle of a kernel."""
        if self.machine.failure is not None:
            raise self.machine.failure

    # while nothing can run in this process

    def _look_outside(self) -> bool:
        """Return whether we can continue: others have written, arrived, or died."""
        try:
            return self._look()
        except StoreLost as error:
            lost = self._exchange.without_store(error, self._peers, self.size)
            self.machine.failure = lost
            return True

    def _look(self) -> bool:
        self.machine.host_wrote()
        if self._pending is not None and self._pending.arrived():
            self.machine.wake(self.machine.hosts[0])
        if self.machine.ready or self._may_go_on():
            self._idle_since = self._nap = 0.0
            self._quiet.runs()
            return True
        if len(self.machine.watch) and not self.machine.had_last_turn:
            # Programs have run since the last look, and continued by themselves.
            self._idle_since = 0.0
        self._idle_since = self._idle_since or time.monotonic()
        self._check_peers()
        limit = self._timeout * (KERNELS_WAIT if len(self.machine.watch) else 1)
        if time.monotonic() - self._idle_since > limit:
            self._give_up()
        self._nap = min(2 * self._nap + 1e-5, _LONGEST_NAP)
        time.sleep(self._nap)
        return self.machine.failure is not None

    def _may_go_on(self) -> bool:
        """Return whether no rank runs, and the host need not go on waiting."""
        if len(self.machine.watch) and not self.machine.had_last_turn:
            self._quiet.runs()  # next
            return False
        return self._quiet.is_everywhere() and self.machine.let_go_on()

    def _check_peers(self) -> None:
        if time.monotonic() - self._looked < _LOOK_AT_PEERS:
            return
        self._looked = time.monotonic()
        awaited = list(range(self.size)) if self._pending is None else self._pending.late()
        dead = [rank for rank in self._peers.dead() if rank in awaited]
        lost = self._exchange.lost(awaited, dead, self.size)
        if lost is not None:
            self.machine.failure = lost

    def _give_up(self) -> None:
        self._idle_since = 0.0
        parked: list[Program] = self.machine.watch.parked()
        self._quiet.runs()
        if parked:
            self.machine.run_out(parked)
        elif self._pending is not None:
            self.machine.failure = self._pending.timed_out(self.rank, self._timeout)
