"""`sundog bench OP`: time any op against the limit, and against what a user would call instead.

Results are compared on whole numbers, bit by bit. Times are taken on normally distributed ones, of
ours and of every baseline, since a product of small whole numbers takes up to an eighth less. A
result that is not the reference's is reported as wrong and never timed. A variant whose wait
expires, or that ends the world otherwise, costs only its row: its problem is run once more in a new
world, without it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from ... import knobs, target
from ...errors import NotResident, SundogError, VariantFailed
from ...launch import run as run_ranks
from ...ops import load
from ...ops.op import Cost
from ...ops.select import Entry, config_for, stored
from ...predict.expected import expected_times, hardware_for
from ...world.world import World
from .._console import progress
from .._options import BenchOptions
from .._subject import Algorithm, algorithms_of, expected_here, normal_inputs, output
from ..baselines import BASELINES, GEMM_ALONE, OVER_LINK, chosen
from ..nccl import Baseline, channel_axis, with_channels
from ..presets import preset
from ..timing import Times, Variant, blame, measure
from . import limits

_MOST_SETS = 8
_SAMPLE_SECONDS = 5e-3  # for large problems fewer calls are a sample


@dataclass(frozen=True)
class Row:
    """One variant on one problem."""

    variant: str  # an algorithm, or a baseline
    problem: str
    config: str  # of an algorithm
    cost: Cost
    limit: float  # seconds
    programs: int = 0
    wrong: str = ""  # why it was not timed
    times: Times | None = None
    entry: Entry | None = None  # of an algorithm, for `ops/select.py`; without its time
    stored: float = 0.0  # seconds, as `ops/select.py` knows them; 0: unknown
    expected: float = 0.0  # seconds by the time model; 0: no model

    @property
    def median(self) -> float:
        """The seconds of a row that was timed."""
        assert self.times is not None
        return self.times.median


@dataclass(frozen=True)
class _Found:
    """What worlds have found so far, by problem."""

    rates: limits.Rates | None
    rows: dict[Any, list[Row]]
    failed: dict[tuple[Any, str], str]  # and the variant's name: why it ended a world


@dataclass(frozen=True)
class _Ready:
    row: Row
    variant: Variant
    wrong: Callable[..., int] = Baseline.wrong  # elements that differ from the answer
    make: Callable[[], list[Callable[[], Any]]] | None = None  # its calls, again, on other data


@dataclass(frozen=True)
class _Bench:
    """What all problems of one run share; the last three are shared within one world."""

    options: BenchOptions
    algorithms: dict[str, Algorithm]  # by the algorithm's short name
    problems: list[Any]
    choices: list[Choice]
    baselines: dict[str, Baseline]
    rates: limits.Rates | None = None
    failed: dict[tuple[Any, str], str] = field(default_factory=dict)
    step: Callable[[str], None] = lambda text: None

    @property
    def op(self) -> ModuleType:
        """One of the algorithms, for what is the same in all of them."""
        return next(iter(self.algorithms.values())).module


def bench(options: BenchOptions) -> tuple[list[Row], limits.Rates]:
    """Time all cases of one op."""
    if options.backend not in ("virtual", "symm"):
        raise ValueError(f"--backend {options.backend}: expected virtual or symm, to time a GPU")
    if options.world < 1 or options.samples < 1 or options.warmup < 0:
        raise ValueError("--world and --samples must be at least 1, and --warmup at least 0")
    texts = options.problems or []
    if options.preset:
        named, ranks = preset(options.preset, options.op)
        texts, options = [*texts, *named], dataclasses.replace(options, world=ranks)
    algorithms = algorithms_of(options.op)
    axes, channels = channel_axis(options.axes or ())
    problems, choices = parse_axes(algorithms, axes, options.world)
    if texts:
        problems = [load.changed(p, load.parse(text)) for text in texts for p in problems]
    table = OVER_LINK if options.link else BASELINES
    there = with_channels(table.get(options.op.partition(".")[0], {}), channels)
    compared = chosen(there, options.baselines or ())
    if not target.has_gpu():
        raise SundogError(
            "torch finds no GPU here. `sundog check` looks for errors on the CPU, "
            "and `python -m benchmarks simulator`, in the repository, times the simulator."
        )
    by_name = {each.algo: each for each in algorithms}
    common = _Bench(options, by_name, problems, choices, compared)
    found = _Found(None, {}, {})
    while any(problem not in found.rows for problem in problems):
        found = _in_a_world(common, found)
        gc.collect()  # after a failure, to free the old world's heaps before the next one allocates
    assert found.rates is not None
    return [row for problem in problems for row in found.rows[problem]], found.rates


def _in_a_world(common: _Bench, found: _Found) -> _Found:
    """Time the remaining problems, up to a variant that fails. Keep what was found before."""
    most = max(common.op.cost(problem).hbm_bytes for problem in common.problems)
    options, run = common.options, functools.partial(_problems, common=common, found=found)
    how: dict[str, Any] = {"heap_size": _heap_size(most), "link": options.link}
    try:
        result: _Found = run_ranks(run, options.world, options.backend, **how)[0]
    except VariantFailed as error:
        print(f"not timed: {error}", file=sys.stderr)
        result = error.before
    return result


def _problems(world: World, common: _Bench, found: _Found) -> _Found:
    rates = found.rates or world.broadcast_object(_rates(world, common.options.link))
    now = _Found(rates, dict(found.rows), dict(found.failed))
    left = [problem for problem in common.problems if problem not in now.rows]
    per_problem = len(common.choices) + len(common.baselines)
    total = len(left) * per_problem * common.options.samples
    # Rank 0 shows the progress of all.
    with progress(threaded=False) if world.rank == 0 else nullcontext(lambda *_: None) as show:
        done = itertools.count(1)
        here = dataclasses.replace(
            common,
            rates=rates,
            failed=now.failed,
            step=lambda text: show("timing", next(done), total, text),
        )
        for problem in left:
            try:
                with world.scope():
                    now.rows[problem] = _problem(world, here, problem)
            except VariantFailed as error:
                key = problem, error.variant
                assert key not in now.failed  # it would not have run
                now.failed[key] = error.reason.partition("\n")[0]
                raise VariantFailed(error.variant, error.reason, now) from error
    return now


def _rates(world: World, link: str) -> limits.Rates | None:
    """Return rank 0's rates, for all."""
    if world.rank != 0:
        return None
    rates = limits.measure_rates(world.device)
    if link:
        rates = dataclasses.replace(rates, link=limits.link_rate(world.device))
    return rates


