"""sundog inside torch: ops with gradients, torch.compile, process groups, modules.

library     every op as an op of torch: schema, fake kernel, kernels: `ops`
formulas    their backward formulas
names       worlds by name
calls       where `world.all_reduce(x)` goes when it is differentiated or compiled
modules     column- and row-parallel layers, and styles for parallelize_module
communicator  what vLLM and SGLang ask of a communicator
process_group  torch.distributed's backend "sundog"
symm_mem    kernels for the symm_mem ops of torch: `enable`
"""

from __future__ import annotations

from typing import Any

__all__ = ["enable", "ops"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sundog.torch' has no attribute {name!r}")
    # only when it is used, since a world imports parts of this package
    if name == "ops":
        from .library import ops

        return ops
    from .symm_mem import enable

    return enable
