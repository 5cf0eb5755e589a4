"""A world over several machines: `sundog.init()` returns one if the ranks are on more than one.

    world.node, world.num_nodes     this rank's machine, and how many there are
    world.local, world.local_rank   the world of this machine's ranks, with kernels and a heap
    world.between                   the group of the ranks with this number on all machines

Symmetric tensors are symmetric within a machine, where kernels and world.peer reach the peers.
Collectives span all ranks (span_calls.py). A lost rank or machine is named on all others.
"""

from __future__ import annotations

import functools
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from .. import knobs
from ..backends import Module
from ..backends._codec import decode, encode
from ..backends._groups import Members
from ..backends._rendezvous import KERNELS_WAIT, Locality
from ..errors import PeerLost, RankMismatch, SundogError, WaitTimeout, by_rank
from ..ops.load import functions
from ..ops.op import checked_rank
from ..torch import names
from ..torch.calls import routed
from ..world.capture import Graph
from ..world.world import World
from . import span_calls
from .between import Between, NetworkFailure, backend_for
from .machines import Machines, Opening, local_store, sorted_by_machine
from .pipeline import Levels
from .roll_call import RollCall, own_address

_ASKING = 0.1  # of the timeout: how long a rank may take to answer
# What belongs to one machine, and is done by its world.
_LOCAL = (
    "as_symmetric", "empty", "empty_like", "free", "free_plans", "full", "is_capturing",
    "is_symmetric", "max_plans", "num_sms", "offset_of", "passive", "randn", "rank_stride",
    "record_event", "scope", "signals", "stream", "stream_number", "wait_event", "zeros",
    "zeros_like",
)  # fmt: skip


