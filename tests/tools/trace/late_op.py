"""An op of a user with trace points, in which one rank is late on purpose.

Each program signals its right neighbour and waits for its left one, then all ranks meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sundog import World
from sundog.device import context, signal, trace
from sundog.ops.op import Cost, Plan

LATE_RANK = 1
DELAY = 1000  # accesses


@dataclass(frozen=True)
class Problem:
    rounds: int
    size: int


@dataclass(frozen=True)
class Config:
    programs: int = 2


def valid(problem: Problem, config: Config) -> str | None:
    return None


def space(problem: Problem) -> list[Config]:
    return [Config()]


def default(problem: Problem, num_sms: int) -> Config:
    return Config()


def cost(problem: Problem) -> Cost:
    return Cost(0, 8, 8, 8)


def cases(size: int) -> list[Problem]:
    return [Problem(3, size)]


def inputs(world: World, problem: Problem, seed: int) -> tuple[torch.Tensor]:
    return (world.full(1, seed + world.rank, torch.int64, "x"),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[rank] * 0 + problem.rounds


@triton.jit
def late_kernel(
    x, out, flags, meet, epochs, ctx, rounds,
    LANES: tl.constexpr, LATE: tl.constexpr, DELAY: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    left, right = (rank + size - 1) % size, (rank + 1) % size
    flag, meet = flags + program, meet + program * size
    epoch = tl.load(epochs + program)
    for step in range(rounds):
        trace.begin(trace.COMPUTE, step, 0, rank, ctx, TRACE)
        trace.begin(trace.FETCH, step, 0, rank, ctx, TRACE)
        if rank == LATE:
            total = tl.load(x, volatile=True)  # a GPU would load an ordinary one once
            for _ in range(DELAY):
                total += tl.load(x, volatile=True)
            tl.store(x, total)
        trace.end(trace.FETCH, step, 0, rank, ctx, TRACE)
        trace.end(trace.COMPUTE, step, 0, rank, ctx, TRACE)
        # My round is over: the right neighbour waits for this.
        signal.signal(flag, right, epoch + step + 1, ctx, TRACE)
        signal.wait(flag, left, epoch + step + 1, ctx, TRACE)
    # Nobody ends before all have signalled.
    signal.barrier_ranks(meet, epoch + rounds, ctx, LANES, TRACE)
    tl.store(epochs + program, epoch + rounds)
    if program == 0:
        tl.store(out, rounds)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    flags = world.signals(config.programs, "flags")
    meet = world.signals((config.programs, problem.size), "meet")
    epochs = world.signals(config.programs, "epochs")
    world.barrier()

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        late_kernel[(config.programs,)](
            x, out, flags, meet, epochs, world.ctx, problem.rounds,
            LANES=triton.next_power_of_2(problem.size), LATE=LATE_RANK, DELAY=DELAY,
            TRACE=world.kernel_mode,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (flags, meet, epochs), launch)
