"""my_op: every rank gets the sum of all ranks' tensors. Replace it with your own op.

This file is an op. All commands work on it, because it has the names that they look for:

    sundog check my_op.py --world 3 --mutate       races, deadlocks, wrong results
    sundog probe my_op.py                          can it be captured in a CUDA graph?
    sundog isa my_op.py                            what the compilers make of the kernel
    sundog trace my_op.py --out trace.json         who waited for whom
    sundog tune my_op.py --compile-only            compile configs; without the flag, time them
    sundog bench my_op.py                          its time and the limit of the GPU

The names, top to bottom: Problem, Config, valid, space, default, cost, cases, inputs, reference,
plan. Keep their signatures; change what is inside. Do not add a function called `main`, or
`sundog check` runs that instead of the op.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal, trace
from sundog.ops.op import Cost, Plan, agree


@dataclass(frozen=True)
class Problem:
    """What to compute. On the command line: --problem numel=1024,dtype=float32.

    Every field is an int, a bool, a str or a torch.dtype. `size` is required: it is the number of
    ranks, and the tools set it from --world.
    """

    numel: int
    dtype: torch.dtype
    size: int


@dataclass(frozen=True)
class Config:
    """How to compute it: what a tuner may change without changing the result."""

    block: int = 2048  # elements of a tile
    programs: int = 4
    num_warps: int = 4


def valid(problem: Problem, config: Config) -> str | None:
    """Return None if the config works for this problem, or the reason why not, with numbers."""
    if config.block & (config.block - 1):
        return f"block {config.block} is not a power of two"
    if config.programs < 1:
        return f"programs {config.programs}: at least one is needed"
    return None


def space(problem: Problem) -> list[Config]:
    """Return the configs that `sundog tune` may try."""
    return [
        Config(block, programs, num_warps)
        for block in (1024, 2048, 4096)
        for programs in (4, 16, 64)
        for num_warps in (4, 8)
    ]


def default(problem: Problem, num_sms: int) -> Config:
    """Return the config to use if the op was not tuned.

    Programs that wait for each other must run at the same time, so never use more than `num_sms`,
    the number of SMs that a rank has.
    """
    tiles = triton.cdiv(problem.numel, Config.block)
    return Config(programs=max(1, min(tiles, num_sms)))


def cost(problem: Problem) -> Cost:
    """Return the least work of every rank. `bench` computes the limit from it."""
    nbytes = problem.numel * problem.dtype.itemsize
    return Cost(
        flops=problem.numel * (problem.size - 1),
        read_bytes=nbytes * problem.size,
        written_bytes=nbytes,
        link_bytes=nbytes * (problem.size - 1),
    )


def cases(size: int) -> list[Problem]:
    """Return the problems that `check` and `probe` run, for a world of `size` ranks.

    Keep them small, since the simulator runs them many times, and include an odd size. Commands
    that take one problem (`isa`, `trace`, `tune`) start from the first.
    """
    return [Problem(4096, torch.float32, size), Problem(1001, torch.bfloat16, size)]


def inputs(world: sundog.World, problem: Problem, seed: int) -> tuple[torch.Tensor, ...]:
    """Return this rank's inputs: random, different on every rank, the same for the same seed.

    Small whole numbers make float sums exact, so results are compared bit by bit. A tensor that
    peers read or write must come from the world (`world.empty`).
    """
    generator = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)
    values = torch.randint(-9, 10, (problem.numel,), generator=generator, device=world.device)
    return (world.empty((problem.numel,), problem.dtype, "x").copy_(values),)


def reference(problem: Problem, rank: int, x: list[torch.Tensor]) -> torch.Tensor:
    """Return the expected result of `rank`, computed by torch. `x` has every rank's input.

    An op with two inputs takes two lists: reference(problem, rank, x, y).
    """
    return torch.stack(x).float().sum(0).to(problem.dtype)


@triton.jit
def _kernel(
    x, out, ready, done, epochs, ctx, n,
    SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1  # the number of this call; flags only grow
    peers = ()  # where x is on every rank; found once, since it needs a load from the context
    for peer in tl.static_range(SIZE):
        peers = peers + (memory.translate(x, peer, ctx),)  # type: ignore
    # Every rank wrote its x before this kernel on its stream; peers may read it after this barrier.
    # TRACE records when the barrier ran; it compiles to nothing unless a trace is recorded.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, LANES, TRACE)
    for start in range(program * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n
        trace.begin(trace.FETCH, start // BLOCK, 0, rank, ctx, TRACE)
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(SIZE):  # in rank order: every rank gets the same bits
            total += tl.load(peers[peer] + offsets, mask=mask).to(tl.float32)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=mask)
        trace.end(trace.FETCH, start // BLOCK, 0, rank, ctx, TRACE)
    # My loads come before the flags: after this barrier every rank may overwrite its x.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, LANES, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on this stream


def plan(world: sundog.World, problem: Problem, config: Config) -> Plan:
    """Allocate what the op needs, once, and return a Plan. Every rank calls this together.

    Calling the plan must only launch: no allocation, no host synchronisation, no number that
    changes from call to call among the arguments. Then it can be captured in a CUDA graph.
    """
    agree(world, "my_op", problem, config, valid(problem, config))
    shape = (config.programs, problem.size)
    ready, done = world.signals(shape, "my_op.ready"), world.signals(shape, "my_op.done")
    epochs = world.signals(config.programs, "my_op.epochs")
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _kernel[(config.programs,)](
            x, out, ready, done, epochs, world.ctx, problem.numel,
            SIZE=problem.size, LANES=triton.next_power_of_2(problem.size), BLOCK=config.block,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    # The inputs of `inputs`, in their order, then the output: plan(x, out).
    return Plan(world, problem, config, (ready, done, epochs), launch)
