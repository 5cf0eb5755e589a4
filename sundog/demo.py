"""`sundog demo`: what sundog does, in a minute, on a machine without a GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.markup import escape

from .backends.sim import Sim
from .device import context, memory, signal
from .errors import Deadlock
from .report.page import check_assets, write_report
from .report.sections import read_sections, section
from .tools._options import CheckOptions, TraceOptions
from .tools.check.mutation import Verdicts
from .tools.check.schedules import Report, check_once
from .tools.check.space_time import content_of
from .tools.trace.timeline import write
from .tools.trace.trace_command import trace_op
from .world.world import World

RANKS, NUMEL = 8, 1000
PAGE = "sundog-demo.html"


@triton.jit
def pass_right(x, inbox, out, flag, ctx, n, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    right, left = (rank + 1) % size, (rank + size - 1) % size
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at, mask=at < n), right, ctx, mask=at < n)
    if BARRIER:  # the tile, stored by all warps, before the flag, set by one thread
        tl.debug_barrier()
    tl.atomic_xchg(memory.translate(flag, right, ctx), 1, sem="release", scope="sys")
    signal.wait(flag, left, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


def rank_function(*, barrier: bool = True, silent: int = -1) -> Callable[[World], Any]:
    """Return each rank's function: pass a tensor to the right. Rank `silent` does nothing."""

    def run(world: World) -> torch.Tensor:
        torch.manual_seed(42 + world.rank)
        x = world.randn((NUMEL,), name="x")
        inbox = world.empty((NUMEL,), name="inbox")
        out = torch.empty(NUMEL)
        flag = world.signals(1, "flag")
        world.barrier()
        if world.rank != silent:
            pass_right[(1,)](x, inbox, out, flag, world.ctx, NUMEL, BARRIER=barrier, BLOCK=1024)
        assert silent >= 0 or torch.equal(out, world.exchange(x)[world.rank - 1])
        return out

    return run


right = rank_function()
racy = rank_function(barrier=False)


def main() -> None:
    from . import run

    console = Console(emoji=False, highlight=False)
    console.print(
        f"[bold]1.[/] {RANKS} ranks, each a thread of this process, run an unmodified "
        "@triton.jit kernel: store a tile to the right neighbour, signal, wait for the left one."
    )
    start = time.perf_counter()
    run(rank_function(), RANKS, "sim", sim=Sim("random:1"))
    console.print(
        f"   every rank has its neighbour's {NUMEL} floats, compared bit by bit "
        f"({time.perf_counter() - start:.2f} s)\n"
    )

    console.print("[bold]2.[/] The same, but rank 3 never launches its kernel:")
    try:
        run(rank_function(silent=3), RANKS, "sim", sim=Sim("random:1"))
    except Deadlock as error:
        console.print(escape(_first_lines(str(error), 14)), style="yellow")

    console.print(
        "\n[bold]3.[/] The same, without the CTA barrier between the tile and the flag. The values "
        "come out right here; on a GPU they may not. The checker:"
    )
    report = check_once(racy, 4, "random:1")
    console.print(escape(str(report.findings[0])), style="yellow")

    console.print("\n[bold]4.[/] That race, and the trace of an all-gather, to look at:")
    console.print(f"   {escape(_write_page(report))}")

    console.print(
        "\n[bold]Next:[/] the tutorials of the repository, beginning with "
        "tutorials/01_store_to_a_peer.py,\nand an op of your own, with a check of it:\n"
        f"  {_command()} new op row_sum\n  {_command()} check row_sum.py --world 3 --mutate"
    )


def _command() -> str:
    """Return how a shell finds `sundog`: `make demo` leaves it in .venv, outside the PATH."""
    local = os.path.join(".venv", "bin", "sundog")
    return local if os.path.exists(local) and shutil.which("sundog") is None else "sundog"


def _write_page(report: Report) -> str:
    """Write both on one page. Return its path, or why it was not written."""
    try:
        check_assets()
    except ValueError as error:
        return f"skipped: {error}"
    options = CheckOptions("sundog.demo:racy", 4, 1, 1)
    race = content_of(options, [(racy, report)], ([], Verdicts()), "")
    with tempfile.TemporaryDirectory() as folder:
        trace = os.path.join(folder, "all_gather.json")
        write(trace_op(TraceOptions("all_gather", world=4, backend="sim", out=trace)), trace)
        write_report(PAGE, [section(race, "demo"), *read_sections(trace)])
    return f"{os.path.abspath(PAGE)} opens in any browser"


def _first_lines(text: str, count: int) -> str:
    lines = text.split("\n")
    more = [f"  ... {len(lines) - count} more lines"] if len(lines) > count else []
    return "\n".join("   " + line for line in lines[:count] + more)
