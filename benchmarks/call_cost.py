"""What a call costs: the host's time of an eager call, and what a graph saves.

`python -m benchmarks host` times an eager collective with a cached plan by the CPU's clock. It
makes a few calls in a row and then waits for the GPU, so that the queue never fills: the figure is
Python, Triton's launch and the driver, and nothing of the GPU's work.

`python -m benchmarks capture` compares 50 small all-reduces in a graph, called one by one, and
empty kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sundog import target
from sundog.collectives.all_reduce import Problem
from sundog.collectives.all_reduce import inputs as make_inputs
from sundog.launch import run
from sundog.ops import load as ops
from sundog.ops.select import config_for
from sundog.tools.baselines import BASELINES
from sundog.tools.timing import Times, Variant, measure, times_json
from sundog.world.world import World

from .result_files import Figures, machine, write

_IN_A_ROW = 20  # eager calls; the driver queues about a thousand
_NUMEL = 4096
_HOST_SAMPLES = 50
CALLS = 50  # in a graph
SAMPLES = 30
ALGORITHMS = ("low_latency", "one_shot")


# an eager call


def host(sizes: Sequence[int], backend: str, json_file: str) -> None:
    """Time eager calls of every collective, for several world sizes."""
    measured = [(size, run(_time_host, size, backend)[0]) for size in sizes]
    head = ["ranks", *(times.name for times in measured[0][1])]
    rows = [[str(s), *(f"{1e6 * t.median:.1f} us" for t in found)] for s, found in measured]
    text = (
        f"With a cached plan, by the CPU's clock, {_IN_A_ROW} calls in a row: "
        "median of the slowest rank."
    )
    samples = [{"world": s, "times": [times_json(t) for t in f]} for s, f in measured]
    title = f"What an eager call costs the host (`{backend}`)"
    Figures(title, text, head, rows).show(json_file, samples=samples)


def _time_host(world: World) -> list[Times]:
    x, out = world.zeros((_NUMEL,), torch.bfloat16), world.zeros((_NUMEL,), torch.bfloat16)
    whole = world.zeros((_NUMEL * world.size,), torch.bfloat16)
    part = world.zeros((_NUMEL // world.size,), torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: world.all_reduce(x, out=out),
        "all_gather": lambda: world.all_gather(x, whole),
        "reduce_scatter": lambda: world.reduce_scatter(x, out=part),
        "all_to_all": lambda: world.all_to_all(x, out),
    }
    return [_time_call(world, name, call) for name, call in calls.items()]


def _time_call(world: World, name: str, call: Callable[[], Any]) -> Times:
    call()  # plans, compiles, loads
    mine = []
    for _ in range(_HOST_SAMPLES + 2):
        world.barrier()
        begin = time.perf_counter()
        for _ in range(_IN_A_ROW):
            call()
        mine.append((time.perf_counter() - begin) / _IN_A_ROW)
    everyone = world.exchange(mine[2:], "times")  # the first ones warm up
    return Times(name, [list(ranks) for ranks in zip(*everyone, strict=True)])


# a graph


@dataclass(frozen=True)
class GraphTimes:
    """Seconds per call."""

    graphs: list[Times]  # the GPU's work alone, in graphs
    wall: list[Times]  # by the clock on the wall: of the host alone, and until all has ended


def capture(size: int, backend: str, nbytes: int, json_file: str) -> None:
    """Compare all-reduces of `nbytes` in a graph and one by one, with torch's own on `symm`."""
    found: GraphTimes = run(lambda world: _time_graphs(world, nbytes), size, backend)[0]
    for times in found.graphs:
        print(f"{times.name}: {1e6 * times.median:.2f} us per call in a graph")
    for times in found.wall:
        print(f"{times.name}: {1e6 * times.median:.2f} us per call by the clock on the wall")
    if json_file:
        content = {"kind": "capture", "world": size, "backend": backend, "nbytes": nbytes}
        content["machine"] = machine()
        content["graphs"] = [times_json(times) for times in found.graphs]
        content["wall"] = [times_json(times) for times in found.wall]
        write(json_file, content)


def _time_graphs(world: World, nbytes: int) -> GraphTimes:
    problem = Problem(nbytes // 2, torch.bfloat16, world.size)
    inputs = make_inputs(world, problem, 0)
    out = world.empty((problem.numel,), problem.dtype)
    word = torch.zeros(1, dtype=torch.int32, device=world.device)
    ours = {algo: _planned(world, algo, problem, (*inputs, out)) for algo in ALGORITHMS}
    variants = [Variant(algo, [call]) for algo, call in ours.items()]
    variants.append(Variant("empty", [lambda: _empty[(1,)](word)]))
    theirs = BASELINES["all_reduce"]["symm_mem.one_shot"]
    if theirs.usable(world, problem):
        variants.append(Variant("symm_mem.one_shot", [theirs.make(world, problem, inputs, out)]))
    graphs = measure(world, variants, SAMPLES, at_least=CALLS)
    wall = [times for algo, call in ours.items() for times in _walls(world, algo, call)]
    return GraphTimes(graphs, wall)


def _planned(world: World, algo: str, problem: Problem, tensors: tuple) -> Callable[[], Any]:
    name = f"all_reduce.{algo}"
    op = ops.find(name)
    config = config_for(name, op, problem, target.of(world.device).key, world.num_sms)
    plan = op.plan(world, problem, config)
    return lambda: plan(*tensors)


def _walls(world: World, algo: str, call: Callable[[], Any]) -> list[Times]:
    call()
    world.barrier()
    with world.capture() as graph:
        _repeat(call)
    graph.replay()  # the first one loads it
    eager = _wall(world, f"{algo} called", lambda: _repeat(call))
    return eager + _wall(world, f"{algo} replayed", graph.replay)


def _repeat(call: Callable[[], Any]) -> None:
    for _ in range(CALLS):
        call()


def _wall(world: World, name: str, work: Callable[[], None]) -> list[Times]:
    """Time from the first launch until the host is free again, and until the last has ended."""
    mine = []
    for _ in range(SAMPLES):
        world.barrier()
        begin = time.perf_counter()
        work()
        launched = time.perf_counter()
        world.synchronize()
        ended = time.perf_counter()
        mine.append(((launched - begin) / CALLS, (ended - begin) / CALLS))
    everyone = world.exchange(mine, "times")
    by_sample = list(zip(*everyone, strict=True))
    return [
        Times(f"{name}, {until}", [[rank[place] for rank in ranks] for ranks in by_sample])
        for place, until in enumerate(("host", "end"))
    ]


@triton.jit
def _empty(word):  # type: ignore[no-untyped-def]
    pass