def _heap_size(nbytes: int) -> int:
    """Return the heap size for two sets of that many bytes and plans; 0, the default, if larger."""
    needed = nbytes * 5 // 2 + (1 << 30)
    return 0 if knobs.heap_size.get() or needed <= target.GPU_HEAP else needed


def _problem(world: World, common: _Bench, problem: Any) -> list[Row]:
    op, rates = common.op, common.rates
    assert rates is not None
    cost = op.cost(problem)
    blank = Row("", str(problem), "", cost, limits.seconds(cost, world.size, rates))
    sets = _sets(world, op, problem, cost)
    ready = [_own(world, common, problem, choice, sets, blank) for choice in common.choices]
    ready += [
        _theirs(world, common, problem, name, sets, blank)
        for name, baseline in common.baselines.items()
        if baseline.usable(world, problem)
    ]
    checked = [(e, e.row.wrong or _wrong(world, e, sets, problem)) for e in ready if e]
    good = [each for each, wrong in checked if not wrong]
    at_least = min(max(int(_SAMPLE_SECONDS / max(blank.limit, 1e-9)), 3), 20)  # 0 if empty
    if rates.link:
        # A graph of hundreds of copies can hold up the host that launches it until they are done,
        # and so the hosts of the peers that they wait for (seen with 4 calls of 64).
        at_least = 2
    _draw_normal(world, op, problem, sets)
    variants = [_on_new_data(each) for each in good]
    options = common.options
    timed = measure(
        world, variants, options.samples, at_least=at_least, step=common.step, warmup=options.warmup
    )
    if rates.link:  # passive ranks' times mean nothing
        timed = [Times(each.name, [ranks[:1] for ranks in each.samples]) for each in timed]
    found = {id(each): times for each, times in zip(good, timed, strict=True)}
    given = [(each.row, wrong, found.get(id(each))) for each, wrong in checked]
    rows = [dataclasses.replace(row, wrong=wrong, times=times) for row, wrong, times in given]
    return _limited_by_link(rows, rates) if rates.link else rows


def _theirs(
    world: World, common: _Bench, problem: Any, name: str, sets: list[Any], blank: Row
) -> _Ready:
    """Prepare a baseline."""
    baseline, reason = common.baselines[name], common.failed.get((problem, name), "")

    def make() -> list[Callable[[], Any]]:
        return [baseline.make(world, problem, inputs, out) for inputs, out, _ in sets]

    with blame(name):
        calls = [] if reason else make()
    row = dataclasses.replace(blank, variant=name, wrong=reason)
    return _Ready(row, Variant(name, calls, baseline.graph), baseline.wrong, make)


def _draw_normal(world: World, op: ModuleType, problem: Any, sets: list[Any]) -> None:
    """Overwrite the inputs with normal data in place, since calls keep their tensors."""
    for seed, (inputs, _, _) in enumerate(sets):
        with world.scope():
            drawn = normal_inputs(world, op, problem, seed)
            for old, new in zip(inputs, drawn, strict=True):
                old.copy_(new)
            world.barrier()
    world.barrier()


