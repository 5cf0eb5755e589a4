"""What moe_dispatch and moe_combine promise, measured: their time beside a bare all-to-all's.

    SUNDOG_HEAP_SIZE=6G python -m benchmarks.moe --json FILE

Hidden 7168, top-8 of 256 experts, 8 ranks of `virtual`. The all-to-all moves as many bytes in equal
parts and routes nothing. The limit counts what the GPU must move: every row is read once and
written once, at the rate at which torch copies. Without a GPU, small sizes run on the simulator and
nothing is timed: so that the command is known to work before it gets a GPU.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sundog import World, run
from sundog.fused import moe_combine, moe_dispatch
from sundog.target import has_gpu
from sundog.tools._subject import room
from sundog.tools.baselines import BASELINES
from sundog.tools.timing import machine

from .norm import micros

__all__ = ["line_of"]

MODULES = {"moe_dispatch": moe_dispatch, "moe_combine": moe_combine}
BARE = "our all_to_all, equal parts"
COPY = f"torch's copy of {256 << 20} bytes"
FEW = 128  # tokens, up to which the all-to-all is the goal; beyond, the copy limit is
TIMES_BARE, OF_LIMIT = 1.3, 0.85  # the goals
PUBLISHED = {  # DeepEP, low latency, on eight H200s, in us: a GPU for each rank, which differs
    ("moe_dispatch", 1): 11.9, ("moe_combine", 1): 12.6,
    ("moe_dispatch", 128): 35.1, ("moe_combine", 128): 67.7,
}  # fmt: skip


def main(
    world: Annotated[int, typer.Option(min=1, help="ranks")] = 8,
    tokens: Annotated[str, typer.Option(help="of a rank, with commas")] = "1,16,128,4096",
    seconds: Annotated[float, typer.Option(help="begin no new size after this")] = 70,
    json_file: Annotated[str, typer.Option("--json", help="also write the result here")] = "",
) -> None:
    """Time dispatch and combine beside a bare all-to-all and the copy limit."""
    sizes = [int(word) for word in tokens.split(",")]
    print(HEADER, flush=True)
    until = time.monotonic() + seconds
    fn = functools.partial(_time_all, sizes=sizes, until=until, json_file=json_file)
    more = {} if has_gpu() else {"heap_size": 64 << 20}
    rows = run(fn, world, "virtual" if has_gpu() else "sim", **more)[0]  # type: ignore[arg-type]
    if len(rows) < len(MODULES) * len(sizes):
        print(f"{len(MODULES) * len(sizes) - len(rows)} figures were left out: the time was over")


def _problem(op: str, tokens: int, size: int) -> Any:
    """Room for half as many again as the experts' mean, and 16: overflow is rare, and raises."""
    experts, topk, hidden = (256, 8, 7168) if has_gpu() else (2 * size, 2, 64)
    mean = -(-tokens * topk // experts)
    capacity = min(mean + mean // 2 + 16, tokens * topk)
    return moe_dispatch.Problem(tokens, hidden, torch.bfloat16, size, experts, topk, capacity)


def _time_all(world: World, sizes: list[int], until: float, json_file: str) -> list[dict[str, Any]]:
    """All rows. Rank 0 prints and writes each as it comes, since the run may be cut."""
    rows: list[dict[str, Any]] = []
    for tokens in sizes:
        for op in MODULES:
            if any(world.exchange(time.monotonic() > until, "time is over")):
                return rows
            problem = _problem(op, tokens, world.size)
            with world.scope():
                us = micros(world, dict(_calls(world, op, problem)), samples=8, at_least=4)
                world.barrier()
            moved = 2 * world.size * tokens * problem.topk * problem.row  # read and written
            rows.append({"op": op, "tokens": tokens, "us": us, "bytes": moved})
            if world.rank == 0:
                print(line_of(rows[-1]), flush=True)
                if json_file:
                    content = {"machine": machine(), "rows": rows}
                    Path(json_file).write_text(json.dumps(content, indent=1))
    return rows


def _calls(world: World, op: str, problem: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    module = MODULES[op]
    given = module.inputs(world, problem, 0, exact=False)
    out = room(world, module, problem, given)
    plan = module.plan(world, problem, module.default(problem, world.num_sms))
    yield op, lambda: plan.launch(*given, out)
    yield BARE, BASELINES[op][BARE].make(world, problem, given, out)
    if world.rank == 0 and has_gpu():
        source = torch.empty(256 << 20, dtype=torch.uint8, device=world.device)
        target = torch.empty_like(source)
        yield COPY, lambda: target.copy_(source)
    else:
        yield COPY, lambda: None


HEADER = f"{'op':13} {'tokens':>6} {'us':>9} {'all_to_all':>10} {'copying':>9}  goal"


def line_of(row: dict[str, Any]) -> str:
    """The figures, and the goal that counts for the size."""
    us, bare = row["us"][row["op"]], row["us"][BARE]
    rate = 2 * (256 << 20) / row["us"][COPY] if row["us"][COPY] else 0.0  # bytes a us
    limit = row["bytes"] / rate if rate else 0.0
    return (
        f"{row['op']:13} {row['tokens']:6} {us:9.1f} {bare:10.1f} {limit:9.1f}  "
        f"{_verdict(row, us, bare, limit)}"
    )


def _verdict(row: dict[str, Any], us: float, bare: float, limit: float) -> str:
    if not us:
        return "not timed"
    if row["tokens"] <= FEW:
        is_reached = us <= TIMES_BARE * bare
        text = f"{us / bare:.2f} x all_to_all (at most {TIMES_BARE}"
    else:
        is_reached = limit >= OF_LIMIT * us
        text = f"{limit / us:.2f} of the copy limit (at least {OF_LIMIT}"
    text += f": {'reached' if is_reached else 'MISSED'})"
    known = PUBLISHED.get((row["op"], row["tokens"]))
    return text + (f"; DeepEP on eight GPUs {known}" if known else "")


if __name__ == "__main__":
    typer.run(main)
