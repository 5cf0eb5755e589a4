"""What a graph saves: many small all-reduces captured, called one by one, and as empty kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sundog import target
from sundog.collectives.all_reduce import Problem
from sundog.collectives.all_reduce import inputs as make_inputs
from sundog.launch import run
from sundog.ops import op as ops
from sundog.ops.select import config_for
from sundog.tools.bench.baselines import BASELINES
from sundog.tools.timing import Times, Variant, measure
from sundog.world.world import World

__all__ = ["Figures", "bench_capture"]

CALLS = 50
SAMPLES = 30
ALGORITHMS = ("low_latency", "one_shot")


@dataclass(frozen=True)
class Figures:
    """Per call."""

    graphs: list[Times]  # the GPU's work alone, in graphs
    wall: list[Times]  # by the clock on the wall: of the host alone, and until all has ended


def bench_capture(size: int, backend: str, nbytes: int) -> Figures:
    """All-reduces of `nbytes` on every rank; torch's own beside them, where ranks are processes."""
    found: list[Figures] = run(lambda world: _measure(world, nbytes), size, backend)
    return found[0]


def _measure(world: World, nbytes: int) -> Figures:
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
    return Figures(graphs, wall)


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
    """From the first launch until the host is free again, and until the last one has ended."""
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
