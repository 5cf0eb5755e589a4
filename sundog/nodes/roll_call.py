"""Find out which ranks are still there when a transfer between machines has failed.

A group of torch.distributed reports that a transfer failed, at best on which connection. It does
not name the rank that caused it, and a machine that vanished reports nothing at all. So every rank
answers on its own socket. A rank whose transfer failed asks all others at once:

    it answers its process lives; it also says what it knows of others
    the connection fails    its process has ended
    nobody answers          its machine has vanished, or the network to it

Then it informs those that answered, so that ranks that wait elsewhere give up too, and leaves. They
know why it left, and do not report its end as a loss. The socket only takes callers that know the
world's token, which was passed through the job's store.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ..errors import PeerLost
from ..machine.baton import RunnerThread
from .machines import Machines

_LARGEST = 1 << 20  # bytes of a message
_MOST_CALLS = 64  # at once
DIED = "died"
SILENT = "does not answer"

Losses = dict[int, str]  # by rank, what happened to it


class RollCall:
    """One rank's socket, and what it knows of ranks that were lost."""

    def __init__(self, rank: int, machines: Machines) -> None:
        self._rank, self._machines, self._token = rank, machines, ""
        self.doing = ""  # the call that this rank is in
        self._losses: Losses = {}
        self._left: set[int] = set()  # ranks that announced that they leave
        self._addresses: list[tuple[str, int]] = []
        self._server = socket.create_server(("", 0), backlog=_MOST_CALLS)
        self.port: int = self._server.getsockname()[1]
        self._thread = _thread(self._answer_all)

    def open(self, addresses: list[tuple[str, int]], token: str) -> None:
        """Let it ask and answer from now on, with all ranks' addresses and their token."""
        self._addresses, self._token = addresses, token

    @property
    def losses(self) -> Losses:
        return self._losses

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()

    # asking

    def call(self, limit: float) -> dict[int, str]:
        """Ask every rank. Return what those that answer are doing; the others now count as lost."""
        others = [r for r in range(len(self._addresses)) if r != self._rank]
        doing: dict[int, str] = {}
        for rank, (reply, failure) in zip(others, self._ask(others, limit), strict=True):
            if reply is None:
                if rank not in self._left:
                    self._losses.setdefault(rank, failure)
            else:
                doing[rank] = str(reply["doing"])
                self._merge(reply["losses"])
        return doing

    def tell(self, ranks: Iterable[int], limit: float) -> None:
        """Tell these ranks what this one knows, and that it leaves."""
        self._ask([rank for rank in ranks if rank != self._rank], limit, leaves=True)

    def leave(self, why: str, limit: float) -> None:
        """Tell all ranks that this one leaves, unless it leaves because of another's loss."""
        if not self._losses:
            self._losses[self._rank] = why
            self.tell(range(len(self._addresses)), limit)

    def _ask(self, ranks: list[int], limit: float, leaves: bool = False) -> list[tuple[Any, str]]:
        message = {"token": self._token, "losses": self._losses, "left": [self._rank] * leaves}
        found: dict[int, tuple[Any, str]] = {}

        def ask(rank: int) -> None:
            found[rank] = self._ask_one(rank, message, limit)

        for first in range(0, len(ranks), _MOST_CALLS):
            threads = [_thread(ask, rank) for rank in ranks[first : first + _MOST_CALLS]]
            for thread in threads:
                thread.join()
        return [found[rank] for rank in ranks]

    def _ask_one(self, rank: int, message: Any, limit: float) -> tuple[Any, str]:
        """Return its reply, or none and why."""
        try:
            with socket.create_connection(self._addresses[rank], limit) as link:
                link.settimeout(limit)
                _send(link, message)
                return _receive(link), ""
        except TimeoutError:
            return None, SILENT
        except (ConnectionError, EOFError):
            return None, DIED
        except OSError:  # no route
            return None, SILENT

    # answering, in a thread

    def _answer_all(self) -> None:
        while True:
            try:
                link, _ = self._server.accept()
            except OSError:
                return  # closed
            with link, suppress(OSError, ValueError, EOFError, TypeError, KeyError):
                link.settimeout(1.0)
                asked = _receive(link)
                if not self._token or asked["token"] != self._token:
                    continue
                self._merge(asked["losses"])  # before the reply, after which the other one ends
                self._left.update(map(int, asked["left"]))
                _send(link, {"doing": self.doing, "losses": self._losses})

    def _merge(self, losses: dict[str, str]) -> None:
        # In one step, since another thread may be reading.
        self._losses = {**{int(rank): str(why) for rank, why in losses.items()}, **self._losses}

    # messages

    def error(self, what: str) -> PeerLost:
        """Make the error that names all losses."""
        lost = {rank: why for rank, why in sorted(self._losses.items()) if rank != self._rank}
        told = _by_machine(lost, self._machines)
        return PeerLost(
            f"{told}; rank {self._rank} (machine {self._machines.node_of(self._rank)}) was in "
            f"{what}. This world is over: close it, and start all ranks again."
        )


def _thread(function: Callable[..., None], *args: Any) -> RunnerThread:
    """Start a thread of ours, since a user's would first wait for the kernels of a lost rank."""
    thread = RunnerThread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def _by_machine(losses: Losses, machines: Machines) -> str:
    """Write one clause for each machine and reason."""
    clauses = []
    for node in dict.fromkeys(machines.node_of(rank) for rank in losses):
        name = f"machine {node} ({machines.names[node]})"
        here = {rank: why for rank, why in losses.items() if machines.node_of(rank) == node}
        for why in dict.fromkeys(here.values()):
            ranks = [rank for rank in here if here[rank] == why]
            listed = ", ".join(map(str, ranks))
            if why == SILENT and len(ranks) == machines.size:
                clauses.append(f"{name} does not answer: it has rank {listed}")
            else:
                clauses.append(f"rank {listed} of {name} {why}")
    return " and ".join(clauses)


def _send(link: socket.socket, value: Any) -> None:
    link.sendall(json.dumps(value).encode() + b"\n")


def _receive(link: socket.socket) -> Any:
    """Read one line; raise EOFError if the other side closes before its end."""
    data = b""
    while not data.endswith(b"\n"):
        more = link.recv(65536)
        if not more or len(data) > _LARGEST:
            raise EOFError("the connection ended in the middle of a message")
        data += more
    return json.loads(data)


def own_address(store: Any) -> str:
    """Return the address by which this machine reaches the store, and others reach it."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host = getattr(store, "host", "") or socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((socket.gethostbyname(host), 9))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
