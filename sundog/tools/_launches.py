"""Record the launches of a rank's function, instead of running them, and compile them.

The function runs on a simulated world, so it plans and allocates as usual. What a launch
specialises on (dtype, alignment by 16, equal to 1, memory below 2 GiB) is taken from its arguments.
Only the heap has the size of a GPU's world instead of the simulator's.
"""

from __future__ import annotations

import faulthandler
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from ..backends.sim import Sim
from ..compiled.recorded import (
    CTX,
    DATA,
    FEW,
    FLAGS,
    Pointer,
    RecordedLaunch,
    compile_launch,
    pointer,
)
from ..dataset.triton.compile import gpu_target
from ..gpu_limits import LIMITS
from ..launch import run
from ..machine.launcher import Installed, current_machine
from ..ops.load import running
from ..target import GPU_HEAP
from ..world.world import World
from ._pool import Failure, Worker, serve

NUM_SMS = 132  # of a rank, where no GPU is there to ask
KNOWN_TARGETS = tuple(LIMITS)
_COMPILE_SECONDS = 120.0
_FEW_BYTES = 64 << 10  # of a whole tensor


def record(
    fn: Callable[[World], Any],
    size: int,
    heap_size: int,
    num_sms: int = NUM_SMS,
    gpu_heap_size: int = GPU_HEAP,
) -> list[RecordedLaunch]:
    """Record what rank 0 launches. Ranks may differ in data, but one kernel must serve all.

    `heap_size` is that of the simulated world; kernels see `gpu_heap_size`.
    """
    launches: list[RecordedLaunch] = []
    worlds: dict[int, World] = {}

    def note(kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> None:
        machine = current_machine()
        assert machine is not None
        if machine.host.rank == 0:
            launches.append(_launch(worlds[0], kernel, args, kwargs, gpu_heap_size))

    def main(world: World) -> None:
        worlds[world.rank] = world
        # As on a GPU, what is allocated from now on is not poisoned, which would take seconds for
        # large tensors and touch memory that is not needed.
        world._heap.guard = 0
        with Installed(current_machine(), note):
            fn(world)

    with running("one call on the simulator"):
        run(main, size, "sim", heap_size=heap_size, sim=Sim(num_sms=num_sms))
    return launches


@functools.cache
def check_target(target: str) -> None:
    """Raise a ValueError if this Triton can't compile for a target.

    LLVM ends the whole process for an architecture that it does not know. So for a target that is
    not in KNOWN_TARGETS a small kernel is first compiled in another process.
    """
    gpu_target(target)  # raises ValueError for other names
    if target in KNOWN_TARGETS:
        return
    worker = Worker(serve(_try_target), _COMPILE_SECONDS, fresh=True)
    worker.submit(target)
    reply = worker.wait()
    if isinstance(reply, Failure):
        why = reply.error.partition("\n")[0].rstrip(".:")
        raise ValueError(
            f"target {target}: Triton {triton.__version__} cannot compile for it ({why}). Known "
            f"targets: {', '.join(KNOWN_TARGETS)}"
        )


def _try_target(target: str) -> bool:
    faulthandler.disable()
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # LLVM writes a stack trace before it aborts, Triton the PTX
        os.dup2(quiet, stream)
    word = Pointer(torch.int32, 0, 4)
    compile_launch(RecordedLaunch(_store_sum, (word,), {}, {}), target)
    return True


@triton.jit
def _store_sum(word):  # type: ignore[no-untyped-def]
    tl.store(word, tl.sum(tl.arange(0, 64), 0))  # a sum between lanes, for which LLVM aborts


def _launch(
    world: World, kernel: JITFunction, args: tuple, kwargs: dict[str, Any], heap_size: int
) -> RecordedLaunch:
    named = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    roles = {k: _role(world, v) for k, v in named.items() if isinstance(v, torch.Tensor | tuple)}
    return RecordedLaunch(
        kernel,
        tuple(pointer(value, heap_size) for value in args),
        {name: pointer(value, heap_size) for name, value in kwargs.items()},
        roles,
    )


def _role(world: World, tensor: torch.Tensor | tuple) -> str:
    if isinstance(tensor, tuple):  # one name in the kernel: data if any of them is
        found = {_role(world, item) for item in tensor if isinstance(item, torch.Tensor | tuple)}
        return DATA if DATA in found or not found else min(found)
    with torch._C.DisableTorchFunction():
        address = tensor.data_ptr()
        if address == world.ctx.data_ptr():
            return CTX
        for flags in world._memory.flags.values():
            if 0 <= address - flags.data_ptr() < max(flags.nbytes, 1):
                return FLAGS
        return FEW if tensor.nbytes <= _FEW_BYTES else DATA
