"""What the hierarchical algorithms share: where a rank is, and chunks that overlap.

A chunk goes through stages: a kernel inside the machine, a transfer between machines, another
kernel. While the network has one chunk, kernels work on the next one. All ranks go through the
stages in the same order, so transfers match without names.

A model predicts a call's time, and the config that should be fastest. The kernels inside a machine
have the times of sundog/predict. Between machines every rank has its own adapter (`network` of the
machine's description). A transfer takes the time of its bytes and, each time that it waits for
another machine, the latency. Chunks overlap: the slower of inside and between counts in full, and
the other with one chunk. One shot sends (N - 1) / N of a rank's part, times N, to be added; two
shots send it twice. So one shot wins while latency counts more than bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..hardware.description import Hardware, Network
from ..ops.load import find
from ..predict.expected import hardware_for, time
from ..world.world import World
from .between import Between


@dataclass(frozen=True)
class NodesConfig:
    """How a hierarchical op runs, which does not change its bits."""

    chunk_bytes: int = 4 << 20  # of one rank's tensor, in flight between two machines at a time
    one_shot: bool = False  # all_reduce: every machine gets all partial sums and adds them itself
    led: bool = False  # one rank of a machine sends for all of its ranks (hierarchical.py)


@dataclass(frozen=True)
class Levels:
    """A world over machines, as the algorithms use it: its inside and its between."""

    local: World
    between: Between

    @property
    def shape(self) -> tuple[int, int]:
        """Machines, and ranks of each."""
        return self.between.count, self.local.size

    @property
    def size(self) -> int:
        return self.between.count * self.local.size


class Chunk(NamedTuple):
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def chunks(numel: int, item: int, chunk_bytes: int, multiple: int = 1) -> list[Chunk]:
    """Cut `numel` elements into chunks whose lengths are multiples, but for the last."""
    step = max(chunk_bytes // item // multiple, 1) * multiple
    return [Chunk(at, min(at + step, numel)) for at in range(0, numel, step)]


def padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Add zeros at the end until `multiple` divides its length."""
    missing = -x.numel() % multiple
    return F.pad(x, (0, missing)) if missing else x


def pipelined(parts: list[Chunk], *stages: Callable[[Chunk, Any], Any]) -> None:
    """Run every stage on every chunk. A stage gets the chunk and the previous stage's result.

    A stage of a chunk runs after the previous stage of the next chunk, whose transfer is then in
    flight.
    """
    values: dict[int, Any] = {}
    for step in range(len(parts) + len(stages) - 1):
        for number, stage in enumerate(stages):
            at = step - number
            if 0 <= at < len(parts):
                values[at] = stage(parts[at], values.pop(at, None))


# an op's expected time

# Without a description of the machine a call sends as few bytes as it can, and of these a message
# has some beside its data: of gloo's, three packets' headers and acknowledgements.
_MESSAGE = 450  # bytes
# A leader saves messages, but its machine's data goes through one adapter: up to this length that
# takes less than a latency (1.4 us at 46 GB/s).
_LED = 1 << 16  # bytes
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
    """Return the config (the caller's, by the machine's description, or by rule) and the reason."""
    if asked is not None:
        return asked, f"{asked}, as asked"
    hardware = hardware_for(local._target, local.size, local.num_sms, local.backend, spans=True)
    if hardware is None:
        config = _by_rule(problem)
        return config, f"{config}: the network of {local._target} is not described; by rule"
    return _fastest(problem, hardware)


def _by_rule(problem: SpanProblem) -> NodesConfig:
    """Let a leader send what is short. Take one shot where it does not send more bytes.

    Of N machines one shot saves half of the messages, and sends N / 2 times the data. A leader's
    two shots have the least of both, and with two machines so has one.
    """
    op, nbytes, nodes, ranks = problem
    at_once = NodesConfig(one_shot=True)
    led = "matmul" not in op and ranks * _between_bytes(problem, at_once) <= _LED
    no_more = nodes == 2 or (not led and nbytes / ranks * (nodes - 2) <= _MESSAGE * nodes)
    return NodesConfig(one_shot=op == "all_reduce" and no_more, led=led)


def _fastest(problem: SpanProblem, hardware: Hardware) -> tuple[NodesConfig, str]:
    shots = (False, True) if problem.op == "all_reduce" else (False,)
    tried = [NodesConfig(chunk, shot) for shot in shots for chunk in _CHUNKS]
    times = {config: span_time(problem, config, hardware) for config in tried}
    config = min(times, key=lambda each: times[each].seconds)
    expected = 1e6 * times[config].seconds
    return config, f"{config}: the model of {hardware.name} expects {expected:.0f} us"


def span_time(problem: SpanProblem, config: NodesConfig, hardware: Hardware) -> SpanTime:
    """Return the expected time of a call, with overlapping chunks and an otherwise idle network."""
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
    """Return the seconds of a chunk's kernels, on one machine."""
    alone = dataclasses.replace(hardware, nodes=1, network=None)
    numel, ranks = max(problem.nbytes // 2, 1), problem.ranks
    if problem.op == "all_gather":
        return _kernel("all_gather.push", numel * problem.nodes, ranks, alone)
    if "matmul" in problem.op:  # the product is longer: the network alone counts
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
    """Return the least bytes that a rank must send to its counterparts."""
    _, nbytes, nodes, ranks = problem
    others = nodes - 1
    return {
        "all_reduce": nbytes / ranks * (others if config.one_shot else 2 * others / nodes),
        "reduce_scatter": nbytes / ranks * others / nodes,
        "all_gather": nbytes * others,
        "all_gather_matmul": nbytes * others,
        "matmul_reduce_scatter": nbytes * others / nodes,  # if n is k: the network alone counts
        "matmul_all_reduce": 2 * nbytes * others / nodes,  # likewise
        "all_to_all": nbytes * others / nodes,
        "broadcast": nbytes / ranks * math.ceil(math.log2(nodes)),
    }[problem.op]
