"""What all_reduce_rms_norm promises, measured: its time beside its goals, and the bits of its rows.

    python -m benchmarks.norm times --json FILE     against the plain all-reduce, and torch's norm
    python -m benchmarks.norm bits                  1 to 8,192 tokens against rows one at a time
    python -m benchmarks.norm entries FILE TARGET   the best configs of `times`, for algo="auto"

8 ranks of `virtual` by default. Without a GPU, `times` runs every call once on the simulator, in
small sizes, and times nothing: so that the command is known to work before it gets a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sundog import World, run
from sundog.ops.load import algorithms, plain
from sundog.ops.select import Entry, config_for, write_entries
from sundog.target import has_gpu
from sundog.tools._subject import room
from sundog.tools.baselines import BASELINES
from sundog.tools.timing import Variant, machine, measure

app = typer.Typer(help="Goals of all_reduce_rms_norm.", no_args_is_help=True)
OP, PLAIN = "all_reduce_rms_norm", "all_reduce"
UNFUSED = "our all-reduce, then torch's norm"
FEW, SOME = 32, 256  # tokens, up to which a goal counts
MORE_US, TIMES_BYTES, TIMES_AS_FAST = 1.5, 1.1, 1.5  # the goals
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
_CROWDED = ("one_shot", "two_shot_sliced")  # two programs of these fit an SM
Ranks = Annotated[int, typer.Option("--world", min=2, help="ranks")]
Hidden = Annotated[str, typer.Option(help="elements of a row, with commas")]
Tokens = Annotated[str, typer.Option(help="rows, with commas")]
Json = Annotated[str, typer.Option("--json", help="also write the result to this file")]
Seconds = Annotated[float, typer.Option(help="begin no new size after this")]
Algos = Annotated[str, typer.Option(help="algorithms of both ops; fewer compile faster")]


@app.command()
def times(
    world: Ranks = 8,
    hidden: Hidden = "4096,7168",
    tokens: Tokens = ",".join(map(str, TOKENS)),
    seconds: Seconds = 90,
    algos: Algos = ",".join(algorithms(OP)),
    json_file: Json = "",
) -> None:
    """Time every algorithm beside the plain all-reduce and the unfused form; compare with goals."""
    sizes = [(n, h) for n in _numbers(tokens) for h in _numbers(hidden)]
    if not set(algos.split(",")) <= set(algorithms(OP)):
        raise typer.BadParameter(f"--algos {algos}: there are {', '.join(algorithms(OP))}")
    backend = "virtual" if has_gpu() else "sim"
    heap = 4 << 30 if has_gpu() else 64 << 20
    until = time.monotonic() + seconds
    print(HEADER, flush=True)
    fn = functools.partial(
        _time_all, sizes=sizes, chosen=algos.split(","), until=until, json_file=json_file
    )
    rows = run(fn, world, backend, heap_size=heap)[0]
    if len(rows) < len(sizes):
        print(f"{len(sizes) - len(rows)} of {len(sizes)} sizes were left out: the time was over")


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _time_all(
    world: World, sizes: list[tuple[int, int]], chosen: list[str], until: float, json_file: str
) -> list[dict[str, Any]]:
    """Time all rows. Rank 0 prints and writes each as it comes, since the run may be cut."""
    rows: list[dict[str, Any]] = []
    for tokens, hidden in sizes:
        if any(world.exchange(time.monotonic() > until, "time is over")):
            break
        with world.scope():
            made = list(_calls(world, tokens, hidden, chosen))
            us = micros(world, {name: call for name, call, _ in made}, samples=10, at_least=20)
            configs = {name: plain(config) for name, _, config in made if config}
            rows.append({"tokens": tokens, "hidden": hidden, "us": us, "configs": configs})
            world.barrier()
        if world.rank == 0:
            print(line_of(rows[-1], world.size), flush=True)
            if json_file:
                content = {"machine": machine(), "world": world.size, "num_sms": world.num_sms}
                content["rows"] = rows
                Path(json_file).write_text(json.dumps(content, indent=1))
    return rows


def micros(
    world: World, calls: dict[str, Callable[[], Any]], samples: int, at_least: int
) -> dict[str, float]:
    """Microseconds by name; 0 where nothing can be timed."""
    if world.device.type == "cpu":
        for call in calls.values():
            call()
        world.barrier()
        return dict.fromkeys(calls, 0.0)
    variants = [Variant(name, [call]) for name, call in calls.items()]
    found = measure(world, variants, samples=samples, at_least=at_least)
    return {each.name: 1e6 * each.median for each in found}


def _calls(
    world: World, tokens: int, hidden: int, chosen: list[str]
) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Make calls of both ops' algorithms that take the size, and of the unfused form.

    Name, call and config. Beyond a row for each SM those in _CROWDED also with two programs on an
    SM; low_latency with every number of pieces that fits.
    """
    modules = {algo: module for algo, module in algorithms(OP).items() if algo in chosen}
    problem = next(iter(modules.values())).Problem(tokens, hidden, torch.bfloat16, world.size)
    given = next(iter(modules.values())).inputs(world, problem, 0)
    for algo, module in modules.items():
        yield from _one(world, f"{OP}.{algo}", module, problem, given)
        config = module.default(problem, world.num_sms)
        if algo in _CROWDED and config.programs < tokens:
            more = dataclasses.replace(config, programs=2 * config.programs)
            yield from _one(world, f"{OP}.{algo} x{more.programs}", module, problem, given, more)
        for pieces in (1, 2, 4, 8) if algo == "low_latency" else ():
            programs = min(config.programs, tokens, world.num_sms // pieces)
            if programs:
                more = dataclasses.replace(config, programs=programs, pieces=pieces)
                yield from _one(world, f"{OP}.{algo} /{pieces}", module, problem, given, more)
    for algo, module in algorithms(PLAIN).items():
        x = given[0].view(-1)
        flat = module.Problem(x.numel(), torch.bfloat16, world.size)
        if algo in modules:
            yield from _one(world, f"{PLAIN}.{algo}", module, flat, (x,))
    if world.device.type != "cpu":  # its torch kernels are not a rank's on the simulator
        out = room(world, next(iter(modules.values())), problem, given)
        yield UNFUSED, BASELINES[OP][UNFUSED].make(world, problem, given, out), None


def _one(
    world: World,
    name: str,
    module: Any,
    problem: Any,
    given: tuple[torch.Tensor, ...],
    config: Any = None,
) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    """Plan with a config, by default the measured best if it fits; return plan and launch."""
    op = name.partition(" ")[0]
    config = config or config_for(op, module, problem, world._target, world.num_sms)
    if module.valid(problem, config) is None:
        plan = module.plan(world, problem, config)
        out = room(world, module, problem, given)
        yield name, lambda: plan.launch(*given, out), config


@app.command()
def entries(file: Path, target: Path) -> None:
    """Put the best config of each algorithm and size of FILE into a target's file."""
    content = json.loads(file.read_text())
    found = [entry for row in content["rows"] for entry in _entries_of(row, content, file.name)]
    write_entries(target, found)
    print(f"{len(found)} entries")


def _entries_of(row: dict[str, Any], content: dict[str, Any], run: str) -> Iterator[Entry]:
    date = content["machine"]["date"][:10]
    for algo, module in algorithms(OP).items():
        names = [n for n in row["configs"] if n.partition(" ")[0] == f"{OP}.{algo}"]
        if names:
            best = min(names, key=lambda name: row["us"][name])
            problem = plain(
                module.Problem(row["tokens"], row["hidden"], torch.bfloat16, content["world"])
            )
            seconds = round(1e-6 * row["us"][best], 9)
            config = row["configs"][best]
            yield Entry(f"{OP}.{algo}", problem, config, seconds, date, run, content["num_sms"])


# goals


HEADER = f"{'hidden':>6} {'tokens':>6}  {'best of ours':22} {'plain':>22} {'unfused':>9}  goals"


def line_of(row: dict[str, Any], world: int) -> str:
    """Return each best time, and what it says of the goals that count for the size."""
    ours, plain, unfused = _best(row, OP), _best(row, PLAIN), row["us"].get(UNFUSED, 0.0)
    goals = "; ".join(_verdicts(row, ours, plain, unfused, world))
    return (
        f"{row['hidden']:6} {row['tokens']:6}  {_shown(*ours):22} {_shown(*plain):>22} "
        f"{unfused:9.1f}  {goals}"
    )


def _best(row: dict[str, Any], op: str) -> tuple[str, float]:
    found = {name: us for name, us in row["us"].items() if name.startswith(f"{op}.")}
    if not found:
        return "none fits", 0.0
    name = min(found, key=lambda each: found[each])
    return name.partition(".")[2], found[name]


def _shown(algo: str, us: float) -> str:
    return f"{algo} {us:.2f} us"


def _verdicts(
    row: dict[str, Any],
    ours: tuple[str, float],
    plain: tuple[str, float],
    unfused: float,
    world: int,
) -> Iterator[str]:
    if not ours[1]:
        return
    if not plain[1]:
        yield "no plain all-reduce to compare with"
    elif row["tokens"] <= FEW:
        more = ours[1] - plain[1]
        yield _said(f"{more:+.2f} us", more <= MORE_US, f"at most {MORE_US} over plain")
    else:
        ratio = (world + 3) / (world + 1) if ours[0].startswith("one_shot") else 3 / 2
        found = ours[1] / plain[1]
        limit = TIMES_BYTES * ratio
        yield _said(f"{found:.2f} x plain", found <= limit, f"at most {limit:.2f}")
    if row["tokens"] <= SOME:
        faster = unfused / ours[1]
        wanted = f"at least {TIMES_AS_FAST} times as fast"
        yield _said(f"{faster:.2f} x unfused", faster >= TIMES_AS_FAST, wanted)


def _said(found: str, is_reached: bool, goal: str) -> str:
    return f"{found} ({goal}: {'reached' if is_reached else 'MISSED'})"


# bits


@app.command()
def bits(
    world: Ranks = 8,
    hidden: Hidden = "2880,4096,7168",
    most: int = 8192,
    singles: int = 256,
    algos: Algos = ",".join(algorithms(OP)),
) -> None:
    """Compare rows of calls of 1 to `most` tokens, of every algorithm, with rows one at a time.

    The largest call is compared with `singles` rows spread over it, the other calls with it.
    """
    backend = "virtual" if has_gpu() else "sim"
    heap = 2 << 30 if has_gpu() else 64 << 20
    wrong = 0
    for size in _numbers(hidden):
        chosen = algos.split(",")
        fn = functools.partial(_compare, hidden=size, most=most, singles=singles, chosen=chosen)
        compared, found = run(fn, world, backend, heap_size=heap)[0]
        wrong += len(found)
        print(
            f"hidden {size}: {compared:,} rows compared, {len(found)} differ {found[:5]}",
            flush=True,
        )
    raise typer.Exit(int(wrong > 0))


def _compare(
    world: World, hidden: int, most: int, singles: int, chosen: list[str]
) -> tuple[int, list[str]]:
    torch.manual_seed(world.rank)
    x = world.empty((most, hidden), torch.bfloat16, "x").normal_()
    torch.manual_seed(99)
    residual = torch.randn(most, hidden, device=world.device).bfloat16()
    weight = torch.randn(hidden, device=world.device).bfloat16()
    whole = [each.clone() for each in world.all_reduce_rms_norm(x, residual, weight)]
    wrong = _wrong_rows(world, (x, residual, weight), whole, singles)
    compared = min(singles, most)
    counts = sorted({1, 2, 3, 8, 31, 32, 33, 257, 1024, 4095, most})
    for count in (n for n in counts if n <= most):
        for algo, module in algorithms(OP).items():
            problem = module.Problem(count, hidden, torch.bfloat16, world.size)
            config = module.default(problem, world.num_sms)
            if algo not in chosen or module.valid(problem, config) is not None:
                continue
            found = world.all_reduce_rms_norm(x[:count], residual[:count], weight, algo=algo)
            compared += count
            if not all(torch.equal(a, b[:count]) for a, b in zip(found, whole, strict=True)):
                wrong.append(f"{algo}, {count} tokens")
    return compared, [each for rank in world.exchange(wrong) for each in rank]


def _wrong_rows(
    world: World, given: tuple[torch.Tensor, ...], whole: list[torch.Tensor], singles: int
) -> list[str]:
    """Name rows that differ in a call of their own, which reads them from one place."""
    x, residual, weight = given
    one, out = world.empty((1, x.shape[1]), x.dtype), world.empty((2, x.shape[1]), x.dtype)
    wrong = []
    for row in range(0, len(x), max(len(x) // singles, 1)):
        one.copy_(x[row])
        world.all_reduce_rms_norm(one, residual[row : row + 1], weight, out=out, algo="one_shot")
        if not (torch.equal(out[0], whole[0][row]) and torch.equal(out[1], whole[1][row])):
            wrong.append(f"row {row}")
    return wrong


if __name__ == "__main__":
    app()
