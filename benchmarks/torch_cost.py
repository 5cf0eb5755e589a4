"""What torch adds to a small all-reduce on the host: `python -m benchmarks torch-cost`.

Each row is a way to call: eager, through the op of torch, with a gradient to come, compiled,
compiled with mode="reduce-overhead" (Inductor's CUDA graphs), captured. Each is timed for an empty
op of torch too, whose kernel only makes its output. The goals are for the difference: 15 us eager,
10 us compiled. A few calls are made in a row and then waited for, so that the queue never fills.

The empty op has its formula from torch.library.register_autograd, as any op of torch would. Its
kernel for a gradient asks the dispatcher a second time, in about half of the time of an eager call.
Ours do without (sundog/torch/library.py), so a difference can be less than nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sundog.launch import run
from sundog.torch.library import ops
from sundog.world.world import World

from .result_files import Figures

_IN_A_ROW, _SAMPLES, _WARM_UP = 20, 40, 5
_NUMEL = 4096
GOALS = {"eager": 15.0, "compiled": 10.0}  # us over the empty op

Call = Callable[[Tensor], Any]
Make = Callable[[], Call]


def _define_empty() -> torch.library.Library:
    """Make an op of the same signature, with a formula, whose kernel only makes its output."""
    library = torch.library.Library("sundog_benchmark", "DEF")
    library.define("empty(Tensor x, str op, str algo, str world) -> Tensor")
    for device in ("CPU", "CUDA"):
        library.impl("empty", lambda x, op, algo, world: torch.empty_like(x), device)
    name = "sundog_benchmark::empty"
    torch.library.register_fake(name, lambda x, *rest: torch.empty_like(x), lib=library)
    torch.library.register_autograd(
        name, lambda ctx, grad: (grad, None, None, None), setup_context=_keep_nothing, lib=library
    )
    return library


def _keep_nothing(ctx: Any, inputs: tuple, output: Tensor) -> None:
    pass


def main(backend: str, size: int, json_file: str) -> None:
    """Print the table: microseconds per call on the slowest rank."""
    library = _define_empty()
    rows: list[list[str]] = run(_time_all, size, backend)[0]
    text = (
        f"{_NUMEL} numbers of bfloat16, {_IN_A_ROW} calls in a row, CPU clock, median of the "
        f"slowest rank. Goals: {GOALS['eager']:.0f} us over the empty op eager, "
        f"{GOALS['compiled']:.0f} us compiled."
    )
    head = ["call", "all_reduce, us", "empty op, us", "difference, us"]
    title = f"What torch adds to an all-reduce on the host (`{backend}`, {size} ranks)"
    Figures(title, text, head, rows).show(json_file, on_cpu=not torch.cuda.is_available())
    library._destroy()


def _time_all(world: World) -> list[list[str]]:
    torch._dynamo.reset()
    x = torch.zeros(_NUMEL, dtype=torch.bfloat16, device=world.device)
    leaf = x.clone().requires_grad_()
    out, name = torch.empty_like(x), world.name
    empty = torch.ops.sundog_benchmark.empty

    def ours(x: Tensor) -> Tensor:
        result: Tensor = world.all_reduce(x)
        return result

    def nothing(x: Tensor) -> Tensor:
        result: Tensor = empty(x, "sum", "auto", name)
        return result

    def op(x: Tensor) -> Tensor:
        result: Tensor = ops.all_reduce(x, "sum", "auto", name)
        return result

    ways: dict[str, tuple[Make, Make, Tensor]] = {
        "eager": (lambda: ours, lambda: nothing, x),
        "eager, out=": (lambda: lambda x: world.all_reduce(x, out=out), lambda: nothing, x),
        "eager, the op of torch": (lambda: op, lambda: nothing, x),
        "eager, with a gradient": (lambda: ours, lambda: nothing, leaf),
        "compiled": (lambda: _compiled(ours), lambda: _compiled(nothing), x),
        "compiled, with a gradient": (lambda: _compiled(ours), lambda: _compiled(nothing), leaf),
    }
    if world.device.type == "cuda":
        mode = "reduce-overhead"
        ways[mode] = (lambda: _compiled(ours, mode), lambda: _compiled(nothing, mode), x)
        ways["captured"] = (
            lambda: _captured(world, ours, x),
            lambda: _captured(world, lambda x: nothing(x).zero_(), x),
            x,  # not an empty graph
        )
    rows = []
    for label, (make, make_other, given) in ways.items():
        rows.append([label, *_compared(world, (make, make_other), given)])
        if world.rank == 0:
            print(" | ".join(rows[-1]), flush=True)  # what is there if a later one fails
    return rows


def _compiled(call: Call, mode: str | None = None) -> Call:
    made: Call = torch.compile(call, fullgraph=True, mode=mode)
    return made


def _captured(world: World, call: Call, x: Tensor) -> Call:
    """Replay a graph of one call."""
    call(x)
    world.barrier()
    with world.capture() as graph:
        call(x)
    return lambda x: graph.replay()


def _compared(world: World, makers: tuple[Make, Make], x: Tensor) -> list[str]:
    """Return medians of the call, the empty op and their difference, or what a rank raised.

    Samples of the two alternate: what slows the machine down for a while then slows both.
    """
    try:
        mine = _time_in_turn(world, [make() for make in makers], x)
    except Exception as error:  # a row of the table, not the end of the others
        return [f"{type(error).__name__}: {error}"[:200], "", ""]
    slowest = [
        [max(times) for times in zip(*each, strict=True)]
        for each in zip(*world.exchange(mine, "times"), strict=True)
    ]
    over = [call - empty for call, empty in zip(*slowest, strict=True)]
    return [f"{1e6 * median(times):.1f}" for times in (*slowest, over)]


def _time_in_turn(world: World, calls: list[Call], x: Tensor) -> list[list[float]]:
    for call in calls:
        for _ in range(_WARM_UP):  # plans, compiles, records
            call(x)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_SAMPLES):
        for call, taken in zip(calls, times, strict=True):
            world.barrier()
            begin = time.perf_counter()
            for _ in range(_IN_A_ROW):
                call(x)
            taken.append((time.perf_counter() - begin) / _IN_A_ROW)
    world.synchronize()
    return times
