"""A product, then a collective: what algorithms share whose kernels do not wait for each other.

They are `barrier`, `cublas` and those with scales, and differ in how they multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.dispatch import CallOptions, decide
from ..ops.load import find
from ..ops.op import Plan
from . import _matmul_reduce
from ._matmul_reduce import Config, Problem

if TYPE_CHECKING:
    from ..world.world import World


def valid(problem: Problem, config: Config) -> str | None:
    """Return why not, or None: the sum is rounded before anything could be added to it."""
    wanted = problem.out_dtype or problem.dtype
    if problem.has_bias or problem.activation or wanted != problem.dtype:
        return (
            f"bias, activation {problem.activation!r} or output {wanted} would come after a sum "
            f"that is rounded to {problem.dtype}"
        )
    return _matmul_reduce.valid(problem, config)


def collective(world: World, op: str, numel: int, dtype: torch.dtype) -> Plan:
    """Plan a collective with the algorithm and config that a call of it would choose."""
    problem = find(op).Problem(numel, dtype, world.size)
    _, module, config, _ = decide(world, op, problem, CallOptions())
    made: Plan = module.plan(world, problem, config)
    return made


def product_then(
    world: World, op: str, problem: Problem, config: Any, multiply: Callable[..., None]
) -> Plan:
    """Plan a product and then `op`, a collective of it. An out with gaps is copied."""
    kind = problem.out_dtype or problem.dtype
    product = world.empty((problem.m, problem.n), kind, f"matmul_{op}.product")
    rows = problem.m // problem.size if op == "reduce_scatter" else problem.m
    then = collective(world, op, rows * problem.n, kind)
    spaces = [product]
    if op == "all_reduce":
        spare = product  # all_reduce may overwrite its input
    elif op == "all_gather":
        spare = world.empty((problem.size * rows, problem.n), kind, f"matmul_{op}.whole")
        spaces.append(spare)  # on the heap: the peers store to it
    else:
        spare = torch.empty((rows, problem.n), dtype=kind, device=world.device)

    def launch(a: Any, b: Any, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        multiply(a, b, product, added[0] if added else None, problem.activation)
        flat = out.is_contiguous()
        then.launch(product.view(-1), (out if flat else spare).view(-1))
        if not flat:
            out.detach().copy_(spare)
        return out

    return Plan(world, problem, config, (*spaces, *then.workspaces), launch)
