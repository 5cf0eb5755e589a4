"""`sundog bench OP`: time any op against the limit, and against what a user would call instead.

A result that differs from the reference is reported as wrong and never timed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .. import target
from ..errors import SundogError
from ..exercise import output
from ..launch import run as run_ranks
from ..op import Cost, find
from ..world import World
from . import limits
from .baselines import BASELINES
from .timing import Times, Variant, measure

__all__ = ["Row", "bench", "parse_axes"]

_MOST_SETS = 8


@dataclass(frozen=True)
class Row:
    """One variant on one problem."""

    variant: str
    problem: str
    config: str
    cost: Cost
    limit: float  # seconds
    wrong: str = ""  # why it was not timed
    times: Times | None = None


@dataclass(frozen=True)
class _Ready:
    row: Row
    variant: Variant


def parse_axes(op: ModuleType, axes: Sequence[str], size: int) -> list[tuple[Any, dict[str, Any]]]:
    """'numel=1024,4096' of the problem, 'programs=8,16' of the config: all combinations.

    Without an axis a problem is the op's first case, and a config its default.
    """
    problems: list[Any] = [op.cases(size)[0]]
    configs: list[dict[str, Any]] = [{}]
    names = {f.name for f in dataclasses.fields(op.Problem)}
    for axis in axes:
        name, _, text = axis.partition("=")
        values = [_value(word) for word in text.split(",") if word]
        if not values or name not in names | {f.name for f in dataclasses.fields(op.Config)}:
            raise ValueError(f"axis {axis!r}: expected NAME=v1,v2,... of {op.Problem}, {op.Config}")
        if name in names:
            problems = [dataclasses.replace(p, **{name: v}) for p in problems for v in values]
        else:
            configs = [{**c, name: v} for c in configs for v in values]
    return list(itertools.product(problems, configs))


def _value(text: str) -> Any:
    kind = getattr(torch, text, None)
    return kind if isinstance(kind, torch.dtype) else int(text)


def bench(
    name: str, axes: Sequence[str], size: int, backend: str, only: str, samples: int
) -> tuple[list[Row], limits.Rates]:
    """All cases of one op. `only`: baselines to compare with, by name; '' means all."""
    if not target.has_gpu():
        raise SundogError(
            "torch finds no GPU here. `sundog check` looks for errors on the CPU, "
            "and `sundog bench sim` times the simulator."
        )
    op = find(name)
    cases = parse_axes(op, axes, size)
    chosen = {k: v for k, v in BASELINES.get(name, {}).items() if not only or k in only.split(",")}

    def main(world: World) -> tuple[list[Row], limits.Rates | None]:
        rates = limits.measure_rates(world.device) if world.rank == 0 else None
        rates = world.broadcast_object(rates)
        rows = []
        for problem, group in itertools.groupby(cases, key=lambda case: case[0]):
            configs = [config for _, config in group]
            with world.scope():
                rows += _problem(world, op, problem, configs, chosen, rates, samples)
        return rows, rates

    rows, rates = run_ranks(main, size, backend)[0]
    return rows, rates


def _problem(
    world: World, op: ModuleType, problem: Any, changes: list[dict[str, Any]],
    baselines: dict[str, Any], rates: limits.Rates, samples: int,
) -> list[Row]:  # fmt: skip
    cost = op.cost(problem)
    limit = limits.seconds(cost, world.size, rates)
    sets = _sets(world, op, problem, cost)
    ready = []
    for change in changes:
        config = op.default(problem, world.num_sms)
        config = dataclasses.replace(config, **change)
        ready.append(_own(world, op, problem, config, sets, cost, limit))
    for name, baseline in baselines.items():
        calls = [baseline(world, inputs, out) for inputs, out in sets]
        row = Row(name, str(problem), "", cost, limit)
        ready.append(_Ready(row, Variant(name, calls)))
    checked = [(each, _wrong(world, op, problem, each.variant, sets)) for each in ready]
    timed = measure(world, [each.variant for each, wrong in checked if not wrong], samples)
    found = {id(v): t for v, t in zip([e for e, w in checked if not w], timed, strict=True)}
    return [
        dataclasses.replace(each.row, wrong=wrong, times=found.get(id(each)))
        for each, wrong in checked
    ]


def _own(
    world: World, op: ModuleType, problem: Any, config: Any, sets: list[Any], cost: Cost,
    limit: float,
) -> _Ready:  # fmt: skip
    plan = op.plan(world, problem, config)

    def call(inputs: tuple, out: torch.Tensor) -> Callable[[], Any]:
        return lambda: plan(*inputs, out)

    row = Row("sundog", str(problem), str(config), cost, limit)
    return _Ready(row, Variant(f"sundog {config}", [call(*each) for each in sets]))


def _sets(world: World, op: ModuleType, problem: Any, cost: Cost) -> list[Any]:
    """Inputs and output, as often as it takes for one set to leave the L2 cache."""
    l2 = target.of(world.device).l2_bytes
    count = min(max(-(-2 * l2 // max(cost.hbm_bytes * world.size, 1)), 2), _MOST_SETS)
    sets = []
    for seed in range(count):
        inputs = op.inputs(world, problem, seed)
        world.barrier()
        expected = _reference(world, op, problem, inputs)
        sets.append((inputs, output(world, expected)))
    world.barrier()
    return sets


def _reference(
    world: World, op: ModuleType, problem: Any, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    parts = [[world.peer(tensor, rank) for rank in range(world.size)] for tensor in inputs]
    answer: torch.Tensor = op.reference(problem, world.rank, *parts)
    return answer


def _wrong(world: World, op: ModuleType, problem: Any, variant: Variant, sets: list[Any]) -> str:
    """Run every call on poisoned outputs and compare; the answer of all ranks."""
    bad = 0
    for call, (inputs, out) in zip(variant.calls, sets, strict=True):
        expected = _reference(world, op, problem, inputs)
        out.view(torch.uint8).fill_(0x7B)
        world.barrier()
        call()
        world.barrier()
        bad += int((out != expected).sum().item())
    total = sum(world.exchange(bad, "comparison"))
    return f"{total} elements differ from the reference" if total else ""
