"""sgl-project/sglang: the all-gather by multimem stores (`triton_symm_mem_ag.py`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .case import Case, alone, start

PACKAGE = "python/sglang/srt/distributed/device_communicators/triton_symm_mem_ag.py"


def gather() -> None:
    module = alone(PACKAGE)
    rank, size, tokens, width = start(), dist.get_world_size(), 6, 32
    state = module.create_state(dist.group.WORLD, rank, tokens, width * size)
    given = [torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    gathered = [module.all_gather_inner(state, x, tp_hidden_dim=width * size) for x in given]
    for x, found in zip(given, gathered, strict=True):
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        torch.testing.assert_close(found, torch.cat(parts, -1), rtol=0, atol=0)


CASES = [Case("_all_gather_kernel_inner", PACKAGE, gather, world=2)]
