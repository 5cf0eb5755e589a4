"""`sundog calibrate`: run the suite, fit, write the description, show the machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from .. import target
from ..errors import SundogError
from ..hardware.description import Hardware, PairRates, Source, plain, read
from ..launch import run as run_ranks
from ..ops.load import changed, find, value
from ..ops.select import Entry
from ..predict.expected import calibrated_path
from ..predict.expected import time as expected
from ._console import FINE, command, ensure_compiler_cache, note, write_json
from ._options import BenchOptions, CalibrateOptions
from .bench.limits import Rates, measure_pairs
from .bench.run import bench


@command("calibrate")
def run(options: CalibrateOptions) -> int:
    if options.world < 2:
        raise ValueError("--world must be at least 2: one rank has no peer")
    begin = time.monotonic()
    date = time.strftime("%Y-%m-%d", time.gmtime())
    if options.clock:
        made, samples = _by_clock(options, date)
        path = Path(options.out)
    else:
        made, samples = _by_measuring(options, date)
        path = Path(options.out or calibrated_path(_gpu().key, made.link.kind))
    misses = sorted(_miss(sample, made) for sample in samples)
    note(topology(made))
    note(
        f"{len(samples)} ops in {time.monotonic() - begin:.0f} s; the model misses them by "
        f"{misses[len(misses) // 2]:.1%} (median), {misses[-1]:.1%} at worst"
    )
    if str(path) not in ("", "."):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(str(path), plain(made))
        note(f"written to {path}")
    return FINE


def _by_measuring(options: CalibrateOptions, date: str) -> tuple[Hardware, list[Sample]]:
    if not target.has_gpu():
        raise SundogError(
            "torch finds no GPU here. `--clock h200-shared` tries out the fit with a made-up clock."
        )
    ensure_compiler_cache()
    found = measured(options.world, options.backend)
    here = _gpu()
    shares = options.world * found[0][0].num_sms <= here.num_sms
    kind = "none" if shares else "switch"
    source = Source(f"fitted: `sundog calibrate` on {here.name}, {options.backend}", date)
    title = f"{here.name}, {options.world} ranks on {options.backend}, calibrated {date}"
    made = describe(f"{here.key}-{kind}", title, kind, here.num_sms, found, source)
    if options.backend == "symm":  # the flags of processes were measured
        made = made.changed({"gpu.process_s": 0.0})
    if kind == "switch":
        pairs = run_ranks(measure_pairs, options.world, options.backend)[0]
        alone = f"measured: `sundog calibrate` on {here.name}, one pair at a time"
        made = with_pairs(made, pairs, Source(alone, date))
    return made, found[0]


def with_pairs(made: Hardware, pairs: Sequence[PairRates], source: Source) -> Hardware:
    """Add each pair's rates. No pair exceeds the rate of a GPU's link that kernels reach."""
    most = made.link.rate
    rows = tuple(
        PairRates(p.gpu, p.peer, *(_rounded(min(rate, most)) for rate in p[2:])) for p in pairs
    )
    copies = sorted(p.copy for p in pairs)
    figures: dict[str, Any] = {
        "link.pair_rates": rows,
        "link.copy_rate": _rounded(copies[len(copies) // 2]),
    }
    sources = {**made.sources, **dict.fromkeys(figures, source)}
    return dataclasses.replace(made.changed(figures), sources=sources)


def _gpu() -> target.Target:
    return target.of(torch.device("cuda"))


def _by_clock(options: CalibrateOptions, date: str) -> tuple[Hardware, list[Sample]]:
    clock = read(options.clock)
    if clock.link.kind not in ("none", "switch"):
        raise ValueError(
            f"--clock {options.clock}: its link is a {clock.link.kind}: no suite for it"
        )
    found = made_up(clock, options.world)
    source = Source(f"assumed: made-up clock, the model of {clock.name}; not measured", date)
    title = f"a made-up clock, the model of {clock.name}"
    made = describe("made-up", title, clock.link.kind, clock.gpu.num_sms, found, source)
    return made, found[0]


def _miss(sample: Sample, made: Hardware) -> float:
    op, problem, config, num_sms, seconds = sample
    return abs(expected(op, problem, config, made, num_sms).seconds / seconds - 1)


# the suite, and the description made from its times

# An op, and the axes of `sundog bench`. Each has a world; together they take less than a minute.
AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("all_gather", ("numel=1024,131072,4194304", "algo=push,pull")),
    ("all_gather", ("numel=1048576", "algo=push", "block=16384", "programs=2,8,16")),
    ("all_reduce", ("numel=1024,16384,262144,4194304",)),
    ("matmul_reduce_scatter", ("m=256,1024,4096", "n=3584", "k=8192")),
)
_SAMPLES = 8
_RATES = ("gpu.read_rate", "gpu.write_rate", "gpu.copy_rate")


def measured(world: int, backend: str) -> tuple[list[Sample], Rates]:
    """Run the suite on this machine's GPUs."""
    found: list[Sample] = []
    rates = None
    for op, axes in AXES:
        given = BenchOptions(
            op,
            ["dtype=bfloat16", *axes],
            world=world,
            backend=backend,
            baselines=["none"],
            samples=_SAMPLES,
        )
        rows, rates = bench(given)
        timed = [row for row in rows if row.entry is not None and row.times is not None]
        if len(timed) < len(rows) / 2:  # low_latency refuses two of four sizes, as expected
            wrong = "; ".join(
                f"{row.variant} {row.problem}: {row.wrong}" for row in rows if row.wrong
            )
            raise ValueError(f"{op}: {len(timed)} of {len(rows)} were timed; the others: {wrong}")
        for row in timed:
            assert row.entry is not None
            assert row.times is not None
            found.append(_sample(row.entry, row.times.median))
    assert rates is not None
    return found, rates


