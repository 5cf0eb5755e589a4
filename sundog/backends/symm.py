"""Backend `symm`: one process per GPU, heaps in torch's symmetric memory.

The heap is one allocation that all ranks map, and our allocator hands out parts of it. Kernels
start at once: ranks are processes, so loading a kernel never waits for another rank's. No host
blocks in CUDA while a peer may be dead: hosts poll events, and check their peers now and then.

Several ranks may share a GPU if TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. docs/gpu.md says how
to start MPS for them; without it they alternate on the GPU.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from triton.runtime.jit import JITFunction

from .. import target
from ..errors import NotResident, PeerLost, SundogError
from ..machine.launcher import Installed
from ..world.backend import Exchange, Ranks
from ..world.heap import Allocation
from ..world.streams import Order
from ..world.world import World
from . import Capabilities, WorldOptions, _processes
from ._cuda_graph import CudaRecording
from ._gpu import (
    Contexts,
    Direct,
    Gpu,
    GpuLaunch,
    OnGpu,
    grid_of,
    peers_have_atomics,
    pinned_words,
)
from ._groups import PerGroupStore
from ._measured import ResidentCounter, largest_that_fits, polls_per_second
from ._processes import opened
from ._relaunch import Again, again, is_hooked
from ._rendezvous import (
    KERNELS_WAIT,
    Facts,
    Peers,
    Pending,
    StoreExchange,
    check,
    gpu_facts,
)
from ._store import StoreLost, open_store

CAPABILITIES = Capabilities(on_gpu=True, processes=True)

_LOOK_AT_PEERS = 0.02  # seconds between two looks
_LONGEST_NAP = 2e-4
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def run(fn: Callable[[World], Any], world_size: int, options: WorldOptions) -> list[Any]:
    """Fork a process per rank and run `fn` in each."""
    _check_can_fork()
    how: dict[str, Any] = {"heap_size": options.heap_size, "timeout": options.timeout}
    return _processes.run(fn, world_size, partial(_open_alone, **how))


def _check_can_fork() -> None:
    """Raise if this process has used CUDA, which does not survive a fork."""
    if not target.has_gpu():
        raise SundogError(
            "backend 'symm' needs a GPU, and torch finds none. The same program runs on the CPU "
            "with backend='shm' or 'sim'."
        )
    if torch.cuda.is_initialized():
        raise SundogError(
            "sundog.run(backend='symm') forks this process, which has used CUDA already. Call it "
            "first, or start the ranks with torchrun and call sundog.init()."
        )


def _open_alone(rank: int, size: int, store: Any, heap_size: int, timeout: float) -> World:
    """Make the default group, then the world, in a process that `sundog.run` started."""
    store.set_timeout(timedelta(seconds=timeout))  # torch's own waits, when it maps the heaps
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    return open_world(rank, size, store, heap_size, timeout)


def facts(rank: int, heap_size: int) -> Facts:
    """Choose this rank's GPU. Return what the others must know of it."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(local % torch.cuda.device_count())
    return gpu_facts(torch.device("cuda", torch.cuda.current_device()), heap_size)


def open_world(
    rank: int,
    size: int,
    store: Any,
    heap_size: int,
    timeout: float,
    group: str = "",
    everyone: Sequence[Facts] = (),
) -> World:
    """Map all ranks' heaps. All members of torch's default group, or of `group`, call it.

    `everyone` has the facts of all ranks; without it they exchange them here.
    """
    if not group and not dist.is_initialized():  # the default group itself may be sundog's
        raise SundogError("backend 'symm' needs torch.distributed: call sundog.init under torchrun")
    mine = everyone[rank] if everyone else facts(rank, heap_size)
    backend = SymmBackend(rank, size, open_store(store, timeout, group), timeout)
    shared = _shared_by(group, rank, size, store)
    return opened(backend, lambda: backend.attach(mine, everyone, shared), heap_size)


def _shared_by(group: str, rank: int, size: int, store: Any) -> str:
    """Return torch's name of a group for its symmetric memory; "" is the default group.

    torch takes rank, size and store from what c10d has registered under that name. It drops all
    names with the default group, so a world that is opened after that registers its own again.
    """
    if not group:
        return ""
    name = f"sundog:{group}"
    try:
        dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:
        counted = PerGroupStore(dist.PrefixStore("symmetric memory", store))
        members = dist.ProcessGroup(counted, rank, size)
        dist.distributed_c10d._register_process_group(name, members)  # type: ignore[arg-type]
        _shared[name] = members, counted
    return name


_shared: dict[str, tuple[dist.ProcessGroup, PerGroupStore]] = {}  # c10d has weak references


