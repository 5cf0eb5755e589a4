"""What fused ops are compared with: the same matrix product before or behind a collective.

"our GEMM" is `fused/_gemm.py` on the SMs of the rank, with the tiles that its rule gives;
"A gathered" has nothing to wait for: what is left is what the communication costs.

Where ranks share a GPU, cuBLAS takes SMs that are not its rank's. With torch.mm of 256 rows, then
our reduce-scatter, 8 ranks on an H200 hung: seven waited in the collective, on 112 of 132 SMs, for
the eighth, whose product found no place. So a barrier of one warp per rank stands behind each
torch.mm: nobody waits with more than that before all products are done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...collectives.device_barrier import device_barrier
from ...fused import _gemm, _matmul_reduce, all_gather_matmul_barrier
from ...fused._call import fitting
from ...world.world import World

__all__ = ["gather_then_torch", "gathered", "is_plain", "torch_gathered", "torch_then"]

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
    tiles = _gemm.Tiles(**fitting(*sizes, problem.dtype, world.num_sms))
    return lambda: _gemm.matmul(whole, b, out, None, None, tiles, world.num_sms)


def torch_gathered(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """cuBLAS with A gathered. It knows nothing of the ranks' shares of the SMs."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    return lambda: torch.mm(whole, b, out=out)


def gather_then_torch(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Our all-gather, then cuBLAS."""
    a, b = inputs
    gather = all_gather_matmul_barrier.gather(world, problem, world.num_sms)

    def launch() -> None:
        gather.launch(a)
        torch.mm(gather.whole, b, out=out)
        device_barrier(world)  # before the next gather: see above

    return launch


def torch_then(op: str) -> Callable[..., Call]:
    """cuBLAS, then our collective."""

    def make(
        world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> Call:
        a, b = inputs
        partial = world.empty((problem.m, problem.n), problem.dtype, "partial")
        slices = problem.size if op == "reduce_scatter" else 1
        numel = problem.m * problem.n // slices
        then = _matmul_reduce.collective(world, op, numel, problem.dtype)

        def launch() -> None:
            torch.mm(a, b, out=partial)
            device_barrier(world)  # before the collective: see above
            then.launch(partial.view(-1), out.view(-1))

        return launch

    return make


def _whole(world: World, problem: Any, a: torch.Tensor) -> torch.Tensor:
    parts = [world.peer(a, rank) for rank in range(world.size)]
    return torch.cat(parts, dim=1 if problem.shard == "k" else 0)
