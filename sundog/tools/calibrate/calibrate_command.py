"""`sundog calibrate`: run the suite, fit, write the description, show the machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ... import target
from ...errors import SundogError
from ...hardware.description import Hardware, Source, plain, read
from ...predict.calibration import Sample
from ...predict.expected import calibrated_path
from ...predict.times import time as expected
from .._console import FINE, check_writable, command, ensure_compiler_cache, note, write_json
from .suite import describe, made_up, measured, topology

__all__ = ["CalibrateOptions", "run"]


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
