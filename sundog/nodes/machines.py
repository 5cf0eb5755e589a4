"""Which ranks are on one machine, and how they find each other.

Ranks are on one machine if they can reach each other by their pids (`Locality`); no environment
variable is read. Each machine has its own key-value store, a file without a name that its ranks
open through /proc, as they open heaps. So a machine's own exchanges do not cross the network, and
continue when another machine, with the job's store, has vanished.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..backends._groups import Members
from ..backends._rendezvous import Locality, StoreExchange
from ..backends._store import open_store
from ..world.backend import Exchange

_LONGEST_NAP = 0.02  # seconds


@dataclass(frozen=True)
class Machines:
    """Ranks by machine: machine n has ranks n * size to (n + 1) * size - 1."""

    names: tuple[str, ...]  # of the machines
    size: int  # ranks of each

    @property
    def count(self) -> int:
        return len(self.names)

    def node_of(self, rank: int) -> int:
        return rank // self.size

    def ranks_of(self, node: int) -> range:
        return range(node * self.size, (node + 1) * self.size)

    def counterparts(self, local_rank: int) -> range:
        """Return the ranks with this number on their machine."""
        return range(local_rank, self.count * self.size, self.size)


class Opening:
    """The first exchanges of a job's ranks, through the job's store."""

    def __init__(self, members: Members, timeout: float) -> None:
        store = open_store(members.store, timeout, f"{members.group}/machines")
        self._exchange = StoreExchange(members.rank, store)
        self._members, self._timeout = members, timeout

    def exchange(self, value: Any, what: str) -> list[Any]:
        """Return every rank's value, by rank. Raise PeerLost if one does not come in time."""
        ranks = tuple(range(self._members.size))
        pending = self._exchange.come(value, what, ranks, "machines", Exchange.VALUES)
        deadline, nap = time.monotonic() + self._timeout, 1e-4
        while not pending.arrived():
            if time.monotonic() > deadline:
                raise pending.timed_out(self._members.rank, self._timeout)
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return pending.values()

    def close(self) -> None:
        self._exchange.close()


def sorted_by_machine(everyone: Sequence[Locality]) -> Machines:
    """Find the machines. Raise ValueError if sizes differ, or ranks are not neighbours."""
    found: list[list[int]] = []
    for rank, each in enumerate(everyone):
        same = [m for m in found if not everyone[m[0]].why_apart(each)]
        if same:
            same[0].append(rank)
        else:
            found.append([rank])
    machines = Machines(tuple(everyone[m[0]].host for m in found), len(found[0]))
    if [list(machines.ranks_of(n)) for n in range(machines.count)] != found:
        lines = "\n".join(
            f"  machine {n} ({everyone[m[0]].host}): rank {', '.join(map(str, m))}"
            for n, m in enumerate(found)
        )
        raise ValueError(
            f"sundog.init: a world over several machines needs as many ranks on each, numbered "
            f"machine by machine, and these are not:\n{lines}\nStart them with torchrun --nnodes "
            f"{machines.count} --nproc-per-node N, or give a group of such ranks."
        )
    return machines


def local_store(first: tuple[int, int], mine: tuple[int, int]) -> tuple[Any, int]:
    """Open the store of this machine, a file of its first rank. Return also the file to close.

    Each of the two is a pid and a file descriptor of that process.
    """
    (pid, there), (own, fd) = first, mine
    if pid != own:
        os.close(fd)
        fd = os.open(f"/proc/{pid}/fd/{there}", os.O_RDWR)
    return dist.FileStore(f"/proc/self/fd/{fd}"), fd
