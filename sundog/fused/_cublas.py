"""What algorithms share that multiply by torch.mm, which is cuBLAS or hipBLASLt.

Each rank needs a GPU to itself. cuBLAS takes the SMs that it likes; where ranks share a GPU,
programs that wait for this very product may hold them (8 ranks on an H200 hung so).
`world.owns_gpu` says whether each has one: on `symm` the ranks compare the identity of their GPUs
when a world opens; on `virtual` a single rank has the GPU, or rank 0 does with its peers across a
link. Elsewhere `auto` leaves these algorithms out, and a plan refuses.

cuBLAS adds in its own order, which may change with the shape and the version. Bits are the same
from call to call and on all ranks, but not those of our own products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import _gemm

if TYPE_CHECKING:
    from ..world.world import World


@dataclass(frozen=True)
class Config:
    """There is nothing to choose: cuBLAS multiplies, and the collective chooses its own config."""


def valid(problem: Any, config: Config) -> str | None:
    wanted = problem.out_dtype or problem.dtype
    if (reason := _gemm.unfit(problem)) is not None:
        return reason
    if problem.dtype == torch.float32:
        return f"{problem.dtype}: torch.mm may round it to tf32; use another algorithm"
    if problem.has_bias or problem.activation or wanted != problem.dtype:
        return (
            f"bias, activation {problem.activation!r} or output {wanted} would come after a "
            f"product that is rounded to {problem.dtype}"
        )
    return None


def space(problem: Any) -> list[Config]:
    return [Config()] if valid(problem, Config()) is None else []


def default(problem: Any, num_sms: int) -> Config:
    return Config()


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, bias: None = None, activation: None = None
) -> None:
    """out = a @ b; `valid` has refused the rest."""
    torch.mm(a, b, out=out)


def refused(world: World, reason: str | None) -> str | None:
    """Return what `valid` says, else why ranks that share a GPU can't use this, or None."""
    if reason is not None or world.owns_gpu:
        return reason
    return (
        f"{world.size} ranks share a GPU, and cuBLAS would wait for SMs that other ranks hold "
        "while they wait for it: use algo='barrier'"
    )
