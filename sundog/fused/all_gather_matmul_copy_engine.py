"""All-gather + GEMM with the copy engine: it fetches the peers' parts of A, every SM multiplies.

On streams of its own the peers' rows are copied into the staging buffer, some rows of tiles at a
time, and a small kernel behind each copy sets the flags that the workers wait for (working.py). No
SM fetches, and over PCIe the engine is faster than any kernel: 55 GB/s where one reads 51.

A copy costs the engine 4.5 us of its own where 1 MB takes 18, even with two on their way at once
(9 us with one), so copies are large, but for the first and the last ones. A flag by a copied word
instead of a kernel costs as much, and stands in the engine's queue behind the next copy.

That small kernel, and the one that waits until the peers' parts are complete, must find a place
beside the workers, which leave one SM. It uses the streams after the one that it is called on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..device import signal, trace
from ..op import Plan, agree
from ..passive import stand_in
from . import all_gather_matmul_hbm_buffer as hbm_buffer
from . import fetching, gemm, working
from .all_gather_matmul import Problem, cases, cost, inputs, reference
from .call import fitting, resident

if TYPE_CHECKING:
    from ..order import Event
    from ..world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("a",)


@dataclass(frozen=True)
class Config(gemm.Tiles):
    rows: int = 4  # of tiles that are copied together, at most
    copies: int = 2  # on their way at once
    programs: int = 131


def valid(problem: Problem, config: Config) -> str | None:
    if min(config.rows, config.copies, config.programs) < 1:
        return (
            f"rows {config.rows}, copies {config.copies} and programs {config.programs} must be at "
            "least 1"
        )
    return gemm.valid(config, problem.dtype)


def space(problem: Problem) -> list[Config]:
    made = [
        Config(
            tile_m, tile_n, 64, group_m, num_warps=num_warps, num_stages=num_stages, rows=rows,
            copies=copies,
        )
        for tile_m, tile_n, num_warps, num_stages in (
            (128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 4, 4),
        )
        for group_m in (1, 2, 4)
        for rows in (2, 4, 8)
        for copies in (1, 2)
    ]  # fmt: skip
    return [config for config in made if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    m, k = problem.shard_shape
    base = fitting(problem.m, m, problem.n, k, problem.dtype, num_sms)
    rows = triton.cdiv(m, base["tile_m"]) * (1 if problem.shard == "k" else problem.size)
    most = rows * triton.cdiv(problem.n, base["tile_n"])
    return Config(**base, group_m=2, programs=max(1, min(num_sms - 1, most)))


@triton.jit
def _work_kernel(a, parts, b, out, to, bias, flags, ctx, F, S, LANES: tl.constexpr):
    program = tl.program_id(0)
    epoch = tl.load(flags.epochs + program) + 1
    point = 0
    point = working.work(point, a, parts, b, out, to, bias, flags, epoch, ctx, F, S)
    if (program == 0) & (F.size > 1):
        # All copies have ended: the peers may overwrite their A when their kernel, which waits for
        # this, has ended; and what follows this one may overwrite mine.
        rows, _, groups = fetching.remote(a, F, S)
        lane = tl.arange(0, LANES)
        signal._wait_tile(flags.staged + lane, lane < rows * groups, lane * 0, epoch, ctx)
        point = trace.barrier_ranks(point, flags.done, epoch, ctx, F.lanes, F.trace)
    trace.finish(point, ctx, F.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call, behind this one on the stream


@triton.jit(do_not_specialize=["step"])
def _ready_kernel(ready, calls, step, ctx, LANES: tl.constexpr):
    """My part of A is complete, and so are the peers': copies follow on the stream."""
    epoch = tl.load(calls) + step
    signal.barrier_ranks(ready, epoch, ctx, LANES)
    tl.store(calls, epoch)  # read by the publications behind, and by the next call


