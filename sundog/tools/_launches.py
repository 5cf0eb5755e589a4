"""The launches that a rank's function makes, noted instead of run: kernel, arguments, options.

The function runs on a simulated world, so that it plans and allocates as always. What a launch
specialises on (dtype, alignment by 16, equal to 1, memory below 2 GiB) is taken from its arguments;
only the size of the heap is that of a GPU's world instead of the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ..backends.sim import Sim
from ..launch import run
from ..machine.launcher import Installed, current_machine
from ..ops.load import running
from ..world.poison import heaps
from ..world.world import World

__all__ = ["CTX", "DATA", "FEW", "FLAGS", "Launch", "Pointer", "pointer", "record"]

CTX, FLAGS, DATA, FEW = "ctx", "flags", "data", "few"
_FEW_BYTES = 64 << 10  # of a whole tensor


@dataclass(frozen=True)
class Pointer:
    """A tensor as a launch sees it: what Triton asks of an argument, and no memory behind it."""

    dtype: torch.dtype
    address: int
    reach: int  # bytes of the storage, which decides whether AMD offsets have 32 bits

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.reach


@dataclass(frozen=True)
class Launch:
    kernel: JITFunction
    args: tuple
    kwargs: dict[str, Any]
    roles: dict[str, str]  # of arguments that are tensors or tuples: ctx, flags, data or few


def record(
    fn: Callable[[World], Any], size: int, num_sms: int, heap_size: int, gpu_heap_size: int
) -> list[Launch]:
    """What rank 0 launches. Ranks may differ in data, but one kernel must serve them all."""
    launches: list[Launch] = []
    worlds: dict[int, World] = {}

    def note(kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> None:
        machine = current_machine()
        assert machine is not None
        if machine.host.rank == 0:
            launches.append(_launch(worlds[0], kernel, args, kwargs, gpu_heap_size))

    def main(world: World) -> None:
        worlds[world.rank] = world
        # As on a GPU: what is allocated from here on is not poisoned, which takes seconds where
        # tensors are large, and touches memory that nobody needs.
        world._heap.guard = 0
        with Installed(current_machine(), note):
            fn(world)

    with running("one call on the simulator"):
        run(main, size, "sim", heap_size=heap_size, sim=Sim(num_sms=num_sms))
    return launches


def _launch(
    world: World, kernel: JITFunction, args: tuple, kwargs: dict[str, Any], heap_size: int
) -> Launch:
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    roles = {k: _role(world, v) for k, v in named.items() if isinstance(v, torch.Tensor | tuple)}
    return Launch(
        kernel,
        tuple(pointer(value, heap_size) for value in args),
        {name: pointer(value, heap_size) for name, value in kwargs.items()},
        roles,
    )


def pointer(value: Any, heap_size: int) -> Any:
    """An argument without its memory; a tuple's items each."""
    if isinstance(value, tuple):  # a view of a matrix, say
        items = [pointer(item, heap_size) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunction():
        storage = value.untyped_storage()
        reach = heap_size if storage.data_ptr() in heaps else storage.nbytes()
        return Pointer(value.dtype, value.data_ptr(), reach)


def _role(world: World, tensor: torch.Tensor | tuple) -> str:
    if isinstance(tensor, tuple):  # one name in the kernel: data if any of them is
        found = {_role(world, item) for item in tensor if isinstance(item, torch.Tensor | tuple)}
        return DATA if DATA in found or not found else min(found)
    with torch._C.DisableTorchFunction():
        address = tensor.data_ptr()
        if address == world.ctx.data_ptr():
            return CTX
        for flags in world._signals.values():
            if 0 <= address - flags.data_ptr() < max(flags.nbytes, 1):
                return FLAGS
        return FEW if tensor.nbytes <= _FEW_BYTES else DATA
