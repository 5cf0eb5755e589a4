"""`virtual` asks CUDA for more queues when it makes the context, and for nobody else."""

from __future__ import annotations

import os

import pytest
import torch

from sundog.backends import virtual

pytestmark = pytest.mark.sim_only
NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The variable, as CUDA reads it when it makes a context."""
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: found.append(os.environ[NAME]))
    virtual._make_context.cache_clear()
    return found


def test_started_processes_do_not_inherit_the_queues(
    seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    for _ in range(2):
        virtual._make_context(0)
    virtual._make_context(1)
    assert seen == ["32", "32"], "one context per GPU"
    assert NAME not in os.environ


def test_what_the_user_has_set_stays(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "16")
    virtual._make_context(0)
    assert seen == ["16"]
    assert os.environ[NAME] == "16"
