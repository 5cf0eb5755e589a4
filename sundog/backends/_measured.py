"""Measure what CUDA does not report: how fast a wait polls, and how many programs run together.

Under MPS with a percentage CUDA reports 32 SMs to each of four processes, but the sets of these SMs
overlap: with programs that fill an SM, one rank had only 28 of its 32 running, and a kernel whose
programs wait for each other waits forever. So every rank starts programs that fill an SM each and
wait until all programs of all ranks run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import context, signal
from ..errors import SundogError
from ..machine.launcher import Installed

_POLLS_TO_TIME = 20_000
WARPS = 32
# Values that each program keeps in registers: 32 a thread, and what else the kernel needs. Two such
# programs don't fit on an SM with 64K registers and up to 2048 threads.
FILL = WARPS * 32 * 32
ROUNDS = 16
_SECONDS = 0.2  # that programs wait for others that find no place; ranks start within less
_CONFIRMED = 3  # times that all must fit, since programs may be placed differently


@functools.cache
def polls_per_second(index: int) -> float:
    """Measure how often one program alone polls a flag, which turns a timeout into a bound.

    With others polling too it is slower, so a wait lasts at least as long as was asked for. The
    fastest of a few counts: another process may have had the GPU during one of them.
    """
    device = torch.device("cuda", index)
    ctx = torch.zeros(context.DELTAS.value, dtype=torch.int64, device=device)
    ctx[context.RECORD.value] = context.RECORD_HERE.value
    flag = torch.zeros(1, dtype=torch.int64, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken = []
    for polls in (1, *[_POLLS_TO_TIME] * 3):  # the first one compiles and loads
        ctx[context.POLLS.value] = polls
        begin.record()
        Installed.original(_poll, flag, ctx, grid=(1,), warmup=False)
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e-3)
    return _POLLS_TO_TIME / min(taken[1:])


@triton.jit
def _poll(flag, ctx):  # type: ignore[no-untyped-def]
    signal.wait(flag, 0, 1, ctx)


@triton.jit
def count_resident(  # type: ignore[no-untyped-def]
    counts, scratch, member, total, ctx, SIZE: tl.constexpr, FILL: tl.constexpr
):
    """Count this rank's programs that run while all others do, in counts[member].

    counts[SIZE] is the sum of all ranks' counts, counts[SIZE + 1] is 1 once a program has waited in
    vain. `total`: programs of all ranks; `ctx` bounds the wait.
    """
    values = tl.load(scratch + tl.arange(0, FILL))
    arrived, over = counts + SIZE, counts + SIZE + 1
    # acquire: a program that got its place from one that gave up sees that it is over.
    late = tl.atomic_add(over, 0, sem="acquire", scope="sys")
    if late == 0:
        # relaxed: only the counts themselves are passed on.
        tl.atomic_add(counts + member, 1, sem="relaxed", scope="sys")
        tl.atomic_add(arrived, 1, sem="relaxed", scope="sys")
        signal._wait_word(arrived, member, total, ctx, scope="sys")
        if tl.atomic_add(arrived, 0, sem="relaxed", scope="sys") < total:
            # release, and its result is used: it happens before this program's end makes room for
            # one that had no place.
            late = tl.atomic_xchg(over, 1, sem="release", scope="sys")
    # Using the values here keeps them in registers all the time.
    tl.store(scratch + tl.arange(0, FILL), values + late.to(tl.float32))


def words(size: int) -> int:
    """Return the number of words that the counts of one round take."""
    return size + 2


class ResidentCounter:
    """One rank's part of the measurement. All ranks count in the first rank's heap."""

    def __init__(self, heap: torch.Tensor, member: int, size: int) -> None:
        self._rows = heap[: 8 * ROUNDS * words(size)].view(torch.int64).view(ROUNDS, words(size))
        self._member, self._size, self._round = member, size, 0
        device = heap.device
        self._scratch = torch.zeros(FILL, device=device)
        self._ctx = torch.zeros(context.DELTAS.value, dtype=torch.int64, device=device)
        self._ctx[context.RECORD.value] = context.RECORD_HERE.value
        self._polls = max(int(_SECONDS * polls_per_second(device.index)), 1)
        self._launch(torch.zeros(words(size), dtype=torch.int64, device=device), 1, 0)  # load it

    def clear(self) -> None:
        """Zero the counts, on the first rank, before any rank counts."""
        self._rows.zero_()
        torch.cuda.synchronize(self._rows.device)

    def measure(self, meet: Callable[[], Any], programs: int) -> list[int]:
        """Start programs on every rank. Return how many of each rank's ran together.

        `meet` waits for all ranks.
        """
        row = self._rows[self._round]
        self._round += 1
        meet()
        self._launch(row, programs, programs * self._size)
        meet()
        return [int(each) for each in row[: self._size].tolist()]

    def _launch(self, row: torch.Tensor, programs: int, total: int) -> None:
        self._ctx[context.POLLS.value] = self._polls
        self._ctx[context.TAKEN.value] = 0
        Installed.original(
            count_resident, row, self._scratch, self._member, total, self._ctx,
            SIZE=self._size, FILL=FILL, num_warps=WARPS, grid=(programs,), warmup=False,
        )  # fmt: skip
        torch.cuda.synchronize(row.device)  # bounded, as the kernel's wait is


def largest_that_fits(first: int, measure: Callable[[int], list[int]]) -> int:
    """Find the most programs, up to `first`, that every rank has running at once.

    `measure(n)` starts n on every rank and returns how many of each rank's ran together, 0 for a
    rank that came too late to be counted. All ranks get the same counts, so all decide the same.
    """
    programs, confirmed, seen = first, 0, []
    for _ in range(ROUNDS):
        seen.append((programs, measure(programs)))
        counts = seen[-1][1]
        if min(counts) == programs:
            confirmed += 1
            if confirmed == _CONFIRMED:
                return programs
        elif min(counts) > 0:
            confirmed = 0
            # A fair share of what ran, though one rank may have had less.
            programs = max(min(sum(counts) // len(counts), programs - 1), 1)
    raise SundogError(
        f"the ranks that share this GPU never had all their programs running at once in {ROUNDS} "
        f"attempts (programs of each rank, running together by rank): {seen}. Is the GPU used by "
        "other processes, or were they started without MPS (docs/gpu.md)?"
    )
