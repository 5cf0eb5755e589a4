"""One config, compiled for a target without a GPU: what it takes, and its IR.

The op is planned on a simulated world and its launches are noted (sundog.isa). On a machine with a
GPU this fills Triton's cache beside the measurements, so that a measurement loads what it finds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..dataset.compile import source_of
from ..dataset.graph import IrGraphRecord
from ..dataset.ttir import extract_ttir_graph
from ..exercise import room
from ..isa import GPU_HEAP, NUM_SMS, Kernel, compile_launch, inspect_launch
from ..isa.launches import Launch, record
from ..world import World
from .space import Job

__all__ = ["Compiled", "compile_config", "launches_of"]

_LEAST_HEAP = 64 << 20
_FIGURES = (
    "name", "registers", "spills", "shared", "loads", "stores", "atomics", "barriers",
    "tensor_cores", "tma",
)  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What became of a config's kernels."""

    seconds: float
    metrics: dict[str, Any]
    graphs: list[IrGraphRecord]


def compile_config(job: Job, target: str) -> Callable[[Any], Compiled]:
    """For `workers.serve`: a config's kernels, in the order of their launches.

    Configs often differ in the grid alone, so what was compiled is kept by what it was made of.
    """
    made: dict[tuple, tuple[float, Kernel, IrGraphRecord]] = {}

    def compile_one(config: Any) -> Compiled:
        seconds, kernels, graphs = 0.0, [], []
        for launch in launches_of(job, config):
            source, options = source_of(launch.kernel, launch.args, launch.kwargs, arch=target)
            key = (source.hash(), repr(sorted(options.items(), key=str)))
            known = key in made
            if not known:
                made[key] = _compiled(job.op, launch, target)
            took, kernel, graph = made[key]
            seconds += 0.0 if known else took
            kernels.append(kernel)
            graphs.append(graph)
        return Compiled(seconds, _metrics(target, kernels), graphs)

    return compile_one


def _compiled(op: str, launch: Launch, target: str) -> tuple[float, Kernel, IrGraphRecord]:
    begin = time.perf_counter()
    compiled = compile_launch(launch, target)
    seconds = time.perf_counter() - begin
    return seconds, inspect_launch(op, launch, target), extract_ttir_graph(compiled)


def launches_of(job: Job, config: Any) -> list[Launch]:
    """What one call of the op launches on rank 0."""

    def run(world: World) -> None:
        plan = job.module.plan(world, job.problem, config)
        given = job.module.inputs(world, job.problem, 0)
        plan(*given, room(world, job.module, job.problem, given))

    heap = _LEAST_HEAP + 4 * job.module.cost(job.problem).hbm_bytes
    return record(run, job.size, NUM_SMS, heap, GPU_HEAP)


def _metrics(target: str, kernels: list[Kernel]) -> dict[str, Any]:
    each = [{k: v for k, v in dataclasses.asdict(one).items() if k in _FIGURES} for one in kernels]
    return {
        "target": target,
        "registers": max((one.registers for one in kernels), default=0),
        "spills": sum(one.spills for one in kernels),
        "shared": max((one.shared for one in kernels), default=0),
        "marks": [f"{one.name}: {mark.rule}" for one in kernels for mark in one.marks],
        "kernels": each,
    }
