"""What safety and sight cost: the bound on waits, and trace points.

`python -m benchmarks bound` runs barriers of all ranks with the bound and without it, in a kernel
that does nothing else. `python -m benchmarks trace OP` calls the same plan with its trace points
and without them.
"""

# A jit function's arguments are tiles and pointers, which have no Python type:
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sundog.device import context, signal
from sundog.launch import run
from sundog.tools.timing import Times, Variant, measure, times_json
from sundog.tools.trace.record import TraceRecording
from sundog.tools.trace.trace_command import TracedOp
from sundog.world.world import World

from .result_files import machine, write

_ROUNDS = 200
_SIZE = context.SIZE


# the bound on waits


def bound(sizes: Sequence[int], backend: str, json_file: str) -> None:
    """Time barriers with and without the bound, for several world sizes."""
    measured = []
    for size in sizes:
        times: list[Times] = run(_time_barriers, size, backend)[0]
        measured.append((size, times))
        text = ", ".join(f"{t.name} {1e6 * t.median:.1f} us" for t in times)
        print(f"{size} ranks, {_ROUNDS} barriers: {text}", flush=True)
    if json_file:
        rows = [{"world": s, "times": [times_json(t) for t in ts]} for s, ts in measured]
        content = {"kind": "bound", "backend": backend, "machine": machine()}
        write(json_file, content | {"rows": rows})


def _time_barriers(world: World) -> list[Times]:
    lanes = triton.next_power_of_2(world.size)
    variants = []
    for kernel in (_bounded, _unbounded):
        flags = world.signals(world.size, "bound.flags")
        last = world.signals(1, "bound.last")
        variants.append(
            Variant(kernel.__name__[1:], [_call(kernel, flags, last, world.ctx, lanes)])
        )
    world.barrier()
    return measure(world, variants, at_least=4)


def _call(kernel, flags, last, ctx: torch.Tensor, lanes: int):
    return lambda: kernel[(1,)](flags, last, ctx, ROUNDS=_ROUNDS, LANES=lanes)


@triton.jit
def _bounded(flags, last, ctx, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    epoch = tl.load(last)
    for _ in range(ROUNDS):
        epoch += 1
        signal.barrier_ranks(flags, epoch, ctx, LANES)
    tl.store(last, epoch)


@triton.jit
def _unbounded(flags, last, ctx, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    epoch = tl.load(last)
    for _ in range(ROUNDS):
        epoch += 1
        signal.signal_all(flags, epoch, ctx, LANES)
        _wait_for_ever(flags, epoch, ctx, LANES)
    tl.store(last, epoch)


@triton.jit
def _wait_for_ever(flags, epoch, ctx, LANES: tl.constexpr):
    """Wait as signal.wait_all does, without a bound."""
    lane = tl.arange(0, LANES)
    valid = lane < tl.load(ctx + _SIZE).to(tl.int32)
    seen = tl.atomic_add(flags + lane, lane * 0, mask=valid, sem="acquire", scope="sys")
    late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    while late > 0:
        seen = tl.atomic_add(flags + lane, lane * 0, mask=valid, sem="acquire", scope="sys")
        late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    tl.debug_barrier()  # orders the loads of all warps after the acquire of these flags


# trace points


def trace(subject: TracedOp, size: int, backend: str, link: str, json_file: str) -> None:
    """Time a plan with and without trace points, interleaved."""
    found: list[Any] = run(lambda w: _time_points(w, subject), size, backend, link=link)
    title, times = found[0]
    off, on = times
    cost = f"{100 * (on.median / off.median - 1):+.1f} %"
    print(f"{title}: {1e6 * off.median:.1f} us, traced {1e6 * on.median:.1f} us, {cost}")
    if json_file:
        content = {"kind": "trace_cost", "title": title, "world": size, "backend": backend}
        content |= {"link": link, "machine": machine()}
        write(json_file, content | {"times": [times_json(t) for t in times]})


def _time_points(world: World, subject: TracedOp) -> tuple[str, list[Times]]:
    title, call = subject.call(world)
    recording = TraceRecording(world)
    calls = [_with_clock(world, clock, call) for clock in (0, world.kernel_mode)]
    variants = [Variant(name, [each]) for name, each in zip(("off", "on"), calls, strict=True)]
    times = measure(world, variants, at_least=4)
    world.barrier()
    recording.close()
    return title, times


def _with_clock(world: World, clock: int, call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call whose kernels have trace points that read this clock; 0: none."""

    def run_once() -> Any:
        world.kernel_mode = clock
        return call()

    return run_once
