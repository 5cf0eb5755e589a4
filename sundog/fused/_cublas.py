"""What the algorithms share that leave the product to torch.mm, which is cuBLAS or hipBLASLt.

They need a GPU for each rank: cuBLAS takes the SMs that it likes, and where ranks share a GPU those
may be held by programs that wait for this very product (seen with 8 ranks on an H200, which hung).
`world.owns_gpu` says so: on `symm` the ranks compare the identity of their GPUs when a world opens,
on `virtual` one rank has the GPU, or rank 0 with its peers across a link. `auto` leaves these out
elsewhere, and a plan refuses.

cuBLAS adds in an order of its own, which may change with the shape and the version: bits are the
same from call to call and on all ranks, but not those of our own products.
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
    """Nothing to choose: the product is cuBLAS's, and the collective chooses for itself."""


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
    """Say what `valid` says, else whether the ranks share a GPU."""
    if reason is not None or world.owns_gpu:
        return reason
    return (
        f"{world.size} ranks share a GPU, and cuBLAS would wait for SMs that other ranks hold "
        "while they wait for it: use algo='barrier'"
    )
