"""The ranks of one process: how they meet, what each runs, and whose error it was.

`sim` and `virtual` share it.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import PeerLost, WaitTimeout
from ..machine.launcher import current_machine
from ..machine.machine import Machine
from ..machine.tasks import Host
from ..world.backend import Backend, Exchange
from ..world.heap import Heap
from ..world.waits import RAISED
from ..world.world import World
from ._codec import decode, encode

_LOOK_EVERY = 0.1  # seconds
_PATIENCE = 4  # looks: a host that is not blocked raises within milliseconds


def refuse_inside_a_rank() -> None:
    """Raise if a rank calls this, since a process has one machine, which runs one world's ranks."""
    if current_machine() is not None:
        raise ValueError(
            "sundog.run inside a rank: open the second world after the first has ended"
        )


class Meeting:
    """Where the members of a group exchange values; the last to arrive wakes the others."""

    def __init__(self, machine: Machine, ranks: tuple[int, ...]) -> None:
        self._machine = machine
        self._ranks = ranks
        self._values: dict[int, bytes] = {}
        self._waiting: list[Host] = []

    def exchange(self, value: Any, what: str, kind: Exchange = Exchange.VALUES) -> list[Any]:
        machine = self._machine
        # Each rank gets its own copy, as it would from another process.
        self._values[machine.host.rank] = encode(value, what, kind is Exchange.PICKLED)
        missing = [rank for rank in self._ranks if rank not in self._values]
        ranks = ", ".join(map(str, missing))
        waits_for = f"rank{'s' if len(missing) > 1 else ''} {ranks} at a {what}"
        if missing:
            for host in self._waiting:
                host.waits_for = waits_for
            self._waiting.append(machine.host)
            try:
                everyone = machine.block(waits_for)
            except WaitTimeout:  # it leaves; the others see it missing until it returns
                self._waiting.remove(machine.host)
                del self._values[machine.host.rank]
                raise
        else:
            everyone = [self._values[rank] for rank in self._ranks]
            waiting, self._waiting, self._values = self._waiting, [], {}
            if machine.checker is not None and kind is Exchange.BARRIER:
                hosts = [*waiting, machine.host]
                streams = [stream for h in hosts for stream in machine.streams.of(h.rank)]
                machine.checker.world_barrier(streams)
            for host in waiting:
                machine.wake(host, everyone)
        return [decode(each, "a value", kind is Exchange.PICKLED) for each in everyone]


def run_rank(fn: Callable[[World], Any], backend: Backend) -> Any:
    """Open the world of a rank, run `fn` in it, and end it.

    Its backward runs in the rank's own thread: autograd's one thread per GPU would serve all ranks,
    and the first rank that waits for another would stop them all.
    """
    torch.autograd.set_multithreading_enabled(False)
    heap = Heap(backend.segment(backend.rank).numel(), backend.guard)
    world = World(backend, tuple(range(backend.size)), "world", heap)
    try:
        world.barrier()
        result = fn(world)
        if not world._closed:
            world.synchronize()
        world._forget()
        return result
    finally:
        world._end("the world was closed")


@contextmanager
def print_unraised(records: list[tuple[int, tuple[int, ...], torch.Tensor]]) -> Iterator[None]:
    """Print, inside the block, an expired wait that no host has raised within a moment.

    A host may be inside CUDA, which loads a kernel of torch only when the GPU is idle. Then all
    hosts wait while a rank that is late on the GPU keeps it busy. An entry of `records` is a rank,
    the ranks of its world or group, and the words in which its waits leave their record.
    """
    ended = threading.Event()
    # Not by threading, whose threads may read results: `virtual` would serve this one too.
    _thread.start_new_thread(_print_unraised, (records, ended))
    try:
        yield
    finally:
        ended.set()


def _print_unraised(records: list, ended: threading.Event) -> None:
    seen: dict[int, int] = {}  # looks at which a record was there, by its place
    while not ended.wait(_LOOK_EVERY):
        for place, (rank, ranks, record) in enumerate(list(records)):
            written, program, _, expected, value, owing = record.tolist()
            seen[place] = seen.get(place, 0) + 1 if written not in (0, RAISED) else 0
            if seen[place] == _PATIENCE:
                peer = ranks[owing] if 0 <= owing < len(ranks) else owing
                print(
                    f"sundog: rank {rank}, program {program}: a wait for a signal to reach "
                    f"{expected} expired, and saw {value}; rank {peer} owes it. WaitTimeout is "
                    "raised when the hosts go on: one of them is busy, or CUDA makes it wait "
                    "until the GPU is idle.",
                    file=sys.stderr,
                    flush=True,
                )


def left_early(error: SystemExit, rank: int, size: int) -> BaseException:
    """Return the error to raise if a rank called sys.exit, which ends its world.

    An exit status of success would hide that the other ranks did not finish.
    """
    text = (
        f"rank {rank} of {size} called sys.exit({error.code!r}), which ended the other ranks too. "
        "To end one rank, return from its function."
    )
    if error.code in (None, 0):
        return PeerLost(text)
    print(f"sundog: {text}", file=sys.stderr)
    return error


def with_rank(error: BaseException, hosts: list[Host]) -> BaseException:
    """Note on the exception itself which rank raised it, so that it keeps its type."""
    rank = next((host.rank for host in hosts if host.error is error), None)
    if rank is not None and isinstance(error, SystemExit):
        error = left_early(error, rank, len(hosts))
    if rank is not None:
        note = f"sundog: raised on rank {rank} of {len(hosts)}"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and isinstance(error.args[0], str):  # Python 3.10
            error.args = (f"{error.args[0]} [{note}]", *error.args[1:])
    return error
