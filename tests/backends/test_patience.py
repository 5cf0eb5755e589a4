"""How long hosts wait for each other and for a GPU, without one: what asks it is replaced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sundog import target
from sundog.backends import _hosts, symm, virtual
from sundog.backends._rendezvous import Facts, locality
from sundog.backends._store import open_store
from sundog.errors import PeerLost, WaitRecord, WaitTimeout
from sundog.world.waits import RAISED

pytestmark = pytest.mark.sim_only
TIMEOUT = 0.3
POLLS = 1000.0  # a second
FACTS = Facts(locality(), 1, "A", (), (), 1 << 16, 1 << 20, False)


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 0 of two, after the opening of its world. Nobody is rank 1."""
    for name, value in {"current_device": 0, "current_stream": None, "Stream": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(target, "of", lambda device: SimpleNamespace(num_sms=4))
    monkeypatch.setattr(symm, "Gpu", lambda device: None)
    monkeypatch.setattr(symm, "polls_per_second", lambda index: POLLS)
    monkeypatch.setattr(symm, "check", lambda everyone: None)
    monkeypatch.setattr(symm, "Contexts", lambda heap: None)
    monkeypatch.setattr(symm, "peers_have_atomics", lambda index: True)
    handle = SimpleNamespace(buffer_ptrs=[0])
    monkeypatch.setattr(symm.symmetric, "empty", lambda *_, **__: torch.empty(8))
    monkeypatch.setattr(symm.symmetric, "rendezvous", lambda *_: handle)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="")))
    backend = symm.SymmBackend(0, 1, open_store(dist.HashStore(), 20), TIMEOUT)
    backend.attach(FACTS, ())
    backend.size = 2
    yield backend
    backend._installed.__exit__(None, None, None)  # to close needs a GPU


def test_a_rank_that_does_not_come_is_named_within_the_timeout(rank_0: Any) -> None:
    begin = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 did not arrive within 0\.3 s; rank 0 waits at a b"):
        rank_0.exchange(None, "barrier", (0, 1), "world")
    assert TIMEOUT <= time.monotonic() - begin < 30


def test_kernels_give_up_before_hosts_do(rank_0: Any) -> None:
    """Then a rank whose kernel waited in vain still comes to where the others wait."""
    assert rank_0.polls == POLLS * TIMEOUT / 2


class Stream:
    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


def test_virtual_raises_while_a_late_rank_keeps_the_gpu_busy() -> None:
    """The error came only with the end of that rank's kernels: its memory was to be freed first."""
    looks: list[bool] = []
    assert virtual.ends_soon(lambda: looks.append(True) or len(looks) > 2, seconds=60)
    assert not virtual.ends_soon(lambda: False, seconds=0.01)


def test_the_next_world_waits_for_what_a_late_rank_left(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[tuple[Any, Any]] = []
    heaps = [SimpleNamespace(record_stream=lambda s, n=n: marked.append((n, s))) for n in range(2)]
    error = WaitTimeout("rank 1 owes the signal", WaitRecord(0, 0, "flags", 1, 0, 1))
    shared: Any = SimpleNamespace(
        segments=heaps,
        flags=heaps,
        records=[(0, (0, 1), torch.zeros(6))],
        has_link=False,
        machine=SimpleNamespace(failure=error),
    )
    monkeypatch.setattr(virtual, "_unfinished", [])
    stream: Any = Stream()
    virtual.leave_running(shared, [stream])
    assert marked == [(0, stream), (1, stream)] * 2, "torch keeps their memory until then"
    assert virtual._unfinished[0][1][0] is shared.records[0][2], "the kernels write there"
    assert "a rank is late, and the GPU still runs what it launched" in error.__notes__[0]
    for _ in range(2):
        virtual._finish_earlier()
    assert stream.waited == 1
    assert virtual._unfinished == []


def test_an_expired_wait_is_printed_if_no_host_can_raise_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts stay inside CUDA until the late rank's work has ended."""
    monkeypatch.setattr(_hosts, "_LOOK_EVERY", 0.001)
    fine, raised, late = ([0] * 6, [RAISED, 3, 4096, 7, 6, 0], [1, 5, 4096, 9, 8, 1])
    records = [(n, (0, 3, 4), torch.tensor(words)) for n, words in enumerate((fine, raised, late))]
    printed = ""
    with _hosts.print_unraised(records):
        deadline = time.monotonic() + 30
        while "owes it" not in printed and time.monotonic() < deadline:
            printed += capfd.readouterr().err
    lines = printed.splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        "sundog: rank 2, program 5: a wait for a signal to reach 9 expired, and saw 8"
    ]
    assert "; rank 3 owes it. WaitTimeout is raised when the hosts go on" in lines[0]
