"""Reductions with more than a name and real numbers: torch's ReduceOp values, and complex tensors,
which are summed and averaged as pairs of real numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..ops.dispatch import AsyncHandle, check_contiguous, packed


def name_of(op: Any) -> str:
    """Return the name of an operator, which may be a value of torch.distributed.ReduceOp."""
    if isinstance(op, str):
        return op
    word = str(getattr(op, "op", op)).rpartition(".")[2].lower()  # RedOpType.SUM
    return "prod" if word == "product" else word


def has_views(x: Any, op: str) -> bool:
    """Return whether the real and the imaginary parts of x can be reduced separately."""
    return isinstance(x, torch.Tensor) and x.is_complex() and op in ("sum", "avg")


def by_views(
    reduce: Callable[..., Any], world: Any, x: torch.Tensor, out: torch.Tensor | None, **more: Any
) -> Any:
    """Call a reduction on complex numbers as pairs of real ones."""
    name = reduce.__name__
    x = packed(world, name, x, more.get("explain", False))
    check_contiguous(name, out=out)
    if out is not None and out.dtype != x.dtype:
        raise ValueError(f"{name}: x is of {x.dtype} and out of {out.dtype}; they must be the same")
    room = None if out is None else torch.view_as_real(out)
    found = reduce(world, torch.view_as_real(x), out=room, **more)
    if isinstance(found, AsyncHandle):
        return dataclasses.replace(found, result=_as_complex(found.result, out))
    return _as_complex(found, out)


def _as_complex(real: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor | None:
    """Return the result as complex numbers; None where a rank gets none."""
    if real is None:
        return None
    return torch.view_as_complex(real) if out is None else out
