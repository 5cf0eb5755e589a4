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
from sundog.backends import symm, virtual
from sundog.backends._rendezvous import Facts, locality
from sundog.backends._store import open_store
from sundog.errors import PeerLost, WaitRecord, WaitTimeout

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
    monkeypatch.setattr(symm, "facts", lambda device, heap_size: FACTS)
    monkeypatch.setattr(symm, "check", lambda everyone: None)
    monkeypatch.setattr(symm, "Contexts", lambda heap: None)
    handle = SimpleNamespace(buffer_ptrs=[0])
    monkeypatch.setattr(symm.symmetric, "empty", lambda *_, **__: torch.empty(8))
    monkeypatch.setattr(symm.symmetric, "rendezvous", lambda *_: handle)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name="")))
    backend = symm.SymmBackend(0, 1, open_store(dist.HashStore(), 20), TIMEOUT)
    backend.attach(1 << 16)
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


def test_on_virtual_an_error_is_told_while_the_gpu_is_busy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank was late on the GPU by 5 s, and the error came with its kernels' end."""
    error = WaitTimeout("rank 1 owes the signal", WaitRecord(0, 0, "flags", 1, 0, 1))
    looks: list[bool] = []
    virtual.tell_if_busy(error, lambda: looks.append(True) or len(looks) > 2, seconds=60)
    assert capsys.readouterr().err == "", "the GPU was idle soon"
    virtual.tell_if_busy(error, lambda: False, seconds=0.01)
    told = capsys.readouterr().err
    assert "WaitTimeout: rank 1 owes the signal" in told
    assert "when the GPU has finished" in told
