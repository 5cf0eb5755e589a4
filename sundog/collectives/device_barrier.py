"""A barrier of all ranks on the stream, without the host, so that a graph may contain it.

All work enqueued before it on any rank's stream happens before all work enqueued after it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import signal
from ..ops.op import Plan, World

# Mutants that `check --mutate` need not kill (sundog/tools/check/mutation.py).
ACCEPT = {
    "_signal_lanes: tl.debug_barrier(): dropped": "orders tiles before it; this kernel has none",
    "_wait_tile: tl.debug_barrier(): dropped": "orders tiles after it; this kernel has none",
}


@triton.jit
def _barrier_kernel(flags, epochs, ctx, SIZE: tl.constexpr, TRACE: tl.constexpr):
    epoch = tl.load(epochs) + 1
    # Releases what came before this kernel on its stream, and acquires the same from all ranks.
    signal.barrier_ranks(flags, epoch, ctx, SIZE, TRACE)
    tl.store(epochs, epoch)  # read by the next barrier on the stream


def device_barrier(world: World) -> None:
    """Wait for all ranks on the current stream. The host does not wait; `world.barrier()` makes it.

    The first call on a stream makes the flags, which is a collective on the host.
    """
    key = ("device_barrier", world.stream_number)
    plan = world._plans.plan(key, "device_barrier", f"{world.size} ranks", lambda: _plan(world))
    plan.launch()


def _plan(world: World) -> Plan:
    flags = world.signals(world.size, "device_barrier.flags")
    epochs = world.signals(1, "device_barrier.epochs")
    world.barrier()  # every rank's flags are zero before the first signal

    def launch() -> None:
        _barrier_kernel[(1,)](
            flags, epochs, world.ctx, SIZE=world.size, TRACE=world.kernel_mode, num_warps=1
        )

    return Plan(world, f"{world.size} ranks", None, (flags, epochs), launch)