def _sample(entry: Entry, seconds: float) -> Sample:
    """Make a sample from an entry, whose problem and config are JSON data."""
    module = find(entry.op)
    words = {n: value(w) if isinstance(w, str) else w for n, w in entry.problem.items()}
    problem = module.Problem(**words)
    return Sample(entry.op, problem, module.Config(**entry.config), entry.num_sms, seconds)


def made_up(clock: Hardware, size: int) -> tuple[list[Sample], Rates]:
    """Make up a clock: the model's times, alternately three percent off. Nothing is measured."""
    gpu = clock.gpu
    samples = []
    for number, (op, problem, config, num_sms) in enumerate(_cases(clock, size)):
        seconds = expected(op, problem, config, clock, num_sms).seconds
        samples.append(
            Sample(op, problem, config, num_sms, seconds * (1.03 if number % 2 else 0.97))
        )
    return samples, Rates(gpu.copy_rate, gpu.write_rate, gpu.read_rate, gpu.matmul_rate[0][1])


def _cases(clock: Hardware, size: int) -> Iterator[tuple[str, Any, Any, int]]:
    num_sms = clock.gpu.num_sms // (size if clock.link.kind == "none" else 1)
    for op, sizes in (
        ("all_gather.push", (1024, 131072, 4194304)),
        ("all_gather.pull", (1024, 131072, 4194304)),
        ("all_reduce.one_shot", (1024, 16384, 262144, 4194304)),
        ("all_reduce.two_shot", (1024, 16384, 262144, 4194304)),
        ("all_reduce.low_latency", (1024, 16384)),
        ("matmul_reduce_scatter.push", (256, 1024, 4096)),
        ("matmul_reduce_scatter.barrier", (256, 1024, 4096)),
    ):
        module = find(op)
        for each in sizes:
            fields = {"m": each, "n": 3584, "k": 8192} if "matmul" in op else {"numel": each}
            problem = changed(module.cases(size)[0], {**fields, "dtype": torch.bfloat16})
            yield op, problem, module.default(problem, num_sms), num_sms
    module = find("all_gather.push")
    problem = changed(module.cases(size)[0], {"numel": 1048576, "dtype": torch.bfloat16})
    for programs in (2, 8, 16):
        yield "all_gather.push", problem, module.Config(16384, programs, 8), num_sms