def _on_new_data(ready: _Ready) -> Variant:
    """Make a baseline's calls again, since some gather their data when they are made."""
    if ready.make is None:
        return ready.variant
    with blame(ready.variant.name):
        return dataclasses.replace(ready.variant, calls=ready.make())


def _limited_by_link(rows: list[Row], rates: limits.Rates) -> list[Row]:
    """Set the limit of one problem's rows over a link: the larger of two times that could overlap.

    One is for the bytes that must cross, at the rate of one large copy in the same run. The other
    is for the matrix product by cuBLAS on data that is already there.
    """
    alone = [row.median for row in rows if row.variant == GEMM_ALONE and row.times]
    return [
        dataclasses.replace(row, limit=max(row.cost.link_bytes / rates.link, *alone, 0.0))
        for row in rows
    ]


def _own(
    world: World, common: _Bench, problem: Any, choice: Choice, sets: list[Any], blank: Row
) -> _Ready | None:
    """Plan one of ours. Return None, with a note on stderr, if the config does not fit."""
    algo, change = choice
    name, _, module = common.algorithms[algo]
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
        expected=_expected(world, name, problem, config, kind),
    )  # fmt: skip
    return _Ready(row, Variant(called, calls), getattr(module, "wrong", Baseline.wrong))


def _expected(world: World, name: str, problem: Any, config: Any, kind: str) -> float:
    hardware = hardware_for(kind, world.size, world.num_sms, world.backend)
    op, _, algo = name.partition(".")
    if hardware is None:
        return 0.0
    times = expected_times(op, problem, {algo: config}, hardware, world.num_sms)
    return times[algo].seconds if algo in times else 0.0


def _calls(
    world: World, module: ModuleType, problem: Any, config: Any, sets: list[Any], called: str
) -> list[Callable[[], Any]] | None:
    """Make a plan's calls on each set, and run the first. Return None if its programs don't fit."""
    with blame(called):
        plan = module.plan(world, problem, config)
        calls: list[Callable[[], Any]] = [functools.partial(plan, *g, out) for g, out, _ in sets]
        try:
            calls[0]()
        except NotResident as error:  # on all ranks
            if world.rank == 0:
                print(f"not run: {called}: {error}".partition("\n")[0], file=sys.stderr)
            return None
        world.barrier()
    return calls


def _sets(world: World, op: ModuleType, problem: Any, cost: Cost) -> list[Any]:
    """Make enough sets of inputs, output and answer for a set to leave the L2 cache."""
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


def _wrong(world: World, ready: _Ready, sets: list[Any], problem: Any) -> str:
    """Run every call on poisoned outputs and compare. Return the verdict of all ranks."""
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
            bad += ready.wrong(problem, out, expected)
    everyone = world.exchange((bad, failed), "comparison")
    total = sum(number for number, _ in everyone)
    reasons = [reason for _, reason in everyone if reason]
    if reasons:
        return reasons[0]
    return f"{total} elements differ from the reference" if total else ""


Choice = tuple[str, dict[str, Any]]  # an algorithm, and fields of its config to change


def parse_axes(
    algorithms: Sequence[Algorithm], axes: Sequence[str], size: int
) -> tuple[list[Any], list[Choice]]:
    """Combine the axes. Return all problems, and all algorithms with changes to their configs.

    'numel=1024,4096' is an axis of the problem. 'algo=push,pull' names algorithms (default: all
    that run without being named). Others, such as 'programs=8,16', belong to the configs with that
    field.
    """
    modules = {each.algo: each.module for each in algorithms}
    op = algorithms[0].module
    problems: list[Any] = [op.cases(size)[0]]
    algos = [a.algo for a in algorithms if len(algorithms) == 1 or not a.by_request]
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
            problems = [load.changed(p, {key: v}) for p in problems for v in values]
        else:
            values = [_value(axis, word, of_config[key]) for word in words]
            changes = [{**change, key: value} for change in changes for value in values]
    return problems, _choices({algo: _types(modules[algo].Config) for algo in algos}, changes)


def _choices(fields: dict[str, dict[str, str]], changes: Sequence[dict[str, Any]]) -> list[Choice]:
    """Pair each algorithm with the changes for which its config has fields."""
    found: list[Choice] = []
    for algo, own in fields.items():
        for change in changes:
            choice = algo, {key: value for key, value in change.items() if key in own}
            if choice not in found:
                found.append(choice)
    return found


def _types(kind: Any) -> dict[str, str]:
    return {field.name: str(field.type) for field in dataclasses.fields(kind)}


def _value(axis: str, word: str, kind: str) -> Any:
    value = load.value(word)
    if kind == "int" and type(value) is not int:
        raise ValueError(f"axis {axis!r}: {word!r} is not a number")
    return value
