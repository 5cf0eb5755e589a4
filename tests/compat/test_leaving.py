"""Leaving the mode: nothing that was patched stays, also after an error."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import _SymmetricMemory

import sundog


def snapshot() -> dict[str, Any]:
    owners = {"cuda": torch.cuda, "dist": dist, "c10d": c10d, "symm_mem": symm_mem}
    owners["class"] = _SymmetricMemory
    found = {f"{n}.{k}": id(v) for n, owner in owners.items() for k, v in vars(owner).items()}
    found["environ"] = dict(os.environ)
    found["kernel"] = torch._C._dispatch_has_kernel_for_dispatch_key(
        "symm_mem::one_shot_all_reduce", "CPU"
    )
    found["pad"] = _SymmetricMemory.signal_pad_size
    return found


def test_nothing_stays_patched() -> None:
    before = snapshot()

    def main() -> tuple[int, int, str]:
        dist.init_process_group("nccl")
        _SymmetricMemory.signal_pad_size = 1 << 20
        assert snapshot()["cuda.synchronize"] != before["cuda.synchronize"]
        return dist.get_rank(), torch.cuda.current_device(), os.environ["RANK"]

    assert sundog.run(main, 3, "sim", torch=True) == [(r, r, str(r)) for r in range(3)]
    assert snapshot() == before


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_nothing_stays_patched_after_an_error(backend: str) -> None:
    before = snapshot()

    def main() -> None:
        dist.init_process_group("nccl")
        if dist.get_rank() == 1:
            raise RuntimeError("rank 1 fails")
        dist.barrier()

    with pytest.raises(RuntimeError, match="rank 1 fails"):
        sundog.run(main, 3, backend, torch=True)
    assert snapshot() == before


def test_outside_of_ranks_torch_is_itself() -> None:
    def main() -> bool:
        return torch.cuda.is_available()

    assert sundog.run(main, 2, "sim", torch=True) == [True, True]
    assert torch.cuda.is_available() is torch.backends.cuda.is_built()
    assert "LOCAL_RANK" not in os.environ
