"""torch.distributed's own answers: a process per rank with a gloo group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from sundog.backends import _processes

__all__ = ["gloo"]


class _Group:
    """What `processes.run` opens for a rank; `fn` gets it and calls torch.distributed."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)

    def close(self) -> None:
        dist.destroy_process_group()


def gloo(fn: Callable[[Any], Any], size: int) -> list[Any]:
    """`fn` on every rank of a gloo group; the results by rank."""
    if dist.is_initialized():
        pytest.skip("this process is a rank already, and gloo's answers come from forks of it")
    return _processes.run(fn, size, _Group)  # type: ignore[arg-type]
