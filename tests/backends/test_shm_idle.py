"""How long a rank of `shm` has been idle: from when its programs last went on, not from earlier."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from sundog.backends._store import open_store
from sundog.backends.shm import ShmBackend, facts

pytestmark = pytest.mark.sim_only  # about this backend, so once is enough


@pytest.mark.parametrize("has_run", [True, False], ids=["programs ran", "nothing happened"])
def test_a_wait_expires_only_if_nothing_ran_since(
    has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that found its flag by polling is progress, though no look outside saw it."""
    store = open_store(dist.HashStore(), 20)
    backend = ShmBackend(0, 1, store, facts(0, 1 << 16), timeout=2.0)
    given_up: list[bool] = []
    machine = SimpleNamespace(
        watch=[object()],
        had_last_turn=not has_run,
        ready=[],
        failure=None,
        host_wrote=lambda: None,
        let_go_on=lambda: False,
    )
    monkeypatch.setattr(backend, "machine", machine)
    monkeypatch.setattr(backend, "_give_up", lambda: given_up.append(True))
    backend._idle_since = time.monotonic() - 10  # of an earlier wait
    backend._look()
    assert bool(given_up) is not has_run
    backend._close_fd()
