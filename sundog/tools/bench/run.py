"""`sundog bench OP`: time any op against the limit, and against what a user would call instead.

A result that differs from the reference is reported as wrong and never timed. A variant whose wait
runs out, or that ends the world otherwise, costs its row alone: its problem is run once more in a
new world, without it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ... import knobs, target
from ...errors import NotResident, SundogError, VariantFailed
from ...launch import GPU_HEAP
from ...launch import run as run_ranks
from ...ops import load
from ...ops.op import Cost, algorithms
from ...ops.select import Entry, config_for, stored
from ...world.world import World
from .._subject import expected_here, output
from ..timing import Times, Variant, blame, measure
from . import limits, over_link
from .axes import Choice, parse_axes
from .baselines import BASELINES, Baseline, chosen

__all__ = ["Row", "bench"]

_MOST_SETS = 8
_SAMPLE_SECONDS = 5e-3  # of large problems fewer calls are a sample


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
    stored: float = 0.0  # seconds, which `choice` has of the same; 0: nothing


@dataclass(frozen=True)
class _Found:
    """What worlds have found so far; problems are its keys."""

    rates: limits.Rates | None
    rows: dict[Any, list[Row]]
    failed: dict[tuple[Any, str], str]  # and the variant's name: why it ended a world


@dataclass(frozen=True)
class _Ready:
    row: Row
    variant: Variant


@dataclass(frozen=True)
class _Bench:
    """What all problems of one run share; below, what they share in one world."""

    name: str  # of the op
    modules: dict[str, ModuleType]
    problems: list[Any]
    choices: list[Choice]
    baselines: dict[str, Baseline]
    samples: int
    link: str
    rates: limits.Rates | None = None
    failed: dict[tuple[Any, str], str] = field(default_factory=dict)
    step: Callable[[str], None] = lambda text: None

    @property
    def op(self) -> ModuleType:
        """For what is the same in all its algorithms."""
        return next(iter(self.modules.values()))


def bench(
    name: str, axes: Sequence[str], size: int, backend: str, only: Sequence[str], samples: int,
    link: str = "",
) -> tuple[list[Row], limits.Rates]:  # fmt: skip
    """All cases of one op. `only`: names of baselines to compare with; without one, all."""
    modules = algorithms(name)
    problems, choices = parse_axes(name, modules, axes, size)
    known = (over_link.BASELINES if link else BASELINES).get(name.partition(".")[0], {})
    compared = chosen(known, only)
    if not target.has_gpu():
        raise SundogError(
            "torch finds no GPU here. `sundog check` looks for errors on the CPU, "
            "and `python -m benchmarks simulator`, in the repository, times the simulator."
        )
    common = _Bench(name, modules, problems, choices, compared, samples, link)
    found = _Found(None, {}, {})
    while any(problem not in found.rows for problem in problems):
        found = _in_a_world(common, found, size, backend)
        gc.collect()  # if it failed: its heaps go before the next one's come
    assert found.rates is not None
    return [row for problem in problems for row in found.rows[problem]], found.rates


def _in_a_world(common: _Bench, found: _Found, size: int, backend: str) -> _Found:
    """What was found before, and the problems that are left, up to a variant that fails."""
    most = max(common.op.cost(problem).hbm_bytes for problem in common.problems)
    options: dict[str, Any] = {"heap_size": _heap_size(most), "link": common.link}
    try:
        everyone = run_ranks(lambda w: _problems(w, common, found), size, backend, **options)
    except VariantFailed as error:
        print(f"not timed: {error}", file=sys.stderr)
        everyone = [error.before]
    result: _Found = everyone[0]
    return result


def _problems(world: World, common: _Bench, found: _Found) -> _Found:
    rates = found.rates or world.broadcast_object(_rates(world, common.link))
    now = _Found(rates, dict(found.rows), dict(found.failed))
    left = [problem for problem in common.problems if problem not in now.rows]
    total = len(left) * (len(common.choices) + len(common.baselines)) * common.samples
    with _progress(world, total) as step:
        here = dataclasses.replace(common, rates=rates, failed=now.failed, step=step)
        for problem in left:
            try:
                with world.scope():
                    now.rows[problem] = _problem(world, here, problem)
            except VariantFailed as error:
                key = problem, error.variant
                assert key not in now.failed  # it would not have been run
                now.failed[key] = error.reason.partition("\n")[0]
                raise VariantFailed(error.variant, error.reason, now) from error
    return now


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
    op, rates = common.op, common.rates
    assert rates is not None
    cost = op.cost(problem)
    blank = Row("", str(problem), "", cost, limits.seconds(cost, world.size, rates))
    sets = _sets(world, op, problem, cost)
    ready = [_own(world, common, problem, choice, sets, blank) for choice in common.choices]
    for name, baseline in common.baselines.items():
        if baseline.usable(world, problem):
            reason = common.failed.get((problem, name), "")
            with blame(name):
                usable = [] if reason else sets
                calls = [baseline.make(world, problem, inputs, out) for inputs, out, _ in usable]
            row = dataclasses.replace(blank, variant=name, wrong=reason)
            ready.append(_Ready(row, Variant(name, calls, baseline.graph)))
    checked = [(e, e.row.wrong or _wrong(world, e, sets)) for e in ready if e is not None]
    good = [each for each, wrong in checked if not wrong]
    at_least = min(max(int(_SAMPLE_SECONDS / max(blank.limit, 1e-9)), 3), 20)  # 0 if empty
    if rates.link:
        # A graph of hundreds of copies can hold the host that launches it until they are done,
        # and with it the hosts of the peers that they wait for (seen with 4 calls of 64).
        at_least = 2
    variants = [each.variant for each in good]
    timed = measure(world, variants, common.samples, at_least=at_least, step=common.step)
    if rates.link:  # the passive ranks' times mean nothing
        timed = [Times(each.name, [ranks[:1] for ranks in each.samples]) for each in timed]
    found = {id(each): times for each, times in zip(good, timed, strict=True)}
    rows = [
        dataclasses.replace(each.row, wrong=wrong, times=found.get(id(each)))
        for each, wrong in checked
    ]
    return over_link.limited(rows, rates) if rates.link else rows


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
    called = f"{name} {config}"
    reason = common.failed.get((problem, called), "")
    calls = [] if reason else _calls(world, module, problem, config, sets, called)
    if calls is None:
        return None
    programs = getattr(config, "programs", 0)
    entry = Entry(name, load.plain(problem), load.plain(config), 0.0, "", "", world.num_sms)
    row = dataclasses.replace(
        blank, variant=algo or "sundog", config=str(config), programs=programs, wrong=reason,
        entry=entry, stored=stored(entry, kind),
    )  # fmt: skip
    return _Ready(row, Variant(called, calls))


def _calls(
    world: World, module: ModuleType, problem: Any, config: Any, sets: list[Any], called: str
) -> list[Callable[[], Any]] | None:
    """Of a plan, on each set; the first was made once, unless its programs don't fit: then None."""
    with blame(called):
        plan = module.plan(world, problem, config)
        calls: list[Callable[[], Any]] = [functools.partial(plan, *g, out) for g, out, _ in sets]
        try:
            calls[0]()
        except NotResident as error:  # on every rank alike
            if world.rank == 0:
                print(f"not run: {called}: {error}".partition("\n")[0], file=sys.stderr)
            return None
        world.barrier()
    return calls


def _sets(world: World, op: ModuleType, problem: Any, cost: Cost) -> list[Any]:
    """Inputs, output and answer, as often as it takes for one set to leave the L2 cache."""
    l2 = target.of(world.device).l2_bytes
    count = min(max(-(-2 * l2 // max(cost.hbm_bytes * world.size, 1)), 2), _MOST_SETS)
    sets = []
    for seed in range(count):
        inputs = op.inputs(world, problem, seed)
        world.barrier()
        expected = expected_here(world, op, problem, inputs)
        sets.append((inputs, output(world, expected), expected))
    world.barrier()
    return sets


def _wrong(world: World, ready: _Ready, sets: list[Any]) -> str:
    """Run every call on poisoned outputs and compare; the answer of all ranks."""
    bad, failed = 0, ""
    for call, (_, out, expected) in zip(ready.variant.calls, sets, strict=True):
        out.view(torch.uint8).fill_(0x7B)
        world.barrier()
        with blame(ready.variant.name):
            try:
                call()
            except RuntimeError as error:
                if ready.row.config or isinstance(error, SundogError):
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
