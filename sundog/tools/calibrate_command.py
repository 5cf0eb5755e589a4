"""`sundog calibrate`: run the suite, fit, write the description, show the machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import target
from ..errors import SundogError
from ..hardware.description import Hardware, Source, plain, read
from ..ops.load import changed, value
from ..ops.op import find
from ..ops.select import Entry
from ..predict.calibration import LINKED, SHARED, Sample, fit_moving, fit_products, signed
from ..predict.expected import calibrated_path
from ..predict.expected import time as expected
from ._console import FINE, check_writable, command, ensure_compiler_cache, note, write_json
from .bench.limits import Rates
from .bench.run import BenchOptions, bench

__all__ = ["AXES", "CalibrateOptions", "describe", "made_up", "measured", "run", "topology"]


@dataclass(frozen=True)
class CalibrateOptions:
    world: int = 8
    backend: str = "virtual"
    clock: str = ""  # a machine whose model is the clock: nothing is measured
    out: str = ""


@command("calibrate")
def run(options: CalibrateOptions) -> int:
    check_writable(options.out)
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
    return made, found[0]


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


# the suite, and a description made of what it took

# An op, and the axes of `sundog bench`. A world for each: together they take less than a minute.
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
            op, ("dtype=bfloat16", *axes), world, backend, baselines=("none",), samples=_SAMPLES
        )
        rows, rates = bench(given)
        timed = [row for row in rows if row.entry is not None and row.times is not None]
        if len(timed) < len(rows) / 2:  # low_latency refuses two of four sizes: that is expected
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
    """An entry has problem and config as JSON has them."""
    module = find(entry.op)
    words = {n: value(w) if isinstance(w, str) else w for n, w in entry.problem.items()}
    problem = module.Problem(**words)
    return Sample(entry.op, problem, module.Config(**entry.config), entry.num_sms, seconds)


def made_up(clock: Hardware, size: int) -> tuple[list[Sample], Rates]:
    """A made-up clock: what a model says, three percent off in turn. Nothing is measured."""
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
        ("all_gather.push", (1024, 131072, 4194304)), ("all_gather.pull", (1024, 131072, 4194304)),
        ("all_reduce.one_shot", (1024, 16384, 262144, 4194304)),
        ("all_reduce.two_shot", (1024, 16384, 262144, 4194304)),
        ("all_reduce.low_latency", (1024, 16384)),
        ("matmul_reduce_scatter.push", (256, 1024, 4096)),
        ("matmul_reduce_scatter.barrier", (256, 1024, 4096)),
    ):  # fmt: skip
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
    """A description of this machine, from what the suite took there. What it can't tell is as on
    the machine of the package with the same kind of link, and says so."""
    samples, rates = found
    start = read("h200-shared" if kind == "none" else "h200x8")
    gpus = 1 if kind == "none" else max(sample.problem.size for sample in samples)
    made = dataclasses.replace(start, name=name, title=title, gpus=gpus).changed(
        {
            "gpu.num_sms": num_sms, "gpu.read_rate": rates.read, "gpu.write_rate": rates.fill,
            "gpu.copy_rate": min(rates.copy, 1.99 * rates.fill),
        }
    )  # fmt: skip
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
    """A picture of who reaches whom, and how fast."""
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
    return "\n".join(lines)
