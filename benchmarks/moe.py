"""What moe_dispatch and moe_combine promise, measured: their time beside a bare all-to-all's.

    SUNDOG_HEAP_SIZE=6G python -m benchmarks.moe --json FILE

Hidden 7168, top-8 of 256 experts, 8 ranks of `virtual`. The all-to-all moves as many bytes in equal
parts and routes nothing. The limit counts what the GPU must move at least, at the rate at which
torch copies: dispatch reads a token once and writes it for each expert, combine the other way. A
copy of all rows, each read and written, stands beside it. `--sweep` times more configs of each
algorithm. Without a GPU, small sizes run on the simulator and nothing is timed: so that the command
is known to work before it gets a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sundog import World, run
from sundog.errors import NotResident
from sundog.fused.moe_dispatch import Problem
from sundog.ops.load import algorithms
from sundog.ops.select import config_for
from sundog.target import has_gpu
from sundog.tools._subject import room
from sundog.tools.baselines import BASELINES
from sundog.tools.timing import machine

from .norm import micros

OPS = ("moe_dispatch", "moe_combine")
BARE = "our all_to_all, equal parts"
COPY = f"torch's copy of {256 << 20} bytes"
FEW = 128  # tokens, up to which the all-to-all is the goal; beyond, the copy limit is
TIMES_BARE, OF_LIMIT = 1.3, 0.85  # the goals
PUBLISHED = {  # DeepEP, low latency, on eight H200s, in us: a GPU for each rank, which differs
    ("moe_dispatch", 1): 11.9,
    ("moe_combine", 1): 12.6,
    ("moe_dispatch", 128): 35.1,
    ("moe_combine", 128): 67.7,
}


def main(
    world: Annotated[int, typer.Option(min=1, help="ranks")] = 8,
    tokens: Annotated[str, typer.Option(help="of a rank, with commas")] = "1,16,128,4096",
    seconds: Annotated[float, typer.Option(help="begin no new size after this")] = 70,
    sweep: Annotated[bool, typer.Option(help="time more configs of each algorithm")] = False,
    json_file: Annotated[str, typer.Option("--json", help="also write the result here")] = "",
) -> None:
    """Time dispatch and combine beside a bare all-to-all and the copy limit."""
    sizes = [int(word) for word in tokens.split(",")]
    print(HEADER, flush=True)
    until = time.monotonic() + seconds
    fn = functools.partial(_time_all, sizes=sizes, until=until, sweep=sweep, json_file=json_file)
    more = {} if has_gpu() else {"heap_size": 64 << 20}
    done = run(fn, world, "virtual" if has_gpu() else "sim", **more)[0]  # type: ignore[arg-type]
    if len(done) < len(OPS) * len(sizes):
        print(f"{len(OPS) * len(sizes) - len(done)} sizes were left out: the time was over")


def _problem(tokens: int, size: int) -> Problem:
    """Room for half as many again as the experts' mean, and 16: overflow is rare, and raises."""
    experts, topk, hidden = (256, 8, 7168) if has_gpu() else (2 * size, 2, 64)
    mean = -(-tokens * topk // experts)
    capacity = min(mean + mean // 2 + 16, tokens * topk)
    return Problem(tokens, hidden, torch.bfloat16, size, experts, topk, capacity)


def _time_all(
    world: World, sizes: list[int], until: float, sweep: bool, json_file: str
) -> list[dict[str, Any]]:
    """Time all rows. Rank 0 prints and writes each as it comes, since the run may be cut."""
    rows: list[dict[str, Any]] = []
    for tokens in sizes:
        for op in OPS:
            if any(world.exchange(time.monotonic() > until, "time is over")):
                return rows
            problem = _problem(tokens, world.size)
            with world.scope():
                calls = dict(_calls(world, op, problem, sweep))
                us = micros(world, calls, samples=8, at_least=4)
                world.barrier()
            least = next(iter(algorithms(op).values())).cost(problem).hbm_bytes
            row = {"op": op, "tokens": tokens, "us": us, "bytes": world.size * least}
            row["copied"] = 2 * world.size * tokens * problem.topk * problem.row
            rows.append(row)
            if world.rank == 0:
                print("\n".join(lines_of(rows[-1])), flush=True)
                if json_file:
                    content = {"machine": machine(), "rows": rows}
                    Path(json_file).write_text(json.dumps(content, indent=1))
    return rows


def _calls(
    world: World, op: str, problem: Problem, sweep: bool
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Make calls of every algorithm that takes the problem, the all-to-all, and torch's copy."""
    modules = algorithms(op)
    some = next(iter(modules.values()))
    given = some.inputs(world, problem, 0, exact=False)
    out = room(world, some, problem, given)
    for algo, module in modules.items():
        name = f"{op}.{algo}"
        first = config_for(name, module, problem, world._target, world.num_sms)
        for config in _configs(first) if sweep else [first]:
            if module.valid(problem, config) is None:
                plan = module.plan(world, problem, config)
                label = name if config == first else f"{name} {_short(config)}"
                with suppress(NotResident):  # on every rank alike
                    plan.launch(*given, out)
                    yield label, functools.partial(plan.launch, *given, out)
    yield BARE, BASELINES[op][BARE].make(world, problem, given, out)
    if world.rank == 0 and has_gpu():
        source = torch.empty(256 << 20, dtype=torch.uint8, device=world.device)
        target = torch.empty_like(source)
        yield COPY, lambda: target.copy_(source)
    else:
        yield COPY, lambda: None


def _configs(config: Any) -> list[Any]:
    """Return this one, and others: up to four programs on an SM, and 4 to 16 warps of each."""
    return [config] + [
        dataclasses.replace(config, programs=times * config.programs, num_warps=warps)
        for times in (1, 2, 3, 4)
        for warps in (4, 8, 16)
        if (times, warps) != (1, config.num_warps)
    ]


def _short(config: Any) -> str:
    return f"{config.programs}x{config.parts}x{config.num_warps}"


HEADER = f"{'op':33} {'tokens':>6} {'us':>9} {'all_to_all':>10} {'copying':>9}  goal"


def lines_of(row: dict[str, Any]) -> list[str]:
    """Return the figures of each algorithm, and the goal that counts for the size."""
    bare, copy = row["us"][BARE], row["us"][COPY]
    rate = 2 * (256 << 20) / copy if copy else 0.0  # bytes a us
    limit = row["bytes"] / rate if rate else 0.0
    return [
        f"{name:33} {row['tokens']:6} {us:9.1f} {bare:10.1f} {limit:9.1f}  "
        f"{_verdict(row, us, bare, limit)}"
        for name, us in row["us"].items()
        if name not in (BARE, COPY)
    ]


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
    if row["tokens"] > FEW:
        text += f"; {row['copied'] / row['bytes'] * limit / us:.2f} of a copy of all rows"
    known = PUBLISHED.get((row["op"], row["tokens"]))
    return text + (f"; DeepEP on eight GPUs {known}" if known else "")


if __name__ == "__main__":
    typer.run(main)
