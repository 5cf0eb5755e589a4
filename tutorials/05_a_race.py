"""# 5. A race, its report and its repair

The most common bug in kernels that signal is a missing barrier between a tile store and the flag.
Such a kernel gives correct results in every test on a laptop and in most runs on a GPU. In this
tutorial you write that bug, read the checker's report, and repair the kernel.

You learn

- how to run the race checker from Python and from the command line;
- how to read a finding;
- what `--mutate` tells you that a clean check does not.

```
python tutorials/05_a_race.py
```
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

import sundog
from sundog.device import context, memory, signal
from sundog.testing import check

# %%
# ## The kernel with the bug
#
# The kernel looks correct: it sets the flag by an atomic with `release` semantics at system scope.
# But a release orders only the earlier accesses of *the thread that makes it*, and a scalar atomic
# is made by one thread, while all threads of the program stored the tile. The compiler puts no
# barrier between the two, neither for NVIDIA nor for AMD. `REPAIRED` adds one.


@triton.jit
def send_kernel(x, inbox, out, flag, ctx, n, BLOCK: tl.constexpr, REPAIRED: tl.constexpr):
    rank = tl.load(ctx + context.RANK)
    size = tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    memory.store(inbox + offsets, tl.load(x + offsets, mask=mask), right, ctx, mask=mask)
    if REPAIRED:
        tl.debug_barrier()  # the stores of all warps come before the release below
    tl.atomic_xchg(signal.translate(flag, right, ctx), 1, sem="release", scope="sys")
    signal.wait(flag, left, 1, ctx)  # the left neighbour's tile comes before the load below
    tl.store(out + offsets, tl.load(inbox + offsets, mask=mask), mask=mask)


def program(repaired: bool) -> Callable[[sundog.World], torch.Tensor]:
    def main(world: sundog.World) -> torch.Tensor:
        n = 300
        torch.manual_seed(world.rank)
        x = torch.randn(n, device=world.device)
        inbox = world.empty((n,), name="inbox")
        flag = world.signals(1, "flag")
        out = torch.empty(n, device=world.device)
        world.barrier()  # every rank has its inbox and its flag
        send_kernel[(1,)](x, inbox, out, flag, world.ctx, n, BLOCK=512, REPAIRED=repaired)
        left = world.exchange(x.cpu())[world.rank - 1]
        # Comparison with torch: it holds for both versions of the kernel on the simulator.
        assert torch.equal(out.cpu(), left)
        return out

    return main


# %%
# ## The report
#
# `sundog.testing.check` runs the function under many schedules and raises `AssertionError` with a
# report. It does not look at values. It tracks every access of every program with vector clocks,
# and checks whether the memory model orders each pair of accesses to the same byte. So the bug
# shows in the first schedule, although all values are correct.


def report_of_the_bug() -> str:
    try:
        check(program(repaired=False), world_size=2, schedules=4)
    except AssertionError as report:
        return str(report)
    raise SystemExit("the checker missed the bug")


# %%
# The report is in the output of the program, at the end of this page.
#
# A finding describes both accesses (rank, program, source line, allocation and index range), names
# the rule that was broken, and says why nothing orders the two and what to do. The token in its
# last line replays exactly this schedule: `sundog check FILE --schedule random:0`.
#
# ## The repair
#
# Put one `tl.debug_barrier()` before the release, or better, call `signal.signal`, which includes
# it. Prefer the primitives of `sundog.device.signal` to your own atomics: each primitive documents
# what it orders.


def main(world: sundog.World) -> torch.Tensor:
    return program(repaired=True)(world)


if __name__ == "__main__":
    report = report_of_the_bug()
    print(report)
    assert "race" in report
    assert "inbox" in report
    print("\nRepaired:", check(program(repaired=True), world_size=2, schedules=4))
    sundog.run(main, world_size=4)
    print("4 ranks: the repaired kernel agrees with torch")

# %%
# ## Test the check
#
# ```
# sundog check tutorials/05_a_race.py --world 3 --mutate
# ```
#
# removes or weakens every synchronisation of the *repaired* kernel, one at a time, and expects
# the checker to report each mutant. A mutant that survives is either a synchronisation that you do
# not need or a case that your test does not reach.