def describe(
    name: str, title: str, kind: str, num_sms: int, found: tuple[Sequence[Sample], Rates],
    source: Source,
) -> Hardware:  # fmt: skip
    """Describe this machine from the suite's times. What they can't tell is copied from the
    package's machine with the same kind of link, and marked so."""
    samples, rates = found
    start = read("h200-shared" if kind == "none" else "h200x8")
    gpus = 1 if kind == "none" else max(sample.problem.size for sample in samples)
    made = dataclasses.replace(start, name=name, title=title, gpus=gpus).changed(
        {
            "gpu.num_sms": num_sms,
            "gpu.read_rate": rates.read,
            "gpu.write_rate": rates.fill,
            "gpu.copy_rate": min(rates.copy, 1.99 * rates.fill),
        }
    )
    as_there = {
        each: Source(f"assumed: as on {start.name} ({old.text})", old.date)
        for each, old in start.sources.items()
    }
    made = dataclasses.replace(made, sources=as_there)
    names = SHARED if kind == "none" else LINKED
    moving = [sample for sample in samples if "matmul" not in sample.op]
    made = fit_moving(made, moving, names)
    made = fit_products(made, [sample for sample in samples if "matmul" in sample.op])
    both = ("link.pair_rate",) if kind == "switch" else ()
    own = (*names, *both, "gpu.tile_s", "gpu.matmul_rate", "gpu.num_sms", *_RATES)
    return signed(made, own, source)


def topology(hardware: Hardware) -> str:
    """Draw who reaches whom, and how fast."""
    link, gpu = hardware.link, hardware.gpu
    memory = f"{gpu.num_sms} SMs, memory {gpu.copy_rate / 1e12:.2f} TB/s"
    if link.kind == "none":
        return f"[ GPU 0: {memory} ]  the ranks share it; a barrier {gpu.flag_s * 1e6:.1f} us"
    barrier = (gpu.flag_s + link.flag_s) * 1e6
    lines = [f"[ GPU {i}: {memory} ]--+" for i in range(hardware.gpus)]
    middle = len(lines) // 2
    lines[middle] += (
        f"-- {link.kind}: {link.rate / 1e9:.0f} GB/s a GPU and direction, barrier {barrier:.1f} us"
    )
    return "\n".join([*lines, *_pair_lines(hardware)])


def _pair_lines(hardware: Hardware) -> list[str]:
    """Return a row for each GPU, with the rates at which it reads from every peer."""
    if hardware.link.pair_rates is None:
        return []
    reads = {(each.gpu, each.peer): each.read for each in hardware.link.pair_rates}
    gpus = range(hardware.gpus)
    lines = ["GB/s that a GPU reads from a peer, one pair at a time:"]
    for gpu in gpus:
        cells = (f"{reads[gpu, p] / 1e9:5.0f}" if (gpu, p) in reads else "    -" for p in gpus)
        lines.append(f"  GPU {gpu}: {' '.join(cells)}")
    return lines


# Fit a machine's figures to measured times of ops: first those for moving data, then those for
# products. Collectives say nothing about products, and a product's time depends on both.

# What collectives can tell apart: where ranks share a GPU, and where they are linked.
SHARED = (
    "gpu.launch_s", "gpu.flag_s", "gpu.load_s", "gpu.cache_rate", "gpu.sm_rate",
    "gpu.sm_load_rate", "gpu.poll_rate",
)  # fmt: skip
LINKED = (
    "gpu.launch_s",
    "gpu.sm_rate",
    "gpu.sm_load_rate",
    "link.flag_s",
    "link.load_s",
    "link.rate",
)


class Sample(NamedTuple):
    """What one config of an algorithm took."""

    op: str
    problem: Any
    config: Any
    num_sms: int
    seconds: float


def fit_moving(hardware: Hardware, samples: Sequence[Sample], names: Sequence[str]) -> Hardware:
    """Fit the figures `names` to the samples."""
    start = {name: figure_of(hardware, name) for name in names}
    return _changed(hardware, _fitted(start, samples, lambda figures: _changed(hardware, figures)))


