"""Values between ranks that are processes: through torch's key-value store, with a timeout.

`shm` and `symm` share it. What a backend does while it waits is its own; here is what it waits for,
who is late, and who has died (noticed by a pidfd, so ranks are processes of one machine).
"""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import PeerLost
from .wire import pack, unpack

__all__ = ["Exchange", "Peers", "Pending", "died", "join", "open_store"]

_opened = itertools.count()  # worlds of this process: equal on all ranks, so it names their keys
_LARGEST = 8 << 20  # torch's TCPStore closes the connection on more


def join(timeout: float) -> tuple[int, int, Any]:
    """This process's rank, the number of ranks, and their store: of the default group, which is
    made with gloo if there is none."""
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


def open_store(store: Any) -> Any:
    """The part of the store that belongs to the next world. All ranks open worlds in one order."""
    return dist.PrefixStore(f"sundog/{next(_opened)}", store)


@dataclass(frozen=True)
class Pending:
    """One exchange that this rank has come to."""

    store: Any
    what: str
    ranks: tuple[int, ...]
    prefix: str

    def arrived(self) -> bool:
        return bool(self.store.check([f"{self.prefix}/{rank}" for rank in self.ranks]))

    def late(self) -> list[int]:
        return [r for r in self.ranks if not self.store.check([f"{self.prefix}/{r}"])]

    def values(self) -> list[Any]:
        return [unpack(self.store.get(f"{self.prefix}/{rank}")) for rank in self.ranks]

    def timed_out(self, rank: int, seconds: float) -> PeerLost:
        return PeerLost(
            f"rank {_names(self.late())} did not come within {seconds:g} s; rank {rank} waits for "
            f"the other ranks at a {self.what}. Do all ranks make the same calls? A longer timeout "
            "is SUNDOG_TIMEOUT or timeout=."
        )


class Exchange:
    """One rank's end of all exchanges of a world."""

    def __init__(self, rank: int, store: Any) -> None:
        self._rank = rank
        self._store = store
        self._count: dict[str, int] = {}

    def come(self, value: Any, what: str, ranks: tuple[int, ...], channel: str) -> Pending:
        """Bring this rank's value; the others' are there when `arrived` says so."""
        count = self._count[channel] = self._count.get(channel, -1) + 1
        self._store.set(f"{channel}/{count}/{self._rank}", _packed(value, what))
        if count > 1:
            # Whoever came to the previous exchange had read the values of the one before it.
            self._store.delete_key(f"{channel}/{count - 2}/{self._rank}")
        return Pending(self._store, what, ranks, f"{channel}/{count}")

    def fail(self, why: str) -> None:
        """Tell the others that this rank won't come any more, though its process may live on."""
        self._store.set("failed", f"rank {self._rank} failed: {why}".encode())

    def failure(self) -> str:
        """What a rank told by `fail`, if one did."""
        if not self._store.check(["failed"]):
            return ""
        return str(self._store.get("failed").decode())


def _packed(value: Any, what: str) -> bytes:
    data = pack(value)
    if len(data) > _LARGEST:
        raise ValueError(
            f"{what}: {len(data):,} bytes to exchange, and the store takes {_LARGEST:,}. Exchange "
            "small objects; put data on the heap and use world.peer or a kernel."
        )
    return data


class Peers:
    """The processes of the other ranks."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}

    def watch(self, rank: int, pid: int) -> None:
        self._pidfds[rank] = os.pidfd_open(pid)

    def dead(self) -> list[int]:
        poll = select.poll()
        ranks = {fd: rank for rank, fd in self._pidfds.items()}
        for fd in ranks:
            poll.register(fd, select.POLLIN)
        return sorted(ranks[fd] for fd, _ in poll.poll(0))

    def close(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()


def died(ranks: Iterable[int], rank: int, size: int) -> PeerLost:
    return PeerLost(
        f"rank {_names(ranks)} of {size} died while rank {rank} waited for it. This world is over: "
        "close it, and start all ranks again."
    )


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
