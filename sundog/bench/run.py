"""`sundog bench OP`: time any op against the limit, and against what a user would call instead.

A result that differs from the reference is reported as wrong and never timed.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from .. import fields, knobs, target
from ..choice import Entry, config_for
from ..errors import NotResident, SundogError
from ..exercise import expected_here, output
from ..launch import GPU_HEAP
from ..launch import run as run_ranks
from ..op import BY_REQUEST, Cost, algorithms
from ..world import World
from . import limits
from . import link as over_link
from .baselines import BASELINES, Baseline
from .timing import Times, Variant, measure

__all__ = ["Row", "bench", "parse_axes"]

_MOST_SETS = 8

Choice = tuple[str, dict[str, Any]]  # an algorithm, and fields of its config to change


@dataclass(frozen=True)
class Row:
    """One variant on one problem."""

    variant: str  # an algorithm, or what it is compared with
    problem: str
    config: str  # of an algorithm
    cost: Cost
    limit: float  # seconds
    programs: int = 0
    wrong: str = ""  # why it was not timed
    times: Times | None = None
    entry: Entry | None = None  # for `choice`, of an algorithm; without its time


@dataclass(frozen=True)
class _Ready:
    row: Row
    variant: Variant


@dataclass(frozen=True)
class _Bench:
    """What all problems of one run share."""

    name: str  # of the op
    modules: dict[str, ModuleType]
    choices: list[Choice]
    baselines: dict[str, Baseline]
    rates: limits.Rates
    samples: int
    step: Callable[[str], None]

    @property
    def op(self) -> ModuleType:
        """For what is the same in all its algorithms."""
        return next(iter(self.modules.values()))


def parse_axes(
    name: str, modules: Mapping[str, ModuleType], axes: Sequence[str], size: int
) -> tuple[list[Any], list[Choice]]:
    """The problems, and the algorithms and changes to their configs: all combinations of the axes.

    'numel=1024,4096' is of the problem; 'algo=push,pull' names algorithms (without it: all that are
    chosen without being named); others, as 'programs=8,16', are of those configs that have them.
    """
    op = next(iter(modules.values()))
    problems: list[Any] = [op.cases(size)[0]]
    algos = [algo for algo in modules if f"{name}.{algo}" not in BY_REQUEST or len(modules) == 1]
    changes: list[dict[str, Any]] = [{}]
    of_problem = _types(op.Problem)
    of_config = {k: t for module in modules.values() for k, t in _types(module.Config).items()}
    for axis in axes:
        key, _, text = axis.partition("=")
        words = [word for word in text.split(",") if word]
        if not words or key not in {"algo", *of_problem, *of_config}:
            known = ", ".join(("algo", *of_problem, *of_config))
            raise ValueError(f"axis {axis!r}: expected NAME=v1,v2,... with one of {known}")
        if key == "algo":
            algos = words
            unknown = [word for word in words if word not in modules]
            if unknown:
                raise ValueError(f"axis {axis!r}: no {unknown[0]!r} in {', '.join(modules)}")
        elif key in of_problem:
            values = [_value(axis, word, of_problem[key]) for word in words]
            problems = [dataclasses.replace(p, **{key: v}) for p in problems for v in values]
        else:
            values = [_value(axis, word, of_config[key]) for word in words]
            changes = [{**change, key: value} for change in changes for value in values]
    return problems, _choices(modules, algos, changes)


def _choices(
    modules: Mapping[str, ModuleType], algos: Sequence[str], changes: Sequence[dict[str, Any]]
) -> list[Choice]:
    """Each algorithm with those changes that its config has a field for."""
    found: list[Choice] = []
    for algo in algos:
        own = _types(modules[algo].Config)
        for change in changes:
            choice = algo, {key: value for key, value in change.items() if key in own}
            if choice not in found:
                found.append(choice)
    return found


def _types(kind: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(kind)}


def _value(axis: str, word: str, kind: str) -> Any:
    value = fields.value(word)
    if kind == "int" and type(value) is not int:
        raise ValueError(f"axis {axis!r}: {word!r} is not a number")
    return value


def bench(
    name: str, axes: Sequence[str], size: int, backend: str, only: str, samples: int,
    link: str = "",
) -> tuple[list[Row], limits.Rates]:  # fmt: skip
    """All cases of one op. `only`: baselines to compare with, by name; '' means all."""
    modules = algorithms(name)
    problems, choices = parse_axes(name, modules, axes, size)
    if not target.has_gpu():
        raise SundogError(
            "torch finds no GPU here. `sundog check` looks for errors on the CPU, "
            "and `sundog bench sim` times the simulator."
        )
    known = (over_link.BASELINES if link else BASELINES).get(name.partition(".")[0], {})
    chosen = {k: v for k, v in known.items() if not only or k in only.split(",")}

    def main(world: World) -> tuple[list[Row], limits.Rates]:
        rates: limits.Rates = world.broadcast_object(_rates(world, link))
        rows = []
        variants = len(problems) * (len(choices) + len(chosen))
        with _progress(world, variants * samples) as step:
            common = _Bench(name, modules, choices, chosen, rates, samples, step)
            for problem in problems:
                with world.scope():
                    rows += _problem(world, common, problem)
        return rows, rates

    most = max(next(iter(modules.values())).cost(problem).hbm_bytes for problem in problems)
    rows, rates = run_ranks(main, size, backend, heap_size=_heap_size(most), link=link)[0]
    return rows, rates


def _rates(world: World, link: str) -> limits.Rates | None:
    """Rank 0's, for all."""
    if world.rank != 0:
        return None
    rates = limits.measure_rates(world.device)
    if link:
        rates = dataclasses.replace(rates, link=over_link.link_rate(world.device))
    return rates


