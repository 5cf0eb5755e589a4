"""How a program of Triton-distributed begins: its files loaded alone, and symmetric tensors.

The package imports its own compiler; the adapter loads the kernels' files alone. Its barrier of one
grid keeps a value per thread across `if` and `else`, which is not simulated: `_grid_barrier` has
its meaning.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from sundog.compat import triton_dist

from .case import checkout, start


@triton.jit
def _grid_barrier(counter, use_cooperative: tl.constexpr):
    """Meet the programs of this grid: each arrives once, and waits for the round to be full."""
    tl.debug_barrier()  # what all threads did comes before the release
    size = tl.num_programs(0)
    old = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    full = (old // size + 1) * size
    while tl.atomic_add(counter, 0, sem="acquire", scope="gpu") < full:
        pass
    tl.debug_barrier()


def load(name: str) -> Any:
    if "triton_dist.kernels" not in sys.modules:
        triton_dist.provide()
        tl.constexpr_function = triton.constexpr_function  # where their Triton has it
        for package in ("triton_dist.kernels", "triton_dist.kernels.nvidia"):
            module = ModuleType(package)
            module.__path__ = [os.path.join(checkout(), "python", *package.split("."))]
            sys.modules[package] = module
        common: Any = importlib.import_module("triton_dist.kernels.nvidia.common_ops")
        common.barrier_on_this_grid = _grid_barrier
        # names that only functions we do not call would need
        sys.modules["triton_dist.kernels.common_ops"] = common
        common.pack_b32_v2 = None
        tuned: Any = ModuleType("triton_dist.tune")
        tuned.autotune = lambda *args, **kwargs: lambda function: function
        tuned.to_hashable = lambda x: x
        sys.modules["triton_dist.tune"] = sys.modules["triton_dist"].tune = tuned  # type: ignore[attr-defined]
    return importlib.import_module(f"triton_dist.kernels.nvidia.{name}")


def begin(name: str) -> tuple[Any, int, int]:
    module = load(name)
    rank = start()
    triton_dist.initialise()
    return module, rank, dist.get_world_size()


def symmetric(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = triton_dist.create_tensor(shape, dtype).zero_()
    dist.barrier()
    return x


def equal(found: torch.Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0, atol=0)


def ints(rank: int, *shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(rank)).float()