def _named(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method, whose checks and allocations may also show a loss on this machine."""

    @functools.wraps(op)
    def method(world: SpanningWorld, *args: Any, **kwargs: Any) -> Any:
        with world._naming(op.__name__):
            return op(world, *args, **kwargs)

    return method


class SpanningWorld:
    """All ranks, seen from one of them."""

    # What ops of torch with backward formulas call (sundog/torch/library.py).
    SPANNING: ClassVar = {
        name: _named(getattr(span_calls, name))
        for name in (
            "all_gather", "all_gather_matmul", "all_reduce", "all_to_all", "broadcast",
            "matmul_all_reduce", "matmul_reduce_scatter", "reduce", "reduce_scatter",
        )
    }  # fmt: skip

    def __init__(
        self, local: World, machines: Machines, node: int, group: Any, roll_call: RollCall,
        timeout: float, store_file: int,
    ) -> None:  # fmt: skip
        self.local, self.machines, self.node = local, machines, node
        self.local_rank, self.num_nodes = local.rank, machines.count
        self.rank = node * machines.size + local.rank
        self.size = machines.count * machines.size
        self.device, self.backend = local.device, local.backend
        self.between = group
        self._roll_call, self._timeout, self._store_file = roll_call, timeout, store_file
        limit = timeout * KERNELS_WAIT
        link = Between(
            group, local.device, limit, local.synchronize, lambda: bool(roll_call.losses)
        )
        self._levels = Levels(local, link)
        self._agreed: dict[Any, str] = {}  # calls that all ranks made alike, and their texts
        self._last_call, self._calls = "none", 0  # the second: a checksum of all calls so far
        self._lost: PeerLost | None = None
        self.name = names.name_for(self, "machines")  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return (
            f"SpanningWorld(rank={self.rank}, size={self.size}, node={self.node}, "
            f"local_rank={self.local_rank}, backend={self.backend!r}, "
            f"between={self._levels.between.backend!r})"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _LOCAL:
            return getattr(self.local, name)
        if name in functions():
            raise SundogError(
                f"world.{name} does not span machines yet. Inside this machine: world.local.{name}"
                f"; between ranks of one number: torch.distributed with group=world.between."
            )
        raise AttributeError(f"a world over {self.num_nodes} machines has no {name!r}")

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """View the copy of a rank of this machine."""
        rank = self._check_rank(rank)
        if self.machines.node_of(rank) != self.node:
            raise ValueError(
                f"world.peer: rank {rank} is on machine {self.machines.node_of(rank)} and rank "
                f"{self.rank} on machine {self.node}: memory is shared inside a machine only. Use "
                "a collective."
            )
        return self.local.peer(tensor, rank - self.node * self.machines.size)

    def capture(self) -> AbstractContextManager[Graph]:
        """Capture as World.capture does. An op that spans machines needs NCCL between them."""
        return self.local.capture()

    # ranks together

    def synchronize(self) -> None:
        """Wait for what this rank launched, and for its transfers between machines."""
        self._refuse_in_capture("world.synchronize")
        with self._naming("world.synchronize"):
            self._levels.between.wait_for_all()
            self.local.synchronize()

    def barrier(self) -> None:
        """Wait on the host for what this rank launched, then for all ranks of all machines."""
        self._refuse_in_capture("world.barrier")
        between = self._levels.between
        with self._naming("a barrier"):
            between.wait_for_all()
            self.local.barrier()
            # My counterparts send this after their machines' barriers, so all ranks have come.
            mine = torch.tensor([self._calls], device=self.device)
            calls = between.all_gather(mine).wait_on_host()
            if (calls != self._calls).any():
                self._tell_calls_apart()

    def _tell_calls_apart(self) -> NoReturn:
        """Raise for calls that met others on another machine, and matched in their bytes."""
        last = [data.decode() for data in self._gathered(self._last_call.encode())]
        self._calls = 0  # on all of these ranks, so that it is reported once
        lines = "\n".join(f"  machine {node}: {call}" for node, call in enumerate(last))
        raise RankMismatch(
            f"ranks {self.local_rank} of the machines made different calls before this barrier, so "
            f"results may be wrong. Their last ones:\n{lines}\nMake the same calls, in the same "
            "order, on every rank."
        )

    def exchange(self, value: Any, what: str = "exchange", *, pickle: bool = False) -> list[Any]:
        """Return every rank's value, by rank. A collective on the host; see World.exchange."""
        self._refuse_in_capture(f"world.exchange ({what})")
        may_pickle = bool(pickle or knobs.allow_pickle.get())
        with self._naming(f"an exchange ({what})"):
            data = encode(value, what, may_pickle)
            parts = self._gathered(data)
            everyone = self.local.exchange(parts, what)
        by_node = [bytes(of_rank[node]) for node in range(self.num_nodes) for of_rank in everyone]
        return [
            decode(each, f"the value of rank {rank} at a {what}", may_pickle)
            for rank, each in enumerate(by_node)
        ]

    def _gathered(self, data: bytes) -> list[bytes]:
        """Return every counterpart's bytes, by machine."""
        between = self._levels.between
        length = torch.tensor([len(data)], device=self.device)
        lengths = [int(n) for n in between.all_gather(length).wait_on_host().view(-1).tolist()]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = between.all_gather(mine.to(self.device)).wait_on_host().cpu()
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]

    def broadcast_object(self, value: Any, src: int = 0, *, pickle: bool = False) -> Any:
        """Return rank `src`'s value, on every rank."""
        src = self._check_rank(src)
        mine = value if self.rank == src else None
        return self.exchange(mine, "broadcast_object", pickle=pickle)[src]

    def _agree(self, call: tuple) -> None:
        """Compare, once, what ranks ask for: machines that differ would wait for each other.

        Known calls in another order may match in their bytes, which the next barrier finds out.
        """
        if call not in self._agreed:
            mine = ", ".join(map(str, call))
            everyone = self.exchange(mine, f"plan of {call[0]}")
            if len(set(everyone)) > 1:
                told = by_rank(everyone)
                raise RankMismatch(f"{call[0]}: ranks passed different arguments:\n{told}")
            self._agreed[call] = mine
        self._last_call = self._agreed[call]
        self._calls = zlib.crc32(self._last_call.encode(), self._calls)

    # the end

    def close(self) -> None:
        """Wait for all ranks, then free everything. Closing twice is fine."""
        if self._closed:
            return
        if self._lost is not None:  # it was raised, and this machine's ranks have left too
            self.__exit__(type(self._lost), self._lost, None)
            return
        try:
            self.barrier()  # no rank leaves while a transfer may still need it
        except SundogError as error:
            self.__exit__(type(error), error, None)
            raise
        self._close()

    def _close(self, close_local: Callable[[], None] | None = None) -> None:
        names.forget(self)  # type: ignore[arg-type]
        self._roll_call.close()
        try:
            (close_local or self.local.close)()
        finally:
            os.close(self._store_file)

    @property
    def _closed(self) -> str:
        return self.local._closed

    def _failure(self) -> SundogError | None:
        return self.local._failure()

    @property
    def _backend(self) -> SpanningWorld:
        """What `launch` reports at the end of this process."""
        return self

    def fail(self, error: BaseException) -> None:
        """Leave with an error, so that no rank waits for this one."""
        is_exit = isinstance(error, SystemExit)
        why = "ended without closing its world" if is_exit else f"raised {type(error).__name__}"
        self._roll_call.leave(why if is_exit else f"{why} ({error})", self._timeout * _ASKING)
        self.local._backend.fail(error)

    def __enter__(self) -> SpanningWorld:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self.fail(error)
            self._close(lambda: self.local.__exit__(kind, error, trace))

    # what can go wrong

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Turn an error that a lost rank caused into one that names that rank."""
        if self._lost is not None:
            raise self._lost
        self._roll_call.doing = what
        try:
            if self._roll_call.losses:
                raise NetworkFailure("another rank was lost")
            yield
        except (PeerLost, WaitTimeout, NetworkFailure) as error:
            if error is self._lost:  # named by a call inside this one
                raise
            raise self._named(error, what) from error
        finally:
            self._roll_call.doing = ""

    def _named(self, error: SundogError, what: str) -> SundogError:
        """Ask all ranks, inform them, and name the lost ones. An expired wait need not have one."""
        calls, limit = self._roll_call, self._timeout * _ASKING
        doing = calls.call(limit)
        if not calls.losses and isinstance(error, WaitTimeout):
            return error
        if calls.losses:
            self._lost = calls.error(what)
        else:
            self._lost = PeerLost(self._nobody_lost(error, what, doing))
            calls.leave(f"left {what}: {error}", limit)
        calls.tell(doing, limit)
        self.local._backend.fail(self._lost)
        return self._lost

    def _nobody_lost(self, error: SundogError, what: str, doing: dict[int, str]) -> str:
        elsewhere = {rank: each for rank, each in doing.items() if each != what}
        shown = "; ".join(f"rank {r} is in {c or 'no call'}" for r, c in elsewhere.items())
        return (
            f"rank {self.rank} (machine {self.node}, {self.machines.names[self.node]}) was in "
            f"{what}: {error}. All ranks answer"
            + (f", but {shown}: make the same calls on every rank." if shown else " and are there "
               "too: the network is slow, or closed a connection.")
            + " This world is over: close it, and start all ranks again."
        )  # fmt: skip

    def _refuse_in_capture(self, call: str, may_order: bool = False) -> None:
        graph, between = self.local._backend.graph, self._levels.between
        if graph is None or (may_order and between.is_ordered):
            return
        if may_order:
            raise graph.refuse(
                call,
                f"transfer between machines by {between.backend}",
                f"{between.backend} moves data on the host, and a graph holds what a device does. "
                "With NCCL between machines it can be captured; or capture world.local's ops.",
            )
        raise graph.refuse(call, "collective on the host", "Do it before the capture.")

    def _check_open(self) -> None:
        self.local._check_open()

    def _check_rank(self, rank: Any) -> int:
        return checked_rank(rank, self.size)


for _name, _function in SpanningWorld.SPANNING.items():
    setattr(SpanningWorld, _name, routed(_name, _function))


# opening


def open_world(
    members: Members, module: Module, heap_size: int, timeout: float, where: Locality | None = None
) -> Any:
    """Open the world of these members: one of this machine, or one that spans several.

    `where` names the machine that this process counts as, instead of its own.
    """
    rank, size, store, group = members
    with closing(Opening(members, timeout)) as opening:
        machines, everyone = _told(opening, module.facts(rank, heap_size), where)
        if machines.count > 1:
            roll_call, store, file = _called(opening, members, machines)
    if machines.count == 1:
        return module.open_world(rank, size, store, heap_size, timeout, group, everyone)
    node, local_rank = divmod(rank, machines.size)
    name, here = f"{group}@{node}", [everyone[each] for each in machines.ranks_of(node)]
    local = module.open_world(local_rank, machines.size, store, heap_size, timeout, name, here)
    between = _joined(members, machines, local, timeout)
    return SpanningWorld(local, machines, node, between, roll_call, timeout, file)


def _told(opening: Opening, mine: Any, where: Locality | None) -> tuple[Machines, list[Any]]:
    """Exchange facts. Return the machines, and all ranks' facts by rank."""
    try:
        told = opening.exchange((where or mine.where, mine), "opening of the world")
        return sorted_by_machine([place for place, _ in told]), [facts for _, facts in told]
    except BaseException:
        mine.close()
        raise


def _called(opening: Opening, members: Members, machines: Machines) -> tuple[RollCall, Any, int]:
    """Open this rank's socket and this machine's store, and learn where the others' sockets are."""
    roll_call = RollCall(members.rank, machines)
    address = own_address(members.store), roll_call.port
    token = secrets.token_hex(16) if members.rank == 0 else ""
    file = os.getpid(), os.memfd_create("sundog-machine")
    everyone = opening.exchange((address, token, file), "addresses")
    addresses = [(str(host), int(port)) for (host, port), _, _ in everyone]
    roll_call.open(addresses, str(everyone[0][1]))
    first = machines.ranks_of(machines.node_of(members.rank))[0]
    return roll_call, *local_store(everyone[first][2], file)


def _joined(members: Members, machines: Machines, local: World, timeout: float) -> Any:
    """Make the group of this rank's counterparts."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    whole = resolve(members.group) if members.group else dist.group.WORLD
    ranks = dist.get_process_group_ranks(whole)
    return dist.new_group(
        [ranks[each] for each in machines.counterparts(local.rank)],
        timeout=timedelta(seconds=timeout),
        backend="nccl" if backend_for(whole, local.device) == "nccl" else "gloo",
        use_local_synchronization=True,
    )
