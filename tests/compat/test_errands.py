"""What SHMEM calls leave to the network is ordered by quiet, and what they put by fence too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from sundog.compat import shmem as library
from sundog.compat.shmem import NAMES
from sundog.compat.triton_dist import tid
from sundog.tools.check.schedules import Report, check
from sundog.world.world import World

put, put_nbi, get_nbi, my_pe, fence, quiet, barrier_all, sync_all = (
    NAMES[name]
    for name in ("putmem_block", "putmem_nbi_block", "getmem_nbi_block", "my_pe", "fence", "quiet",
                 "barrier_all", "sync_all")
)  # fmt: skip
put_signal_nbi, wait_until = NAMES["putmem_signal_nbi_block"], NAMES["signal_wait_until"]


@triton.jit
def reuse(x, y, flag, ORDER: tl.constexpr):
    if my_pe() == 0:
        put_nbi(y, x, 4, 1)
        if ORDER == "fence":
            fence()
        elif ORDER == "quiet":
            quiet()
        tl.store(x, 5)  # the source


@triton.jit
def fetch(x, y, flag, ORDER: tl.constexpr):
    if my_pe() == 0:
        get_nbi(x, y, 4, 1)
        if ORDER == "fence":
            fence()
        elif ORDER == "quiet":
            quiet()
        tl.store(flag, tl.load(x))


@triton.jit
def twice(x, y, flag, ORDER: tl.constexpr):
    if my_pe() == 0:
        put(y, x, 4, 1)
        if ORDER == "fence":
            fence()
        elif ORDER == "quiet":
            quiet()
        put(y, flag, 4, 1)


@triton.jit
def meet(x, y, flag, ORDER: tl.constexpr):
    if my_pe() == 0:
        put(y, x, 4, 1)
        if ORDER == "quiet":
            quiet()
    if ORDER == "barrier":
        barrier_all()
    else:
        sync_all()
    if my_pe() == 1:
        tl.store(x, tl.load(y))


@triton.jit
def answer(x, y, flag, ORDER: tl.constexpr):
    if my_pe() == 0:
        put_signal_nbi(y, x, 4, flag, 1, 9, 1)
        wait_until(flag, 0, 1)  # not for what was put, unless the peer waited for that
        tl.store(x, 5)
    else:
        if ORDER == "after":
            wait_until(flag, 0, 1)
        put_signal_nbi(y, x, 4, flag, 1, 9, 0)


@triton.jit
def by_one_thread(x, y, flag, ORDER: tl.constexpr):
    put_signal_nbi(y, x, 4, flag, 1, 9, 1 - my_pe())
    if tid(0) == 0:  # delivers what all threads have left
        wait_until(flag, 0, 1)


@triton.jit
def tile(x, y, flag, ORDER: tl.constexpr):
    at = tl.arange(0, 2)
    tl.store(x + at, at)
    if ORDER == "barrier":
        tl.debug_barrier()
    put_nbi(y, x, 8, my_pe())  # loads it as one word, now or later


def _rules(kernel: triton.JITFunction, order: str) -> set[str]:
    return {finding.rule for finding in _report(kernel, order).findings}


def _report(kernel: triton.JITFunction, order: str) -> Report:
    def main(world: World) -> None:
        x, y = (world.zeros((2,), torch.int32, name) for name in "xy")
        flag = world.zeros((1,), torch.int64, "flag")
        world.zeros((2,), torch.int64, library.WORDS)
        world.barrier()
        kernel[(1,)](x, y, flag, ORDER=order)

    return check(main, 2, schedules=3)


def _races(kernel: triton.JITFunction, order: str) -> set[tuple[int, int]]:
    report = _report(kernel, order)
    assert all(finding.kind == "race" for finding in report.findings), report
    sides = [(f.first, f.second) for f in report.findings]
    return {tuple(sorted(a.line for a in pair)) for pair in sides}  # type: ignore[union-attr, misc]


@pytest.mark.parametrize(
    ("kernel", "racing", "clean"),
    [
        (reuse, ("", "fence"), ("quiet",)),
        (fetch, ("", "fence"), ("quiet",)),
        (twice, ("",), ("fence", "quiet")),
        (meet, ("",), ("quiet", "barrier")),
        (answer, ("",), ("after",)),
    ],
)
def test_the_weakest_order_that_is_enough(
    kernel: triton.JITFunction, racing: tuple[str, ...], clean: tuple[str, ...]
) -> None:
    for order in clean:
        assert not _races(kernel, order), order
    for order in racing:
        assert len(_races(kernel, order)) == 1, order


def test_what_was_left_is_done_in_a_branch_of_one_thread() -> None:
    assert not _rules(by_one_thread, "")


def test_a_tile_that_a_put_reads_needs_a_barrier() -> None:
    assert _rules(tile, "") == {"no CTA barrier before the tile is read back"}
    assert not _rules(tile, "barrier")


def test_a_race_names_the_line_of_the_call() -> None:
    lines = Path(__file__).read_text().splitlines()
    call = next(i for i, line in enumerate(lines, 1) if "put_nbi(y, x, 4, 1)" in line)
    store = next(i for i, line in enumerate(lines, 1) if "# the source" in line)
    assert _races(reuse, "") == {(call, store)}
