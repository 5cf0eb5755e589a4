"""Values between ranks that are processes: through torch's key-value store, with a timeout.

`shm` and `symm` share it. Each backend waits in its own way; this file knows what it waits for, and
which ranks are late or have died (noticed by a pidfd, so ranks are processes of one machine).

Before ranks map each other's memory they compare what must agree (`check`).
"""

from __future__ import annotations

import os
import platform
import select
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

from ..errors import PeerLost, RankMismatch
from ..world.backend import Exchange
from ._codec import decode, encode
from ._store import RankStore, StoreLost

# A share of the timeout. Kernels give up before hosts do, so that a rank whose kernel waited in
# vain still reaches the barrier where the world recovers, while the others wait for it there.
KERNELS_WAIT = 0.5
_END_IS_SEEN = 0.1  # seconds after which a pidfd shows the end of a process
_LARGEST = 8 << 20  # torch's TCPStore closes the connection on more


def join(timeout: float) -> tuple[int, int, Any]:
    """Return this process's rank, the number of ranks, and their store.

    They are the default group's, which is made with gloo if there is none.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing and not dist.is_initialized():
        raise ValueError(
            f"sundog.init: {', '.join(missing)} not set. Start the script with torchrun "
            "(torchrun --nproc-per-node 4 script.py), or call sundog.run(fn, world_size)."
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    store = dist.distributed_c10d._get_default_store()
    return dist.get_rank(), dist.get_world_size(), store


@dataclass(frozen=True)
class Pending:
    """One exchange that this rank has entered."""

    store: RankStore
    what: str
    ranks: tuple[int, ...]
    prefix: str
    kind: Exchange

    def arrived(self) -> bool:
        return self.store.check([f"{self.prefix}/{rank}" for rank in self.ranks])

    def late(self) -> list[int]:
        return [r for r in self.ranks if not self.store.check([f"{self.prefix}/{r}"])]

    def values(self) -> list[Any]:
        return [self._value(rank) for rank in self.ranks]

    def _value(self, rank: int) -> Any:
        data = self.store.get(f"{self.prefix}/{rank}")
        return decode(
            data, f"the value of rank {rank} at a {self.what}", self.kind is Exchange.PICKLED
        )

    def timed_out(self, rank: int, seconds: float) -> PeerLost:
        return PeerLost(
            f"rank {_names(self.late())} did not arrive within {seconds:g} s; rank {rank} waits at "
            f"a {self.what}. Do all ranks make the same calls? For more time set timeout= or "
            "SUNDOG_TIMEOUT."
        )


class StoreExchange:
    """One rank's end of all exchanges of a world."""

    def __init__(self, rank: int, store: RankStore) -> None:
        self._rank = rank
        self._store = store
        self._count: dict[str, int] = {}
        self._has_left = False

    def come(
        self, value: Any, what: str, ranks: tuple[int, ...], channel: str, kind: Exchange
    ) -> Pending:
        """Publish this rank's value. The others' are there once `arrived` returns True."""
        count = self._count[channel] = self._count.get(channel, -1) + 1
        self._store.set(f"{channel}/{count}/{self._rank}", _packed(value, what, kind))
        if count > 1:
            # A rank that entered the previous exchange had read the values of the one before it.
            self._store.delete_key(f"{channel}/{count - 2}/{self._rank}")
        return Pending(self._store, what, ranks, f"{channel}/{count}", kind)

    def leave(self, error: BaseException) -> None:
        """Tell the others why this rank leaves, though its process may live on."""
        if self._has_left:  # the first reason counts
            return
        self._has_left = True
        with suppress(RuntimeError):  # the store may be gone too, which the others will notice
            self._store.set(f"left/{self._rank}", encode(_what_happened(error), "failure"))
            self._store.set("left", b"1")

    def part(self, exchange: Callable[..., Any], size: int) -> None:
        """Leave after the last exchange: rank 0 last, since its process may hold the store."""
        what, everyone = "closing of the world", tuple(range(size))
        if self._rank == 0:
            exchange(None, what, everyone, "end")
        else:
            self.come(None, what, everyone, "end", Exchange.VALUES)

    def close(self) -> None:
        self._store.close()

    def left(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return, by rank, the reasons of those ranks that have left."""
        if not self._store.check(["left"]):  # one question for all, which nearly always suffices
            return {}
        found = [rank for rank in ranks if self._store.check([f"left/{rank}"])]
        reasons = {rank: self._store.get(f"left/{rank}") for rank in found}
        return {r: str(decode(why, f"what rank {r} said at its end")) for r, why in reasons.items()}

    def without_store(self, error: StoreLost, peers: Peers, size: int) -> PeerLost:
        """Return the error to raise instead, which names the rank that took the store with it."""
        time.sleep(_END_IS_SEEN)
        dead = {rank: _DIED for rank in peers.dead()}
        reasons = dead or {rank: _STOPPED for rank in peers.stopped()}
        return self._lost_by(reasons, size) if reasons else error

    def lost(self, awaited: Iterable[int], dead: Iterable[int], size: int) -> PeerLost | None:
        """Return the error to raise if a rank that this rank waits for won't come."""
        reasons = {rank: _DIED for rank in dead}
        try:
            reasons |= self.left(awaited)
        except StoreLost:  # it went with one of these
            if not reasons:
                raise
        return self._lost_by(reasons, size) if reasons else None

    def _lost_by(self, reasons: dict[int, str], size: int) -> PeerLost:
        """Return the error that says, by rank, why each won't come."""
        causes = {rank: why for rank, why in reasons.items() if why != _LOST_A_PEER} or reasons
        by_reason: dict[str, list[int]] = {}
        for rank, why in sorted(causes.items()):
            by_reason.setdefault(why, []).append(rank)
        told = " and ".join(f"rank {_names(r)} of {size} {why}" for why, r in by_reason.items())
        return PeerLost(
            f"{told} while rank {self._rank} waited for it. This world is over: close it, and "
            "start all ranks again."
        )


def _packed(value: Any, what: str, kind: Exchange) -> bytes:
    data = encode(value, what, kind is Exchange.PICKLED)
    if len(data) > _LARGEST:
        raise ValueError(
            f"{what}: {len(data):,} bytes to exchange, and the store takes {_LARGEST:,}. Exchange "
            "small objects; put data on the heap and use world.peer or a kernel."
        )
    return data


class Peers:
    """The processes of the other ranks."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by pidfd
        self._pids: dict[int, int] = {}  # by rank
        self._poll = select.poll()

    def watch(self, rank: int, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd] = rank
        self._pids[rank] = pid
        self._poll.register(pidfd, select.POLLIN)

    def dead(self) -> list[int]:
        return sorted(self._ranks[pidfd] for pidfd, _ in self._poll.poll(0))

    def stopped(self) -> list[int]:
        """Return the ranks that got SIGSTOP or are held by a debugger."""
        return sorted(rank for rank, pid in self._pids.items() if _state(pid) in "Tt")

    def has_dead(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        for pidfd in self._ranks:
            self._poll.unregister(pidfd)
            os.close(pidfd)
        self._ranks.clear()


def _state(pid: int) -> str:
    """Return the letter of a process's state, after its name in brackets; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "X"


_DIED = "died"  # without a reason: it was killed, or crashed
_STOPPED = "was stopped (SIGSTOP, or a debugger)"
_LOST_A_PEER = "left because it lost another rank"  # a consequence, not a cause


def _what_happened(error: BaseException) -> str:
    if isinstance(error, PeerLost):
        return _LOST_A_PEER
    if isinstance(error, SystemExit):
        return "ended without closing its world"
    return f"raised {type(error).__name__} ({error})"


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class Locality:
    """What processes must share to reach each other by pid."""

    host: str
    boot_id: str  # empty if unknown
    pid_namespace: str

    def why_apart(self, other: Locality) -> str:
        """Return why the two can't reach each other; "" if they can."""
        same_host = self.host == other.host or (self.boot_id and other.boot_id)
        if self.boot_id != other.boot_id or not same_host:
            return (
                f"on different machines, {self.host} (boot id {self.boot_id or 'unknown'}) and "
                f"{other.host} (boot id {other.boot_id or 'unknown'})"
            )
        if self.pid_namespace != other.pid_namespace:
            return (
                f"in different pid namespaces, {self.pid_namespace} ({self.host}) and "
                f"{other.pid_namespace} ({other.host}): start them in one container, or give the "
                "containers one pid namespace"
            )
        return ""


def locality() -> Locality:
    """Return where this process runs."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    return Locality(platform.node(), boot_id, os.readlink("/proc/self/ns/pid"))


@dataclass(frozen=True)
class Facts:
    """What one rank tells the others about itself."""

    where: Locality
    pid: int
    gpu: str  # its name, the same in every process
    reaches: tuple[str, ...]  # GPUs that this one can access directly
    versions: tuple[tuple[str, str], ...]
    heap_size: int
    free: int  # bytes
    overlap: bool  # whether ranks may share a GPU

    def close(self) -> None:
        """Do nothing: a world that was not opened holds nothing."""


def gpu_facts(device: torch.device, heap_size: int) -> Facts:
    from .. import __version__

    own = device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    reached = [i for i in others if torch.cuda.can_device_access_peer(own, i)]
    torchs, tritons = str(torch.__version__), triton.__version__
    return Facts(
        locality(),
        os.getpid(),
        _name(own),
        tuple(_name(i) for i in reached),
        (("torch", torchs), ("triton", tritons), ("sundog", __version__)),
        heap_size,
        torch.cuda.mem_get_info(own)[0],
        os.environ.get(_OVERLAP) == "1",
    )


def _name(index: int) -> str:
    known = torch.cuda.get_device_properties(index)
    return f"{known.name} {getattr(known, 'uuid', index)}"


def check(everyone: Sequence[Facts]) -> None:
    """Raise RankMismatch with a line for every bad pair, and for every GPU without the memory."""
    bad = [
        line for pair in combinations(range(len(everyone)), 2) for line in _pair(*pair, everyone)
    ]
    bad += _memory(everyone)
    if bad:
        raise RankMismatch(
            f"these {len(everyone)} ranks can't share memory:\n" + "\n".join(f"  {b}" for b in bad)
        )


def _pair(a: int, b: int, everyone: Sequence[Facts]) -> list[str]:
    mine, theirs = everyone[a], everyone[b]
    pair = f"ranks {a} and {b}"
    bad = []
    apart = mine.where.why_apart(theirs.where)
    if apart:
        return [f"{pair}: {apart}"]
    for (name, version), (_, other) in zip(mine.versions, theirs.versions, strict=True):
        if version != other:
            bad.append(f"{pair}: {name} {version} and {other}")
    if mine.heap_size != theirs.heap_size:
        bad.append(f"{pair}: heap_size {mine.heap_size:,} and {theirs.heap_size:,}")
    if mine.gpu == theirs.gpu:
        if not (mine.overlap and theirs.overlap):
            bad.append(f"{pair}: both on {mine.gpu}; to allow it set {_OVERLAP}=1 (docs/gpu.md)")
    elif theirs.gpu not in mine.reaches or mine.gpu not in theirs.reaches:
        bad.append(f"{pair}: no peer access between {mine.gpu} and {theirs.gpu}")
    return bad


def _memory(everyone: Sequence[Facts]) -> list[str]:
    bad = []
    for gpu in dict.fromkeys(each.gpu for each in everyone):
        ranks = [rank for rank, each in enumerate(everyone) if each.gpu == gpu]
        needed = sum(everyone[rank].heap_size for rank in ranks)
        free = min(everyone[rank].free for rank in ranks)
        if needed > free:
            names = ", ".join(map(str, ranks))
            bad.append(
                f"{gpu}: the heaps of rank {names} take {needed:,} bytes, and {free:,} are free"
            )
    return bad
