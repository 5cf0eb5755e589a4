"""# 6. Your own op, through all commands

The kernels so far were functions of a world. An **op** is more: a file with a few fixed names that
say what to compute, in which ways, what result to expect, and how to launch it. With these names
every command of sundog works on your file: `check`, `probe`, `isa`, `trace`, `bench`
and `tune`.

This file is an op. It computes `out = x + left neighbour's x`.

You learn

- the ten names of an op, and which command uses each;
- what a plan is, and why calling it must only launch;
- what each command reports about your op.

To start an op of your own, run `sundog new op NAME`: it writes a file like this one.

```
python tutorials/06_your_own_op.py
```
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal, trace
from sundog.ops.op import Cost, Plan, agree

# %%
# ## Problem and Config
#
# The **problem** says what to compute. The **config** says how: it must not change the result.
# Both are frozen dataclasses, so they can be compared, hashed, and written on the command line:
# `--problem numel=65536,dtype=float32`. `size` is the number of ranks.


@dataclass(frozen=True)
class Problem:
    numel: int
    dtype: torch.dtype
    size: int


@dataclass(frozen=True)
class Config:
    block: int = 1024  # elements of a tile
    programs: int = 4
    num_warps: int = 4


# %%
# ## Which configs
#
# `valid` returns `None`, or a sentence with the reason. `space` lists what the tuner may try.
# `default` is used before anybody has tuned; `num_sms` is the number of SMs that a rank has, and
# programs that wait for each other must all fit.


def valid(problem: Problem, config: Config) -> str | None:
    if config.block & (config.block - 1):
        return f"block {config.block} is not a power of two"
    return None if config.programs > 0 else f"programs {config.programs}: at least one is needed"


def space(problem: Problem) -> list[Config]:
    return [Config(block, programs) for block in (512, 1024, 2048) for programs in (4, 16, 64)]


def default(problem: Problem, num_sms: int) -> Config:
    return Config(programs=max(1, min(triton.cdiv(problem.numel, Config.block), num_sms)))


# %%
# ## What it costs at least
#
# `bench` divides these by the measured rates of the GPU. The result is the limit: an op that
# reaches 1.00 of it cannot be faster.


def cost(problem: Problem) -> Cost:
    nbytes = problem.numel * problem.dtype.itemsize
    return Cost(flops=problem.numel, read_bytes=2 * nbytes, written_bytes=nbytes, link_bytes=nbytes)


# %%
# ## Test cases and the expected result
#
# `cases` are small problems for `check` and `probe`; one of them should have an odd size.
# `inputs` makes one rank's tensors. `reference` computes the expected result with torch, from the
# inputs of *all* ranks. Small whole numbers make float arithmetic exact, so every comparison is
# bit by bit.


def cases(size: int) -> list[Problem]:
    return [Problem(4096, torch.float32, size), Problem(999, torch.bfloat16, size)]


def inputs(world: sundog.World, problem: Problem, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)
    values = torch.randint(-9, 10, (problem.numel,), generator=generator, device=world.device)
    return (world.empty((problem.numel,), problem.dtype, "x").copy_(values),)


def reference(problem: Problem, rank: int, x: list[torch.Tensor]) -> torch.Tensor:
    return x[rank] + x[rank - 1]


# %%
# ## The kernel
#
# The kernel *pulls*: it reads the left neighbour's `x`. So it needs to know that `x` is ready
# before it reads, and it must tell the left neighbour when it has read it, because `x` may change
# after the call. This is the two-sided exchange of tutorial 3 with one neighbour instead of all
# ranks.
#
# With `TRACE`, signals and waits record when they ran. `trace.begin` and `trace.end` record
# anything else, here the time spent fetching. With `TRACE=0`, the usual case, trace points compile
# to nothing.


@triton.jit
def shift_add_kernel(x, out, ready, done, epochs, ctx, n, BLOCK: tl.constexpr, TRACE: tl.constexpr):
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    epoch = tl.load(epochs + program) + 1
    theirs = memory.translate(x, left, ctx)  # once, before the loop

    # My x was written before this kernel on my stream. The right neighbour reads it.
    signal.signal(ready + program, right, epoch, ctx, TRACE)
    # The left neighbour's x comes before my loads of it.
    signal.wait(ready + program, left, epoch, ctx, TRACE)
    for start in range(program * BLOCK, n, tl.num_programs(0) * BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < n
        trace.begin(trace.FETCH, start // BLOCK, 0, left, ctx, TRACE)
        tile = tl.load(x + offsets, mask=mask) + tl.load(theirs + offsets, mask=mask)
        tl.store(out + offsets, tile, mask=mask)
        trace.end(trace.FETCH, start // BLOCK, 0, left, ctx, TRACE)
    # My loads come before the left neighbour's next write to its x.
    signal.signal(done + program, left, epoch, ctx, TRACE)
    # The right neighbour has read my x: what follows on my stream may overwrite it.
    signal.wait(done + program, right, epoch, ctx, TRACE)
    tl.store(epochs + program, epoch)  # the next launch on this stream reads it


# %%
# ## The plan
#
# `plan` runs once per problem, on all ranks together. `agree` compares problem and config between
# the ranks, and raises an error that names the difference. Then it allocates the flags. The
# function that it returns **only launches**: it allocates nothing, waits for nothing and reads
# nothing back. That is why the op can be captured in a CUDA graph.


def plan(world: sundog.World, problem: Problem, config: Config) -> Plan:
    agree(world, "shift_add", problem, config, valid(problem, config))
    ready, done, epochs = (
        world.signals(config.programs, f"shift_add.{name}") for name in ("ready", "done", "epochs")
    )
    world.barrier()  # every rank's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        shift_add_kernel[(config.programs,)](
            x,
            out,
            ready,
            done,
            epochs,
            world.ctx,
            problem.numel,
            BLOCK=config.block,
            TRACE=world.kernel_mode,
            num_warps=config.num_warps,
        )
        return out

    return Plan(world, problem, config, (ready, done, epochs), launch)


# %%
# ## Running it, and comparing with torch
#
# Nothing stops you from calling the plan yourself.


def compare_with_torch(world: sundog.World) -> None:
    problem = Problem(5000, torch.float32, world.size)
    shift_add = plan(world, problem, default(problem, world.num_sms))
    (x,) = inputs(world, problem, seed=0)
    out = torch.empty_like(x)
    shift_add(x, out)
    expected = reference(problem, world.rank, world.exchange(x.cpu()))
    assert torch.equal(out.cpu(), expected), f"rank {world.rank}: out is wrong"
    if world.rank == 0:
        print(f"{world.size} ranks: x + left neighbour's x, equal to torch")


if __name__ == "__main__":
    sundog.run(compare_with_torch, world_size=4)

# %%
# ## The commands
#
# ```
# sundog check tutorials/06_your_own_op.py --world 3 --mutate
# sundog probe tutorials/06_your_own_op.py
# sundog isa   tutorials/06_your_own_op.py --target sm_90,gfx942
# sundog trace tutorials/06_your_own_op.py --out trace.json
# sundog tune  tutorials/06_your_own_op.py --compile-only
# sundog bench tutorials/06_your_own_op.py
# ```
#
# - `check` finds nothing, and reports every weakened version of the kernel.
# - `probe` reports `CAPTURABLE`: replays of a captured graph use new data and are correct in six
#   situations.
# - `isa` shows loads and stores of 16 bytes and no spills, for GPUs that you do not have.
# - `trace` shows which rank waited for which; open the file in ui.perfetto.dev.
# - `tune --compile-only` records what the compilers make of each config. On a GPU, without that
#   option, it finds the fastest one.
# - `bench` needs a GPU. It measures the time and compares it with the limit.
