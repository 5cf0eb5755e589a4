"""Backend `shm`: one process per rank, heaps in shared memory, kernels on the simulator in each.

For real bootstrap and real process faults. Heaps are anonymous (memfd): a peer maps them through
/proc, so there is no name to clash and nothing to leave behind, however the ranks end. Values are
exchanged through torch's key-value store. A rank that dies is noticed by its pidfd.
"""

from __future__ import annotations

import itertools
import mmap
import os
import select
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import triton

from .. import knobs
from ..errors import PeerLost, RankMismatch
from ..heap import ALIGNMENT, Allocation, Heap
from ..sim.host_ops import HostMode
from ..sim.launcher import Installed
from ..sim.machine import Machine
from ..sim.schedule import RandomSchedule
from ..sim.tasks import Program
from ..world import World
from .sim import UNBOUNDED, end_waits, region_of
from .wire import pack, unpack

__all__ = ["init", "open_world"]

_opened = itertools.count()  # worlds of this process: equal on all ranks, so it names their keys
_LONGEST_NAP = 1e-3
_LARGEST = 8 << 20  # torch's TCPStore closes the connection on more


def init(heap_size: int, timeout: float) -> World:
    """The world of this process under torchrun. Uses the default group, or makes one with gloo."""
    missing = [
        v for v in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ
    ]
    if missing and not dist.is_initialized():
        raise ValueError(
            f"sundog.init: {', '.join(missing)} not set. Start the script with torchrun "
            "(torchrun --nproc-per-node 4 script.py), or call sundog.run(fn, world_size)."
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    store = dist.distributed_c10d._get_default_store()
    return open_world(dist.get_rank(), dist.get_world_size(), store, heap_size, timeout)


def open_world(rank: int, size: int, store: Any, heap_size: int, timeout: float) -> World:
    """Map everybody's heap and become this rank's host. All ranks call it together."""
    prefix = dist.PrefixStore(f"sundog/{next(_opened)}", store)
    backend = ShmBackend(rank, size, prefix, heap_size, timeout)
    backend.attach()
    world = World(backend, tuple(range(size)), "world", Heap(heap_size, backend.guard))
    world.barrier()
    return world


class ShmBackend:
    """One rank: its process, its machine with one host, and maps of all heaps."""

    name = "shm"
    device = torch.device("cpu")
    guard = ALIGNMENT
    polls = UNBOUNDED  # seconds are counted by `_look_outside`

    def __init__(self, rank: int, size: int, store: Any, heap_size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.num_sms = knobs.num_sms.get()
        self.machine = Machine(RandomSchedule(knobs.seed.get() + rank), self.num_sms, expire=True)
        self._store = store
        self._timeout = timeout
        self._count: dict[str, int] = {}
        self._awaited: list[str] = []  # keys that an exchange still waits for
        self._awaited_ranks: list[int] = []
        self._idle_since = 0.0
        self._nap = 0.0
        self._segments = [torch.empty(0, dtype=torch.uint8)] * size
        self._pidfds: dict[int, int] = {}
        self._own_fd = os.memfd_create("sundog-heap")
        os.ftruncate(self._own_fd, heap_size)
        self._installed = Installed(self.machine)
        self._mode = HostMode(self.machine)

    def attach(self) -> None:
        self.machine.attach_host(self.rank)
        self.machine.on_idle = self._look_outside
        self.machine.on_expire = lambda programs: end_waits(self.machine.memory, programs)
        self._installed.__enter__()
        heap_size = os.fstat(self._own_fd).st_size
        mine = (os.getpid(), self._own_fd, heap_size, (torch.__version__, triton.__version__))
        everyone = self.exchange(mine, "opening of the world", tuple(range(self.size)), "open")
        if len({entry[2:] for entry in everyone}) > 1:
            text = "\n".join(f"  rank {r}: heap {e[2]}, {e[3]}" for r, e in enumerate(everyone))
            raise RankMismatch(f"ranks opened different worlds (heap size, torch, triton):\n{text}")
        for rank, (pid, fd, *_) in enumerate(everyone):
            self._segments[rank] = self._map(rank, pid, fd, heap_size)
        self.bases = [segment.data_ptr() for segment in self._segments]
        self.exchange(None, "opening of the world", tuple(range(self.size)), "open")
        os.close(self._own_fd)  # everybody has mapped it; the maps keep it alive
        torch._C._push_on_torch_function_stack(self._mode)

    def _map(self, rank: int, pid: int, fd: int, heap_size: int) -> torch.Tensor:
        if rank == self.rank:
            return torch.frombuffer(mmap.mmap(fd, heap_size), dtype=torch.uint8)
        self._pidfds[rank] = os.pidfd_open(pid)
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            return torch.frombuffer(mmap.mmap(theirs, heap_size), dtype=torch.uint8)
        finally:
            os.close(theirs)

    def segment(self, rank: int) -> torch.Tensor:
        return self._segments[rank]

    def record(self, num_words: int) -> None:
        """The context, on the heap, has room for it."""

    def exchange(self, value: Any, what: str, ranks: tuple[int, ...], channel: str) -> list[Any]:
        count = self._count[channel] = self._count.get(channel, -1) + 1
        self._store.set(f"{channel}/{count}/{self.rank}", self._packed(value, what))
        keys = [f"{channel}/{count}/{rank}" for rank in ranks]
        self._awaited, self._awaited_ranks = keys, list(ranks)
        if not self._store.check(keys):
            self.machine.block(f"the other ranks at a {what}")
        self._awaited = []
        if count > 0:  # all have read the previous values: they came to this exchange
            self._store.delete_key(f"{channel}/{count - 1}/{self.rank}")
        return [unpack(self._store.get(key)) for key in keys]

    def _packed(self, value: Any, what: str) -> bytes:
        data = pack(value)
        if len(data) > _LARGEST:
            raise ValueError(
                f"{what}: {len(data):,} bytes to exchange, and the store takes {_LARGEST:,}. "
                "Exchange small objects; put data on the heap and use world.peer or a kernel."
            )
        return data

    def synchronize(self) -> None:
        self.machine.drain(self.machine.host.stream)

    def allocated(self, base: int, allocation: Allocation) -> None:
        for rank in range(self.size):  # a peer's copy is where the peer, doing the same, put it
            there = base - self.bases[self.rank] + self.bases[rank]
            self.machine.memory.add(region_of(there, allocation, rank))

    def freed(self, base: int, allocation: Allocation) -> None:
        for rank in range(self.size):
            there = base - self.bases[self.rank] + self.bases[rank]
            self.machine.memory.remove(there + allocation.offset)

    def close(self) -> None:
        try:
            if self.machine.failure is None:
                self.synchronize()
                # Nobody leaves while a peer may still wait for this rank's memory.
                self.exchange(None, "closing of the world", tuple(range(self.size)), "close")
        finally:
            modes = [
                torch._C._pop_torch_function_stack()
                for _ in range(torch._C._len_torch_function_stack())
            ]
            for mode in reversed(modes):
                if mode is not self._mode:
                    torch._C._push_on_torch_function_stack(mode)
            self._installed.__exit__(None, None, None)
            for fd in self._pidfds.values():
                os.close(fd)
            self._pidfds.clear()

    # while nothing can run in this process

    def _look_outside(self) -> bool:
        """Have other processes written what we wait for, arrived, or died? True if we can go on."""
        self.machine.host_wrote()
        if self._awaited and self._store.check(self._awaited):
            self._awaited = []
            self.machine.wake(self.machine.hosts[0])
        if self.machine.ready:
            self._idle_since = 0.0
            return True
        self._idle_since = self._idle_since or time.monotonic()
        self._check_peers()
        if time.monotonic() - self._idle_since > self._timeout:
            self._give_up()
        self._nap = min(2 * self._nap + 1e-5, _LONGEST_NAP) if self._idle_since else 0.0
        time.sleep(self._nap)
        return self.machine.failure is not None

    def _check_peers(self) -> None:
        poll = select.poll()
        ranks = {}
        for rank, fd in self._pidfds.items():
            poll.register(fd, select.POLLIN)
            ranks[fd] = rank
        dead = sorted(ranks[fd] for fd, _ in poll.poll(0))
        late = [r for r in dead if not self._awaited or self._store_lacks(r)]
        if late:
            self.machine.failure = PeerLost(
                f"rank {', '.join(map(str, late))} of {self.size} died while rank {self.rank} "
                "waited for it. This world is over: close it, and start all ranks again."
            )

    def _store_lacks(self, rank: int) -> bool:
        if rank not in self._awaited_ranks:
            return False
        return not self._store.check([self._awaited[self._awaited_ranks.index(rank)]])

    def _give_up(self) -> None:
        self._idle_since = 0.0
        parked: list[Program] = self.machine.watch.parked()
        if parked:
            self.machine.run_out(parked)
        elif self._awaited:
            late = [r for r in self._awaited_ranks if self._store_lacks(r)]
            self.machine.failure = PeerLost(
                f"rank {', '.join(map(str, late))} did not come within {self._timeout:g} s; rank "
                f"{self.rank} waits for {self.machine.hosts[0].waits_for}. Do all ranks make the "
                "same calls? A longer timeout is SUNDOG_TIMEOUT or timeout=."
            )