class SymmBackend(OnGpu):
    """One rank: its process, its GPU or its share of one, and maps of all heaps."""

    name = "symm"
    recording: CudaRecording | None = None
    _captured = 0  # the number of the stream whose work is recorded

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.bases: list[int] = []
        self.flag_bases: list[int] = []
        self._target = target.of(self.device)
        self.polls = max(int(KERNELS_WAIT * timeout * polls_per_second(self.device.index)), 1)
        self.num_sms = self._target.num_sms
        self.owns_gpu = False  # until the ranks have compared their GPUs
        self._exchange = StoreExchange(rank, store)
        self._peers = Peers()
        store.expects_loss = self._peers.has_dead
        self._timeout = timeout
        self._patience = 2 * timeout + 10  # while opening, when ranks compile and measure
        self._streams: dict[int, torch.cuda.Stream] = {}  # those with launched kernels
        self.order = Order()
        self._numbered = {0: torch.cuda.current_stream()}
        self._here = threading.local()
        self._here.number = 0
        self._lost: PeerLost | None = None
        self._contexts: Contexts | None = None
        self._handle: Any = None
        self._side = torch.cuda.Stream(self.device, priority=-1)  # from its own pool
        self._gpu = Gpu(self.device)
        self._direct = Direct()
        self._installed = Installed(None, self._launch, self.owns)
        self._installed.__enter__()

    def attach(self, mine: Facts, everyone: Sequence[Facts], shared: str = "") -> None:
        what, ranks, heap_size = "opening of the world", tuple(range(self.size)), mine.heap_size
        everyone = everyone or self.exchange(mine, what, ranks, "open")
        check(everyone)
        for rank, each in enumerate(everyone):
            if rank != self.rank:
                self._peers.watch(rank, each.pid)
        self._own = symmetric.empty(heap_size, dtype=torch.uint8, device=self.device)
        group: Any = shared or dist.group.WORLD
        self._handle = symmetric.rendezvous(self._own, group)
        self.bases = self.flag_bases = list(self._handle.buffer_ptrs)
        self.has_atomics = peers_have_atomics(self.device.index)
        self._contexts = Contexts(self._own)
        self.owns_gpu = len({each.gpu for each in everyone}) == self.size
        sharing = tuple(rank for rank, each in enumerate(everyone) if each.gpu == mine.gpu)
        if len(sharing) > 1:
            self.num_sms = self._measure_sms(sharing)
        # All ranks get the same number, so that they make the same plans.
        self.num_sms = min(self.exchange(self.num_sms, what, ranks, "open"))
        self._patience = self._timeout

    def _measure_sms(self, sharing: tuple[int, ...]) -> int:
        """Count the SMs that each of these ranks can fill while the others fill theirs."""
        first = self._target.num_sms
        if _SHARE not in os.environ:  # with it, CUDA reports a part of the SMs to each process
            first = max(first // len(sharing), 1)
        if torch.version.hip:  # MPS is CUDA's
            return first
        channel = f"SMs of {sharing[0]}"
        meet = partial(self.exchange, None, "count of SMs", sharing, channel)
        counter = ResidentCounter(self.segment(sharing[0]), sharing.index(self.rank), len(sharing))
        if self.rank == sharing[0]:
            counter.clear()
        return largest_that_fits(first, partial(counter.measure, meet))

    def segment(self, rank: int, is_flags: bool = False) -> torch.Tensor:
        if rank == self.rank:  # not a view by address, since this one keeps the memory alive
            return self._own
        view: torch.Tensor = self._handle.get_buffer(rank, [self._own.numel()], torch.uint8)
        return view

    def record(self, num_words: int) -> torch.Tensor:
        return pinned_words(num_words)

    def exchange(
        self, value: Any, what: str, ranks: Ranks, channel: str, kind: Exchange = Exchange.VALUES
    ) -> list[Any]:
        self._raise_if_lost()
        try:
            return self._meet(self._exchange.come(value, what, ranks, channel, kind))
        except StoreLost as error:
            self._lost = self._exchange.without_store(error, self._peers, self.size)
            self._raise_if_lost()
            raise

    def _meet(self, pending: Pending) -> list[Any]:
        """Wait for the others, while checking whether they have died."""
        begin = looked = time.monotonic()
        nap = 0.0
        while not pending.arrived():
            now = time.monotonic()
            if now - begin > self._patience:
                self._lost = pending.timed_out(self.rank, self._patience)
                self._raise_if_lost()
            if now - looked > _LOOK_AT_PEERS:
                looked = now
                self._look_at_peers(pending.late())
            nap = min(2 * nap + 1e-5, _LONGEST_NAP)
            time.sleep(nap)
        return pending.values()

    def synchronize(self) -> None:
        """Poll instead of blocking in CUDA: if a peer died, our kernels would never finish."""
        if torch.cuda.is_current_stream_capturing():
            return
        self._raise_if_lost()  # first: waits that this ended have expired, which is no cause
        used = [torch.cuda.current_stream(), *self._numbered.values(), *self._streams.values()]
        events = [stream.record_event() for stream in dict.fromkeys(used)]
        self._streams.clear()
        looked, looks = time.monotonic(), 0
        while not all(event.query() for event in events):
            looks += 1
            if looks > 100:
                time.sleep(min(1e-6 * looks, _LONGEST_NAP))
            if time.monotonic() - looked > _LOOK_AT_PEERS:
                looked = time.monotonic()
                self._look_at_peers(list(range(self.size)))
        torch.cuda.synchronize(self.device)

    def stream(self, number: int) -> AbstractContextManager[None]:
        if self.recording is not None and number == self._captured:
            return torch.cuda.stream(self.recording.stream)
        if number not in self._numbered:
            self._numbered[number] = torch.cuda.Stream(self.device)
        return torch.cuda.stream(self._numbered[number])

    @property
    def stream_number(self) -> int:
        """This thread's stream, by torch's current one. Autograd's threads switch only by torch."""
        try:
            number: int = self._here.number
        except AttributeError:
            handle = self._gpu.current_handle()
            found = [n for n, stream in self._numbered.items() if stream.cuda_stream == handle]
            number = found[0] if found else 0
        return number

    @stream_number.setter
    def stream_number(self, number: int) -> None:
        self._here.number = number

    def begin_capture(self) -> CudaRecording:
        """Begin on another stream, since CUDA can't capture on the one where a process starts."""
        self._captured = self.stream_number
        return CudaRecording(self, torch.cuda.Stream(self.device), CudaRecording.start)

    def _look_at_peers(self, awaited: list[int]) -> None:
        dead = [rank for rank in self._peers.dead() if rank in awaited]
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._lost = self._exchange.lost(others, dead, self.size)
        except StoreLost as error:
            self._lost = self._exchange.without_store(error, self._peers, self.size)
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self._lost is not None:
            if self._contexts is not None:
                self._contexts.end_waits(self._side)
            raise self._lost

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank leaves with an error, so that they do not wait for it."""
        if not isinstance(error, PeerLost):
            self._lost = PeerLost(f"this rank failed with {type(error).__name__}: {error}")
        self._exchange.leave(error)

    def after_drain(self, check: Callable[[], None]) -> None:
        """Do nothing: reads of GPU memory are torch's; calls, synchronize and close raise."""

    def allocated(self, base: int, allocation: Allocation) -> None:
        assert self._contexts is not None
        self._contexts.allocated(base, allocation)

    def freed(self, base: int, allocation: Allocation) -> None:
        assert self._contexts is not None
        self._contexts.freed(base, allocation)

    def close(self) -> None:
        try:
            if self._lost is None:
                self.synchronize()
                # No rank unmaps while a peer may still use the memory.
                self.exchange(None, "closing of the world", tuple(range(self.size)), "close")
                self._exchange.part(self.exchange, self.size)
            elif self._contexts is not None:
                self._contexts.end_waits(self._side)
                torch.cuda.synchronize(self.device)
        finally:
            self._installed.__exit__(None, None, None)
            self._peers.close()
            self._exchange.close()
            self._contexts = self._handle = self._own = None  # type: ignore[assignment]

    def _launch(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> Any:
        handle = self._current_handle()
        if self.recording is None:
            compiled = self._direct.again(kernel, grid, args, kwargs, handle)
            if compiled is not None:
                return compiled
        shape = grid_of(kernel, grid, args, kwargs)
        if self.recording is not None:
            capturing = torch.cuda.is_current_stream_capturing()
            launch = GpuLaunch(kernel, shape, args, kwargs)
            self.recording.launched(launch, self._streams[handle], capturing)
        if math.prod(shape) * kwargs.get("num_ctas", 1) > self.num_sms:  # one per SM always fits
            self._check_resident(GpuLaunch(kernel, shape, args, kwargs))
        compiled = Installed.original(kernel, *args, grid=shape, warmup=False, **kwargs)
        self._direct.note(kernel, grid, args, kwargs, compiled)
        return compiled

    def _current_handle(self) -> int:
        """Return the handle of the current stream, for which `synchronize` will wait."""
        handle = self._gpu.current_handle()
        if handle not in self._streams:
            self._streams[handle] = self._gpu.current_stream()
        return handle

    def relaunch(
        self, run: Callable[[], None], given: tuple[torch.Tensor, ...]
    ) -> Callable[[], bool] | None:
        return again(run, given, self._start_again)

    def _start_again(self, launches: list[Again]) -> bool:
        if self.recording is not None or is_hooked():
            return False  # a graph, ours or torch's, keeps the plan: ops/dispatch.py notes it
        handle = self._gpu.current_handle()
        if handle and self._gpu.is_capturing():  # 0: the default stream can't be captured
            return False
        if handle not in self._streams:
            self._streams[handle] = self._gpu.current_stream()
        for launch in launches:
            launch.put(handle)
        return True

    def _check_resident(self, launch: GpuLaunch) -> None:
        launch.load()
        footprint = launch.footprint()
        if footprint is None:
            return
        fit = self._target.programs_per_sm(footprint)
        if launch.programs > fit * self.num_sms:
            raise NotResident(
                f"rank {self.rank}: {launch.name} has {launch.programs} programs of {footprint} "
                f"that wait for others, and its {self.num_sms} SMs of {self._target.name} hold "
                f"{fit * self.num_sms} at once ({fit} each). They would hang, so none was started. "
                f"Launch at most {fit * self.num_sms} (world.num_sms always fit), or use smaller "
                "tiles."
            )
