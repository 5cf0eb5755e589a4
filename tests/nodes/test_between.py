"""Transfers by NCCL, which is not here: gloo sends, and works stand in for NCCL's.

Of such a work the host waits for nothing: `wait` orders streams, and says nothing about the end.
Machines are processes that count themselves as on different ones, so no namespace is needed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.jobs import job
from torch.utils._python_dispatch import TorchDispatchMode

from sundog.backends import load
from sundog.backends._groups import Members, members_of
from sundog.backends._rendezvous import Locality
from sundog.errors import PeerLost, RankMismatch
from sundog.nodes import hierarchical, spanning
from sundog.nodes.between import _SMALL, Between, backend_for
from sundog.nodes.machines import Machines
from sundog.nodes.pipeline import NodesConfig
from sundog.nodes.spanning import open_world

pytestmark = pytest.mark.sim_only
_TIMEOUT = 6.0


class _OnStream:
    """A work of gloo's that behaves as one of NCCL's."""

    def __init__(self, work: Any) -> None:
        self.is_completed = work.is_completed

    def wait(self) -> None:
        """Order streams: the host goes on."""


def _as_with_nccl(between: Between) -> Between:
    start = between._started
    between._started = lambda *a, **kw: _OnStream(start(*a, **kw))  # type: ignore[method-assign]
    between.is_ordered = True
    return between


def _open(rank: int) -> Any:
    """Open a world in which every rank is on a machine of its own."""
    where = Locality(f"machine{rank}", f"boot{rank}", "pids")
    members = members_of(None, None, None, _TIMEOUT)
    return open_world(members, load("shm"), 1 << 20, _TIMEOUT, where)


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_broadcast_leaves_the_callers_tensor_alone(is_ordered: bool) -> None:
    def send(rank: int) -> tuple[list[float], list[float]]:
        between = Between(dist.group.WORLD, torch.device("cpu"), 30, lambda: None, lambda: False)
        between.is_ordered = is_ordered
        x = torch.full((3,), 1.0 + rank)
        got = between.broadcast(x, 0).wait()
        return x.tolist(), got.tolist()

    assert job(send, 2) == [([1.0] * 3, [1.0] * 3), ([2.0] * 3, [1.0] * 3)]


def test_one_element_of_any_stride_is_sent() -> None:
    """It counts as contiguous, so nobody copies it; torch has no view of it as bytes."""

    def gather(rank: int) -> list[float]:
        with _open(rank) as world:
            x = torch.full((2,), float(rank), dtype=torch.bfloat16)[::2]
            world.broadcast(x, 0)
            return world.all_gather(x, config=NodesConfig()).tolist()

    assert job(gather, 2) == [[0, 1]] * 2


def test_a_leader_sends_for_its_machine() -> None:
    """Other ranks start no transfer; what comes has the same bits."""
    arguments: dict[str, tuple] = {
        "all_reduce": (), "reduce_scatter": (), "all_gather": (), "all_to_all": (),
        "broadcast": (3,),
    }  # fmt: skip

    def lead(rank: int) -> list[int]:
        where = Locality(f"machine{rank // 2}", f"boot{rank // 2}", "pids")
        members, started = members_of(None, None, None, _TIMEOUT), []
        with open_world(members, load("shm"), 1 << 20, _TIMEOUT, where) as world:
            start = world._levels.between._started

            def noted(*given: Any, **more: Any) -> Any:
                started[-1] += 1
                return start(*given, **more)

            torch.manual_seed(rank)
            x = torch.randn(4 * 33) * 10.0 ** (rank % 3)
            for name, more in arguments.items():
                call = partial(getattr(world, name), x, *more)
                shots = [call(config=NodesConfig(one_shot=one)) for one in (False, True)]
                shots.append(call(config=NodesConfig(led=True, one_shot=True)))
                call(config=NodesConfig(led=True))  # ranks agree on it
                started.append(0)
                world._levels.between._started = noted
                led = call(config=NodesConfig(led=True))
                world._levels.between._started = start
                assert all(torch.equal(led, other) for other in shots), name
        return started

    leader, other = [2, 1, 1, 1, 0], [0, 0, 0, 0, 1]  # a broadcast is led by the source's number
    assert job(lead, 4) == [leader, other] * 2


def test_a_barrier_finds_calls_that_differ() -> None:
    """Machines know both calls, and their transfers match: the results are wrong."""

    def reduce(rank: int) -> str:
        with _open(rank) as world:
            x = torch.arange(3.0) + rank
            for op in ("sum", "max"):
                assert torch.equal(world.all_reduce(x, op), world.all_reduce(x, op))
            world.barrier()
            world.all_reduce(x, "max" if rank else "sum")
            try:
                world.barrier()
            except RankMismatch as error:
                return str(error)
        return "nothing was raised"

    for text in job(reduce, 2):
        assert "made different calls before this barrier" in text
        assert "machine 0: all_reduce, 3, torch.float32, sum" in text
        assert "machine 1: all_reduce, 3, torch.float32, max" in text


def test_a_small_all_gather_sends_each_machine_one_message() -> None:
    """A ring of gloo's sends two in each step, and headers are most of what they are."""

    def gather(rank: int) -> list[str]:
        between = Between(dist.group.WORLD, torch.device("cpu"), 30, lambda: None, lambda: False)
        called, start = [], between._started

        def started(call: Any, *rest: Any, **kw: Any) -> Any:
            called.append(call.__name__)
            return start(call, *rest, **kw)

        between._started = started  # type: ignore[method-assign]
        for numel in (_SMALL // 2, _SMALL):
            x = torch.full((numel,), rank, dtype=torch.int8)
            x[0] = 7
            got = between.all_gather(x).wait()
            want = [torch.full((numel,), n, dtype=torch.int8) for n in range(3)]
            assert torch.equal(got[:, 1:], torch.stack(want)[:, 1:])
            assert got[:, 0].tolist() == [7] * 3
        between.all_gather(torch.ones(_SMALL, dtype=torch.int16)).wait()
        return called

    (called, *others) = job(gather, 3)
    assert others == [called] * 2
    assert called[:2] == ["all_to_all_single"] * 2
    assert called[2] != "all_to_all_single"


@pytest.mark.parametrize("call", ["barrier", "synchronize", "exchange"])
def test_the_host_waits_for_transfers_on_streams(call: str) -> None:
    """Rank 1 comes late; rank 0 must not go on before."""
    has_come = multiprocessing.get_context("fork").Event()

    def meet(rank: int) -> Any:
        with _open(rank) as world:
            between = _as_with_nccl(world._levels.between)
            if rank == 1:
                time.sleep(0.5)
                has_come.set()
            if call == "synchronize":
                between.all_gather(torch.ones(3))
                world.synchronize()
            found = world.exchange(rank) if call == "exchange" else None
            if call == "barrier":
                world.barrier()
            return has_come.is_set(), found

    assert job(meet, 2) == [(True, [0, 1] if call == "exchange" else None)] * 2


@pytest.mark.parametrize("call", ["barrier", "synchronize"])
def test_a_transfer_on_a_stream_that_never_ends_is_named(call: str) -> None:
    done = multiprocessing.get_context("fork").Event()

    def send(rank: int) -> str:
        with _open(rank) as world:
            between = _as_with_nccl(world._levels.between)
            if rank == 1:  # is there, and does not take part
                assert done.wait(4 * _TIMEOUT)
                return ""
            between.all_gather(torch.ones(3))
            # Of a GPU: these wait for the stream, so for ever.
            world.local.barrier = world.local.synchronize = lambda: pytest.fail("never returns")
            begin = time.monotonic()
            try:
                getattr(world, call)()
            except PeerLost as error:
                assert time.monotonic() - begin < _TIMEOUT
                return str(error)
            finally:
                done.set()
        return "nothing was raised"

    def caught(rank: int) -> str:
        try:
            return send(rank)
        except PeerLost:  # at the end: rank 0 has left
            return ""

    text, _ = job(caught, 2)
    assert f"did not end within {_TIMEOUT / 2:g} s" in text
    assert "rank 1 is in no call" in text


class _Indexing(TorchDispatchMode):
    """Notes where a list of numbers is an index: a GPU fetches it from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_algorithm_indexes_by_numbers_of_the_host() -> None:
    """A graph holds no copy from the host's own memory, so a capture by NCCL would fail."""
    algorithms: dict[str, tuple[Callable[..., None], tuple, int]] = {
        "all_reduce": (hierarchical.all_reduce, ("sum",), 12),
        "all_reduce chain": (hierarchical.all_reduce_chain, ("sum",), 12),
        "reduce_scatter": (hierarchical.reduce_scatter, ("sum",), 4),
        "reduce_scatter chain": (hierarchical.reduce_scatter_chain, ("sum",), 4),
        "all_gather": (hierarchical.all_gather, (), 36),
        "broadcast": (hierarchical.broadcast, (1,), 12),
        "all_to_all": (hierarchical.all_to_all, (), 12),
    }

    def look(rank: int) -> list[str]:
        found = []
        with _open(rank) as world:
            for led, name in itertools.product((False, True), algorithms):
                algorithm, arguments, numel = algorithms[name]
                out, config = torch.empty(numel), NodesConfig(chunk_bytes=32, led=led)
                with _Indexing() as seen:
                    algorithm(world._levels, torch.arange(12.0), *arguments, out, config)
                found += [f"{name}: {each}" for each in seen.found]
        return found

    assert job(look, 3) == [[]] * 3


def test_a_group_without_a_name_is_known_by_its_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(rank: int) -> tuple[str, str]:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return dist.get_backend(), backend_for(dist.group.WORLD, torch.device("cpu"))

    assert job(made, 1, backend=None) == [("undefined", "gloo")]
    gpu = torch.device("cuda", 0)
    for config, expected in {
        "cpu:gloo,cuda:nccl": "nccl",  # what torch says where there is a GPU
        "cpu:gloo,cuda:gloo": "gloo",
        "cpu:gloo": "none",
    }.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda group, said=config: said)
        assert backend_for(None, gpu) == expected


@pytest.mark.parametrize(
    ("device", "config", "joined"),
    [
        ("cuda", "cpu:gloo,cuda:nccl", "nccl"),
        ("cpu", "cpu:gloo,cuda:nccl", "gloo"),
        ("cuda", "cpu:gloo,cuda:gloo", "gloo"),
        ("cuda", "cuda:nccl", "nccl"),
    ],
)
def test_nccl_joins_machines_where_the_job_has_it(
    monkeypatch: pytest.MonkeyPatch, device: str, config: str, joined: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5, 6, 7])
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: asked.append((ranks, how)))
    local: Any = SimpleNamespace(device=torch.device(device), rank=1)
    spanning._joined(Members(1, 4, None, ""), Machines(("a", "b"), 2), local, 30)
    ((ranks, how),) = asked
    assert (ranks, how["backend"]) == ([5, 7], joined)