def _heap_size(nbytes: int) -> int:
    """Of a rank, for two sets of that many bytes and what plans need; 0, the default, if larger."""
    needed = nbytes * 5 // 2 + (1 << 30)
    return 0 if knobs.heap_size.get() or needed <= GPU_HEAP else needed


@contextmanager
def _progress(world: World, total: int) -> Iterator[Callable[[str], None]]:
    """Rank 0 shows how far all are. No thread draws it: that would share the timed hosts' time."""
    if world.rank != 0:
        yield lambda text: None
        return
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False)
    with bar:
        task = bar.add_task("", total=total)

        def step(text: str) -> None:
            bar.update(task, advance=1, description=text)
            bar.refresh()

        yield step


def _problem(world: World, common: _Bench, problem: Any) -> list[Row]:
    op = common.op
    cost = op.cost(problem)
    blank = Row("", str(problem), "", cost, limits.seconds(cost, world.size, common.rates))
    sets = _sets(world, op, problem, cost)
    ready = [_own(world, common, problem, choice, sets, blank) for choice in common.choices]
    for name, baseline in common.baselines.items():
        if baseline.usable(world, problem):
            calls = [baseline.make(world, problem, inputs, out) for inputs, out in sets]
            row = dataclasses.replace(blank, variant=name)
            ready.append(_Ready(row, Variant(name, calls, baseline.graph)))
    checked = [(e, _wrong(world, op, problem, e, sets)) for e in ready if e is not None]
    good = [each for each, wrong in checked if not wrong]
    timed = measure(world, [e.variant for e in good], common.samples, step=common.step)
    if common.rates.link:  # the passive ranks' times mean nothing
        timed = [Times(each.name, [ranks[:1] for ranks in each.samples]) for each in timed]
    found = {id(each): times for each, times in zip(good, timed, strict=True)}
    rows = [
        dataclasses.replace(each.row, wrong=wrong, times=found.get(id(each)))
        for each, wrong in checked
    ]
    return over_link.limited(rows, common.rates) if common.rates.link else rows


def _own(
    world: World, common: _Bench, problem: Any, choice: Choice, sets: list[Any], blank: Row
) -> _Ready | None:
    """A plan of ours; None, and a word about it, where the config fits not the problem or GPU."""
    algo, change = choice
    module = common.modules[algo]
    name = f"{common.name.partition('.')[0]}.{algo}" if algo else common.name
    kind = target.of(world.device).key
    config = config_for(name, module, problem, kind, world.num_sms)
    config = dataclasses.replace(config, **change)
    refused = module.valid(problem, config)
    if refused is not None:
        if world.rank == 0:
            print(f"not run: {name} {config} on {problem}: {refused}", file=sys.stderr)
        return None
    plan = module.plan(world, problem, config)

    def call(inputs: tuple, out: torch.Tensor) -> Callable[[], Any]:
        return lambda: plan(*inputs, out)

    calls = [call(*each) for each in sets]
    try:
        calls[0]()
    except NotResident as error:  # on every rank alike
        if world.rank == 0:
            print(f"not run: {name} {config}: {error}".partition("\n")[0], file=sys.stderr)
        return None
    programs = getattr(config, "programs", 0)
    entry = Entry(name, fields.plain(problem), fields.plain(config), 0.0, "", "", world.num_sms)
    row = dataclasses.replace(
        blank, variant=algo or "sundog", config=str(config), programs=programs, entry=entry
    )
    return _Ready(row, Variant(f"{name} {config}", calls))


def _sets(world: World, op: ModuleType, problem: Any, cost: Cost) -> list[Any]:
    """Inputs and output, as often as it takes for one set to leave the L2 cache."""
    l2 = target.of(world.device).l2_bytes
    count = min(max(-(-2 * l2 // max(cost.hbm_bytes * world.size, 1)), 2), _MOST_SETS)
    sets = []
    for seed in range(count):
        inputs = op.inputs(world, problem, seed)
        world.barrier()
        expected = expected_here(world, op, problem, inputs)
        sets.append((inputs, output(world, expected)))
    world.barrier()
    return sets


def _wrong(world: World, op: ModuleType, problem: Any, ready: _Ready, sets: list[Any]) -> str:
    """Run every call on poisoned outputs and compare; the answer of all ranks."""
    bad, failed = 0, ""
    for call, (inputs, out) in zip(ready.variant.calls, sets, strict=True):
        expected = expected_here(world, op, problem, inputs)
        out.view(torch.uint8).fill_(0x7B)
        world.barrier()
        try:
            call()
        except RuntimeError as error:
            if ready.row.config:
                raise
            failed = str(error).partition("\n")[0]  # torch does not do this here
        world.barrier()
        if not world.passive:  # whose stand-in computes nothing
            bad += int((out != expected).sum().item())
    everyone = world.exchange((bad, failed), "comparison")
    total = sum(number for number, _ in everyone)
    reasons = [reason for _, reason in everyone if reason]
    if reasons:
        return reasons[0]
    return f"{total} elements differ from the reference" if total else ""