def fit_products(hardware: Hardware, samples: Sequence[Sample]) -> Hardware:
    """Fit the rates of products over their size, and what a tile costs besides."""

    def made(figures: dict[str, float]) -> Hardware:
        return hardware.changed(with_rates(hardware, figures))

    return made(_fitted(product_figures(hardware), samples, made))


def product_figures(hardware: Hardware) -> dict[str, float]:
    """Return the start of a fit of products: a rate per size, and a tile's cost."""
    rates = {f"rate {i}": rate for i, (_, rate) in enumerate(hardware.gpu.matmul_rate)}
    return {"gpu.tile_s": max(hardware.gpu.tile_s, 1e-9), **rates}


def with_rates(hardware: Hardware, figures: dict[str, float]) -> dict[str, Any]:
    """Return the same figures by the names that `Hardware.changed` takes."""
    rates = [(size, figures[f"rate {i}"]) for i, (size, _) in enumerate(hardware.gpu.matmul_rate)]
    return {"gpu.tile_s": figures["gpu.tile_s"], "gpu.matmul_rate": tuple(rates)}


def _fitted(
    start: dict[str, float], samples: Sequence[Sample], made: Callable[[dict[str, float]], Hardware]
) -> dict[str, float]:
    def predict(figures: dict[str, float]) -> list[float]:
        there = made(figures)
        return [expected(s.op, s.problem, s.config, there, s.num_sms).seconds for s in samples]

    return fit(start, predict, [sample.seconds for sample in samples])


def _changed(hardware: Hardware, figures: dict[str, float]) -> Hardware:
    """Return the hardware with these figures. With a switch a pair has the full rate."""
    if "link.rate" in figures and hardware.link.kind == "switch":
        figures = {**figures, "link.pair_rate": figures["link.rate"]}
    return hardware.changed(figures)


def figure_of(hardware: Hardware, name: str) -> float:
    part, _, inside = name.partition(".")
    value: float = getattr(getattr(hardware, part), inside)
    return value


def signed(hardware: Hardware, names: Sequence[str], source: Source) -> Hardware:
    """Add where these figures come from, and round them: at most three digits are known."""
    changes: dict[str, Any] = {}
    for name in names:
        value = figure_of(hardware, name)
        changes[name] = (
            tuple((size, _rounded(rate)) for size, rate in value)
            if isinstance(value, tuple)
            else _rounded(value)
        )
    sources = {**hardware.sources, **dict.fromkeys(names, source)}
    return dataclasses.replace(hardware.changed(changes), sources=sources)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.3g}")


# the search

Predict = Callable[[dict[str, float]], Sequence[float]]

_STEP = 1e-4  # of a figure's logarithm, for a derivative
_MOST = 60


def fit(start: dict[str, float], predict: Predict, measured: Sequence[float]) -> dict[str, float]:
    """Fit figures by name, beginning with `start`. `predict` returns the times for figures.

    It minimises the squared logarithm of predicted over measured, so that 5 us count as much as 5
    ms, by damped Gauss-Newton steps on the logarithms of the figures, which stay positive.
    """
    names, goal = list(start), np.log(np.asarray(measured, float))
    at = np.log([start[name] for name in names])

    def miss(point: np.ndarray) -> np.ndarray:
        figures = dict(zip(names, np.exp(point).tolist(), strict=True))
        return np.asarray(np.log(np.asarray(predict(figures), float)) - goal)

    found, damping = miss(at), 1e-2
    for _ in range(_MOST):
        slopes = [(miss(at + _STEP * unit) - found) / _STEP for unit in np.eye(len(names))]
        jacobian = np.stack(slopes, axis=1)
        normal, pull = jacobian.T @ jacobian, jacobian.T @ found
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.eye(len(names)), -pull)
            tried = miss(at + np.clip(step, -1, 1))
            if tried @ tried < found @ found:
                break
            damping *= 4
        else:
            break
        gain = found @ found - tried @ tried
        at, found, damping = at + np.clip(step, -1, 1), tried, damping / 4
        if gain < 1e-7 * (found @ found):
            break
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """Return each one's error, as a share of what was measured."""
    return [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