@triton.jit(do_not_specialize=["first", "stride", "count"])
def _publish_kernel(staged, first, stride, count, calls, LANES: tl.constexpr):
    """What was copied before on the stream is there: workers wait for these flags."""
    lane = tl.arange(0, LANES)
    epoch = tl.load(calls) + (lane * 0).to(tl.int64)
    flags = staged + first + lane * stride
    tl.atomic_xchg(flags, epoch, mask=lane < count, sem="release", scope="gpu")


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the staging buffer. The plan takes a symmetric a, any b, bias and out."""
    refused = resident(valid(problem, config), config.programs + 1, world.num_sms)
    agree(world, "all_gather_matmul.copy_engine", problem, config, refused)
    rows = triton.cdiv(problem.shard_shape[0], config.tile_m) * (problem.size - 1)
    flags = fetching.Flags(
        world.signals(problem.size, "all_gather_matmul.ready"),
        world.signals(problem.size, "all_gather_matmul.done"),
        world.signals(rows, "all_gather_matmul.staged"),
        world.signals(1, "all_gather_matmul.tickets"),
        world.signals(config.programs, "all_gather_matmul.epochs"),
    )
    calls = world.signals(1, "all_gather_matmul.calls")
    shape = (problem.size - 1, *problem.shard_shape)
    buffer = world.empty(shape, problem.dtype, "all_gather_matmul.staging")
    world.barrier()  # everybody's flags are zero before the first signal
    copy = _copier(world, problem, config, flags, calls, buffer)

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *given, out = rest
        if world.passive:
            stand_in(world, flags.ready, flags.done, flags.epochs)
            return out
        bias = given[0] if given else None
        begin = world.record_event()
        _work_kernel[(config.programs,)](
            *arguments(problem, config, a, buffer, b, out, bias, flags, world),
            LANES=triton.next_power_of_2(max(1, rows)),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        if world.size > 1:
            copy(a, begin)
        return out

    return Plan(world, problem, config, (*flags, calls, buffer), launch)


def _copier(
    world: World, problem: Problem, config: Config, flags: fetching.Flags, calls: torch.Tensor,
    buffer: torch.Tensor,
) -> Callable[[torch.Tensor, Event], None]:  # fmt: skip
    """The engine's side of a call."""
    units = _units(problem, config)
    ranks, rows = triton.next_power_of_2(world.size), triton.next_power_of_2(config.rows)

    def meet(step: int) -> None:
        _ready_kernel[(1,)](flags.ready, calls, step, world.ctx, LANES=ranks)

    def publish(first: int, stride: int, count: int) -> None:
        _publish_kernel[(1,)](flags.staged, first, stride, count, calls, LANES=rows, num_warps=1)

    def copy(a: torch.Tensor, begin: Event) -> None:
        """Behind the event, and before all that follows on this stream."""
        own = world.stream_number
        peers = [world.peer(a, (world.rank + 1 + n) % world.size) for n in range(world.size - 1)]
        with world.stream(own + 1):
            world.wait_event(begin)
            meet(1)
            met = world.record_event()
        for lane in range(1, config.copies):
            with world.stream(own + 1 + lane):
                world.wait_event(met)
        for number, (first, stride, step, rows) in enumerate(units):
            with world.stream(own + 1 + number % config.copies):
                buffer[step, rows].copy_(peers[step][rows], non_blocking=True)
                count = triton.cdiv(buffer[step, rows].shape[0], config.tile_m)
                publish(first, stride, count)
        for lane in range(config.copies):
            with world.stream(own + 1 + lane):
                end = world.record_event()
            world.wait_event(end)

    # Loaded now: once workers wait for them, nothing can be.
    meet(0)
    publish(0, 0, 0)
    return copy


def _units(problem: Problem, config: Config) -> list[tuple[int, int, int, slice]]:
    """What is copied, in the order in which workers want it: its first flag, the distance to the
    next, whose part, and which rows of that."""
    tiles, others = triton.cdiv(problem.shard_shape[0], config.tile_m), problem.size - 1
    if problem.shard == "k":
        spans = _spans(tiles, config.rows, up=True, down=True)
        return [
            (row * others + step, others, step, _rows(row, height, config))
            for row, height in spans
            for step in range(others)
        ]
    return [
        (step * tiles + row, 1, step, _rows(row, height, config))
        for step in range(others)
        for row, height in _spans(tiles, config.rows, up=False, down=step == others - 1)
    ]


def _spans(tiles: int, most: int, up: bool, down: bool) -> list[tuple[int, int]]:
    """First row of tiles and number of them, by copy: `most`, but few where workers wait for the
    first (`up`) and where nothing is left to do but what comes last (`down`)."""
    spans: list[tuple[int, int]] = []
    row = 0
    while row < tiles:
        left = tiles - row
        height = min(
            most, left, 1 << len(spans) if up else most, max(1, left // 2) if down else left
        )
        spans.append((row, height))
        row += height
    return spans


def _rows(row: int, height: int, config: Config) -> slice:
    return slice(row * config.tile_m, (row + height) * config.tile_m)


def arguments(
    problem: Problem, config: Config, a: torch.Tensor, buffer: torch.Tensor, b: torch.Tensor,
    out: torch.Tensor, bias: torch.Tensor | None, flags: fetching.Flags, world: World,
) -> tuple:  # fmt: skip
    """Of the workers' kernel: as hbm_buffer's, with a flag per row of tiles and peer."""
    blocks = max(1, triton.cdiv(problem.shard_shape[1], config.tile_k))
    same = {field.name: getattr(config, field.name) for field in fields(gemm.Tiles)}
    like = hbm_buffer.Config(**same, k_per_flag=blocks, fetchers=1, programs=config.programs)
    return hbm_buffer.arguments(problem, like, a, buffer, b, out, bias, flags, world)
