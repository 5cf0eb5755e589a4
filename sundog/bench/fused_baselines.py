"""What all-gather + GEMM is compared with: the same matrix product, with nothing to gather.

"our GEMM" is `fused/gemm.py` on the SMs of the rank, with the tiles that its rule gives;
"A gathered" has nothing to wait for: what is left is what the communication costs. Gather and
product one after the other are algorithms of the op: `barrier` with our GEMM, `torch` with cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..fused import gemm
from ..fused.call import fitting
from ..world import World

__all__ = ["gathered", "is_plain", "torch_gathered"]

Call = Callable[[], Any]


def is_plain(world: World, problem: Any) -> bool:
    """What torch.mm does: no bias, no activation, one type."""
    own_type = problem.out_dtype in (None, problem.dtype)
    return not problem.has_bias and problem.activation is None and own_type


def gathered(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Our GEMM with A gathered."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    sizes = problem.m, problem.m, problem.n, problem.k
    tiles = gemm.Tiles(**fitting(*sizes, problem.dtype, world.num_sms))
    return lambda: gemm.matmul(whole, b, out, None, None, tiles, world.num_sms)


def torch_gathered(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """cuBLAS with A gathered. It knows nothing of the ranks' shares of the SMs."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    return lambda: torch.mm(whole, b, out=out)


def _whole(world: World, problem: Any, a: torch.Tensor) -> torch.Tensor:
    parts = [world.peer(a, rank) for rank in range(world.size)]
    return torch.cat(parts, dim=1 if problem.shard == "k" else 0)
