"""All-gather + GEMM: activation(A @ B + bias), where A is sharded over the ranks and B is local.

Along K (shard="k"): rank r has columns [r*K/W, (r+1)*K/W) of A, and every rank gets A @ B of its
own B. Along M (shard="m"), a tensor-parallel linear layer: rank r has rows [r*M/W, (r+1)*M/W).

    barrier       gather all of A, then multiply
    hbm_buffer    one kernel: some programs fetch the peers' tiles, the others multiply them as
                  they arrive
    direct        multiply the peers' tiles in place: for ranks that share a GPU
    copy_engine   the copy engine fetches the peers' rows, all programs multiply them as they arrive

docs/fused.md lists what else was tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..ops.dispatch import CallOptions
from ..ops.op import Cost
from . import _gemm
from ._call import by_rows, call_matrices, check_matrices, check_shard, check_tensors

if TYPE_CHECKING:
    from ..world.world import World

OP = "all_gather_matmul"


@dataclass(frozen=True)
class Problem:
    m: int  # of the whole A
    n: int
    k: int  # of the whole A
    dtype: torch.dtype
    size: int  # ranks
    shard: str = "k"  # or "m"
    has_bias: bool = False
    activation: str | None = None
    out_dtype: torch.dtype | None = None  # None: as the input

    @property
    def shard_shape(self) -> tuple[int, int]:
        """Return the shape of a rank's part of A."""
        if self.shard == "k":
            return self.m, self.k // self.size
        return self.m // self.size, self.k


def unsplit(problem: Problem) -> str | None:
    """Return why A can't be sharded so, or None."""
    if problem.shard not in ("k", "m"):
        return f"shard {problem.shard!r}: expected 'k' or 'm'"
    length = problem.k if problem.shard == "k" else problem.m
    if length % problem.size:
        return f"{problem.shard} {length} does not divide by {problem.size} ranks"
    return None


def unfit(problem: Problem) -> str | None:
    """Return why no config takes it, or None."""
    return unsplit(problem) or _gemm.unfit(problem)


def cost(problem: Problem) -> Cost:
    item, out = problem.dtype.itemsize, (problem.out_dtype or problem.dtype).itemsize
    m, n, k = problem.m, problem.n, problem.k
    remote = m * k * item * (problem.size - 1) // problem.size
    return Cost(2 * m * n * k, (m * k + k * n) * item, m * n * out, remote)


def cases(size: int) -> list[Problem]:
    """Return small problems: aligned or not, sharded both ways, with two rows of tiles."""
    return [
        Problem(72, 16, 128 * size, torch.float16, size, "k"),
        Problem(17 * size, 10, 70, torch.bfloat16, size, "m", has_bias=True),
    ]


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Make a rank's A, B and bias. `exact` takes whole numbers that add up without rounding.

    A, which peers read, is on the heap.
    """
    torch.manual_seed(seed * 1000 + world.rank)
    a = world.empty(problem.shard_shape, problem.dtype, "a")
    b = torch.empty((problem.k, problem.n), dtype=problem.dtype, device=world.device)
    given = [a, b]
    if problem.has_bias:
        given.append(torch.empty(problem.n, dtype=problem.dtype, device=world.device))
    return tuple(tensor.random_(-2, 3) if exact else tensor.normal_() for tensor in given)


def reference(
    problem: Problem, rank: int, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the answer on a rank, from all ranks' inputs, in float64."""
    whole = torch.cat(a, dim=1 if problem.shard == "k" else 0).double()
    exact = whole @ b[rank].double()
    if bias is not None:
        exact = exact + bias[rank].double()
    if problem.activation == "silu":
        exact = torch.nn.functional.silu(exact)
    return exact.to(problem.out_dtype or problem.dtype)


def all_gather_matmul(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None, shard: str = "k",
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return activation(A @ b + bias) on every rank, where `a` is this rank's part of A.

    `a` is [..., k] and the result [..., n]; both are taken as rows, by views. Strides are free:
    pass a linear layer's weight as `weight.T`. `bias` has an element per column, and `activation`
    is None or "silu". An `a` that is not symmetric is copied to the heap. Without `out` the result
    is an ordinary tensor. float32 is multiplied without tf32.
    """
    if isinstance(a, torch.Tensor) and a.dim() > 2:

        def run(rows: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
            more: Any = {"algo": algo, "config": config, "explain": explain}
            return all_gather_matmul(
                world, rows, b, bias, activation, out_dtype, shard, room, **more
            )

        return by_rows(world, OP, a, out, explain, run, world.size if shard == "m" else 1)
    check_tensors(world, OP, a=a, b=b, bias=bias, out=out)
    check_shard(OP, shard)
    if a.dim() != 2:
        raise ValueError(f"{OP}: a of shape {tuple(a.shape)}: expected two dimensions")
    m, k = a.shape
    m, k = (m, k * world.size) if shard == "k" else (m * world.size, k)
    dtype = out_dtype or a.dtype
    out = check_matrices(OP, a, b, k, bias, activation, out, m, dtype)
    has_bias = bias is not None
    problem = Problem(m, b.shape[1], k, a.dtype, world.size, shard, has_bias, activation, dtype)
    options = CallOptions(algo, config, False, explain)
    return call_matrices(world, OP, problem, a, b, bias, out, options)
