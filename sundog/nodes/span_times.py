"""What a hierarchical op should take, and the config that should be fastest.

The kernels inside a machine have the times of sundog/predict. Between machines every rank has an
adapter of its own (`network` of the machine's description). A transfer takes the time of its bytes
and, for each time that it waits for another machine, the latency. Chunks overlap: the slower of
inside and between counts, and of the other one chunk.

One shot sends (N - 1) / N of a rank's part to be added, times N; two shots send it twice. So one
shot wins while latency counts more than bytes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from ..hardware.description import Hardware, Network
from ..ops.op import find
from ..predict.expected import hardware_for
from ..predict.times import time
from ..world.world import World
from .pipeline import NodesConfig

__all__ = ["SpanProblem", "SpanTime", "chosen", "span_time"]

_SMALL = 64 << 10  # bytes of a rank's part: one shot, where the machine is not described
_CHUNKS = tuple(1 << power for power in range(17, 25))  # bytes that are tried


class SpanProblem(NamedTuple):
    op: str
    nbytes: int  # of a rank's tensor
    nodes: int
    ranks: int  # of each


class SpanTime(NamedTuple):
    """Seconds."""

    seconds: float
    inside: float  # of all chunks' kernels
    between: float  # of all chunks' transfers

    @property
    def bound(self) -> str:
        return "network" if self.between >= self.inside else "machine"


def chosen(
    problem: SpanProblem, local: World, asked: NodesConfig | None = None
) -> tuple[NodesConfig, str]:
    """The config, and why: asked for, by the machine's description, or by rule."""
    if asked is not None:
        return asked, f"{asked}, as asked"
    hardware = hardware_for(local._target, local.size, local.num_sms, local.backend)
    if hardware is None or hardware.network is None:
        small = problem.nbytes // problem.ranks <= _SMALL
        config = NodesConfig(one_shot=problem.op == "all_reduce" and small)
        return config, f"{config}: the network of {local._target} is not described; by rule"
    return _fastest(problem, hardware)


def _fastest(problem: SpanProblem, hardware: Hardware) -> tuple[NodesConfig, str]:
    shots = (False, True) if problem.op == "all_reduce" else (False,)
    tried = [NodesConfig(chunk, shot) for shot in shots for chunk in _CHUNKS]
    times = {config: span_time(problem, config, hardware) for config in tried}
    config = min(times, key=lambda each: times[each].seconds)
    expected = 1e6 * times[config].seconds
    return config, f"{config}: the model of {hardware.name} expects {expected:.0f} us"


def span_time(problem: SpanProblem, config: NodesConfig, hardware: Hardware) -> SpanTime:
    """Expect this of one call. Assumes that chunks overlap and the network is used by nobody."""
    network = hardware.network
    if network is None:
        raise ValueError(f"{hardware.name} describes no network between machines")
    count = max(1, math.ceil(problem.nbytes / config.chunk_bytes))
    one = problem._replace(nbytes=math.ceil(problem.nbytes / count))
    inside, between = _inside(one, hardware), _between(one, config, network)
    latency = between - _between_bytes(one, config) / network.rate
    pipelined = count * max(inside, between - latency) + min(inside, between - latency) + latency
    return SpanTime(pipelined, count * inside, count * (between - latency) + latency)


def _inside(problem: SpanProblem, hardware: Hardware) -> float:
    """Seconds of a chunk's kernels, on one machine."""
    alone = dataclasses.replace(hardware, nodes=1, network=None)
    numel, ranks = max(problem.nbytes // 2, 1), problem.ranks
    if problem.op == "all_gather":
        return _kernel("all_gather.push", numel * problem.nodes, ranks, alone)
    if problem.op == "all_gather_matmul":  # the product is longer: the network alone counts
        return 0.0
    if problem.op in ("reduce_scatter", "all_to_all"):
        name = "reduce_scatter.direct" if problem.op == "reduce_scatter" else "all_to_all.push"
        return _kernel(name, max(numel // ranks, 1), ranks, alone)
    scatter = _kernel("reduce_scatter.direct", max(numel // ranks, 1), ranks, alone)
    gather = _kernel("all_gather.push", max(numel // ranks, 1), ranks, alone)
    return gather if problem.op == "broadcast" else scatter + gather


def _kernel(name: str, numel: int, ranks: int, hardware: Hardware) -> float:
    module = find(name)
    problem = module.Problem(numel, torch.bfloat16, ranks)
    config = module.default(problem, hardware.gpu.num_sms)
    return time(name, problem, config, hardware).seconds


def _between(problem: SpanProblem, config: NodesConfig, network: Network) -> float:
    hops = 2 if problem.op == "all_reduce" and not config.one_shot else 1
    if problem.op == "broadcast":
        hops = math.ceil(math.log2(problem.nodes))
    return hops * network.latency_s + _between_bytes(problem, config) / network.rate


def _between_bytes(problem: SpanProblem, config: NodesConfig) -> float:
    """Bytes that a rank sends to its counterparts: the least that there can be."""
    _, nbytes, nodes, ranks = problem
    others = nodes - 1
    return {
        "all_reduce": nbytes / ranks * (others if config.one_shot else 2 * others / nodes),
        "reduce_scatter": nbytes / ranks * others / nodes,
        "all_gather": nbytes * others,
        "all_gather_matmul": nbytes * others,
        "all_to_all": nbytes * others / nodes,
        "broadcast": nbytes / ranks * math.ceil(math.log2(nodes)),
    }[problem.op]
