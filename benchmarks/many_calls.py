"""Thousands of mixed calls, each compared with what it must give; and what signals by stores cost.

    python -m benchmarks.many_calls host --calls 10000      peers' data and flags in host memory
    python -m benchmarks.many_calls streams --calls 10000   two streams, another order on each rank
    python -m benchmarks.many_calls streams --checked 20    the same, checked on the simulator
    python -m benchmarks.many_calls forms                   time of stores against atomics

On a GPU, backend `virtual`; on a CPU all run on the simulator. There `forms` times nothing: it
compares the results of both forms.
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
from sundog.ops.load import algorithms, find
from sundog.target import has_gpu
from sundog.tools._subject import room
from sundog.tools.check.schedules import check_once
from sundog.tools.timing import Variant, measure
from sundog.world.waits import signal_form

app = typer.Typer(help="Many calls of ops, and the two forms of signals.", no_args_is_help=True)
Calls = Annotated[int, typer.Option(min=1, help="calls in all")]
Ranks = Annotated[int, typer.Option("--world", min=1, help="ranks")]
Checked = Annotated[int, typer.Option(min=0, help="schedules of the checker that share the calls")]
Json = Annotated[str, typer.Option("--json", help="also write the result to this file")]

_SIZES = (17, 1000, 40_000)
_FORMS = ("atomic", "store")
_MOST_OVER_ATOMIC = 1.1
_LOOK_EVERY = 50  # calls between two looks at the results: a look waits for the GPU


class Mixed:
    """Calls of several ops on symmetric tensors of a stream; each knows what it must give."""

    def __init__(self, world: World, number: int, sizes: tuple[int, ...]) -> None:
        self._world, self._number, self.wrong, self.made, self._looked = world, number, 0, 0, 0
        self._calls = [
            self._call(op, numel, place)
            for place, (op, numel) in enumerate((o, n) for n in sizes for o in _OPS)
        ]

    def _call(self, op: str, numel: int, place: int) -> tuple[Callable[[], Any], Any, Any]:
        world = self._world
        parts = [
            _values(rank, numel * world.size, place, world.device) for rank in range(world.size)
        ]
        want = _OPS[op](parts, world.rank)
        x, out = world.as_symmetric(parts[world.rank]), world.empty(want.shape, want.dtype)
        name, _, algo = op.partition(".")
        function = getattr(world, name)
        return functools.partial(function, x, out=out, algo=algo), out, want

    def start(self) -> None:
        call, _, _ = self._calls[self.made % len(self._calls)]
        with self._world.stream(self._number):
            call()
        self.made += 1

    def look(self) -> None:
        """Compare the results of all calls since the last look, then spoil them."""
        since = range(max(self._looked, self.made - len(self._calls)), self.made)
        for place in since:
            _, out, want = self._calls[place % len(self._calls)]
            self.wrong += int(not torch.equal(out, want))
            out.zero_()
        self._looked = self.made


def _values(rank: int, numel: int, place: int, device: torch.device) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32, device=device) % 977 * (rank + 1) + place


def _sum(parts: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.stack(parts).sum(0, dtype=torch.int32)


def _exchanged(parts: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat([part.chunk(len(parts))[rank] for part in parts])


_OPS: dict[str, Callable[[list[torch.Tensor], int], torch.Tensor]] = {
    "all_gather.push": lambda parts, rank: torch.cat(parts),
    "all_gather.pull": lambda parts, rank: torch.cat(parts),
    "all_reduce.one_shot": _sum,
    "all_reduce.two_shot": _sum,
    "all_to_all.push": _exchanged,
    "reduce_scatter.direct": lambda parts, rank: _sum(parts, rank).chunk(len(parts))[rank],
}


def _rounds(
    world: World, numbers: tuple[int, ...], calls: int, sizes: tuple[int, ...] = _SIZES
) -> dict[str, Any]:
    """Call on these streams in turn; each rank begins with another stream."""
    mixed = [Mixed(world, number, sizes) for number in numbers]
    world.barrier()
    for _ in range(2):  # plans are made in one order; a new stream narrows those of the others
        for each in mixed:
            for _ in each._calls:
                each.start()
    world.barrier()
    begin = time.perf_counter()
    for turn in range(calls // len(mixed)):
        for step in range(len(mixed)):
            mixed[(step + world.rank) % len(mixed)].start()
        if turn % _LOOK_EVERY == _LOOK_EVERY - 1:
            world.synchronize()
            for each in mixed:
                each.look()
            world.barrier()  # nobody writes an output that its rank still looks at
    world.synchronize()
    for each in mixed:
        each.look()
    wrong = sum(world.exchange(sum(each.wrong for each in mixed)))
    seconds = time.perf_counter() - begin
    return {"calls": calls, "wrong": wrong, "seconds": seconds, "world": world.size}


def _backend() -> str:
    return "virtual" if has_gpu() else "sim"


def _write(file: str, rows: Any) -> None:
    if file:
        Path(file).write_text(json.dumps(rows, indent=1))


@app.command()
def host(calls: Calls = 10_000, world: Ranks = 2, json_file: Json = "") -> None:
    """Signal by stores; on a GPU with all memory of ranks 1, 2, ... in pinned host memory."""
    link = {"link": "host"} if has_gpu() else {}
    fn = functools.partial(_rounds, numbers=(0,), calls=calls)
    found = run(fn, world, _backend(), signals="store", heap_size=256 << 20, **link)[0]  # type: ignore[arg-type]
    _write(json_file, found)
    print(found)
    raise typer.Exit(int(found["wrong"] > 0))


@app.command()
def streams(
    calls: Calls = 10_000, world: Ranks = 4, json_file: Json = "", checked: Checked = 0
) -> None:
    """Ops on two streams at once, launched in another order on every rank."""
    if checked:
        fn = functools.partial(_rounds, numbers=(1, 2), calls=calls // checked, sizes=_SIZES[:1])
        found = _checked(fn, world, range(checked))
    else:
        fn = functools.partial(_rounds, numbers=(1, 2), calls=calls)
        found = run(fn, world, _backend(), heap_size=256 << 20)[0]
    _write(json_file, found)
    print(found)
    raise typer.Exit(int(found["wrong"] + found.get("findings", 0) > 0))


def _checked(fn: Callable[[World], Any], world: int, schedules: range) -> dict[str, Any]:
    """Run all calls under the checker: an equal share in each random schedule."""
    total = {"calls": 0, "wrong": 0, "seconds": 0.0, "findings": 0, "world": world}
    for seed in schedules:
        report = check_once(fn, world, f"random:{seed}")
        if report.findings:
            print(report, flush=True)
        found = report.results[0] or {"calls": 0, "wrong": 0, "seconds": 0.0}
        total["findings"] += len(report.findings)
        for name in ("calls", "wrong", "seconds"):
            total[name] += found[name]
    return total


@app.command()
def forms(world: Ranks = 8, seconds: float = 50.0, json_file: Json = "") -> None:
    """Time every op of the mix with atomics and with stores; the second over the first."""
    header = f"{'op':36} {'size':>9}  {'atomic':>9}  {'store':>9}  store over atomic"
    print(header, flush=True)
    until = time.monotonic() + seconds
    fn = functools.partial(_time_forms, until=until, json_file=json_file)
    run(fn, world, _backend(), heap_size=256 << 20)


def _verdict(row: dict[str, Any]) -> str:
    if not row["atomic"]:
        return "not timed: both forms gave the same bits"
    ratio = row["store"] / row["atomic"]
    reached = "reached" if ratio <= _MOST_OVER_ATOMIC else "MISSED"
    shown = "  ".join(f"{1e6 * row[form]:6.2f} us" for form in _FORMS)
    return f"{shown}  {ratio:.3f} (at most {_MOST_OVER_ATOMIC}: {reached})"


def _time_forms(world: World, until: float, json_file: str) -> None:
    """Rank 0 prints and writes each row as it comes, since the run may be cut."""
    rows: list[dict[str, Any]] = []
    for op, sizes in _cases(world):
        for shown, problem in sizes.items():
            if any(world.exchange(time.monotonic() > until, "time is over")):
                return
            with world.scope():
                rows.append({"op": op, "size": shown, **_both_forms(world, op, problem)})
                world.barrier()
            if world.rank == 0:
                print(f"{op:36} {shown:>9}  " + _verdict(rows[-1]), flush=True)
                _write(json_file, rows)


def _both_forms(world: World, op: str, problem: Any) -> dict[str, float]:
    """Return seconds by form, once both have given the same bits."""
    calls, outs = {}, []
    for form in _FORMS:
        world.kernel_mode = signal_form(form, world.device, True)
        calls[form], out = _timed_call(world, op, problem)
        outs.append(out.clone())
    world.barrier()
    if not all(world.exchange(torch.equal(*outs), "both forms give the same")):
        raise SystemExit(f"{op} of {problem}: the results of the two forms differ")
    return _seconds(world, calls)


def _cases(world: World) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ops, and their problems by size."""
    for op in (*_OPS, "all_reduce.low_latency"):
        numels = [64, 4096, 1 << 20] if has_gpu() else [64]
        numels = [n for n in numels if "low_latency" not in op or n <= 4096]
        make = find(op).Problem
        yield op, {f"{n:,}": make(n, torch.bfloat16, world.size) for n in numels}
    shapes = [(1, 4096), (32, 4096)] if has_gpu() else [(2, 64)]
    for algo, module in algorithms("all_reduce_rms_norm").items():
        made = {f"{t} x {h}": module.Problem(t, h, torch.bfloat16, world.size) for t, h in shapes}
        fit = {k: p for k, p in made.items() if module.valid(p, module.default(p, 1)) is None}
        yield f"all_reduce_rms_norm.{algo}", fit


def _seconds(world: World, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Time a call, by form; 0 where nothing can be timed."""
    if world.device.type == "cpu":
        return dict.fromkeys(calls, 0.0)
    variants = [Variant(form, [call], ready=True) for form, call in calls.items()]
    times = measure(world, variants, samples=10)
    return {each.name: each.median for each in times}


def _timed_call(world: World, op: str, problem: Any) -> tuple[Callable[[], Any], torch.Tensor]:
    """Make a plan and its output; its launches keep the form that the world had."""
    module, form = find(op), world.kernel_mode
    given = module.inputs(world, problem, 0)
    out = room(world, module, problem, given)
    plan = module.plan(world, problem, module.default(problem, world.num_sms))

    def call() -> None:
        world.kernel_mode = form
        plan.launch(*given, out)

    call()
    world.barrier()
    return call, out


if __name__ == "__main__":
    app()
