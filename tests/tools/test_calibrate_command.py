"""`sundog calibrate`, with a made-up clock: times that a machine's model says, 3 % off in turn."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sundog
from sundog.hardware.description import PairRates, Source, plain, read
from sundog.ops.load import find
from sundog.ops.op import Cost
from sundog.ops.select import Entry
from sundog.predict.expected import MODELS, time
from sundog.tools import calibrate_command
from sundog.tools._subject import algorithms_of
from sundog.tools.bench.limits import Rates, measure_pairs
from sundog.tools.bench.run import Row, parse_axes
from sundog.tools.calibrate_command import (
    AXES,
    LINKED,
    SHARED,
    CalibrateOptions,
    describe,
    figure_of,
    made_up,
    run,
    topology,
    with_pairs,
)
from sundog.tools.timing import Times
from sundog.world.world import World


@pytest.mark.parametrize("name", ["h200-shared", "h200x8"])
def test_the_clock_of_a_machine_gives_it_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    assert run(CalibrateOptions(8, clock=name, out=str(path))) == 0
    made, clock = read(str(path)), read(name)
    told = " ".join(capsys.readouterr().err.split())
    assert f"written to {path}" in told
    assert (made.link.kind, made.gpu.num_sms) == (clock.link.kind, clock.gpu.num_sms)
    for sample in made_up(clock, 8)[0]:
        found = time(*sample[:3], made, sample.num_sms).seconds
        assert found == pytest.approx(sample.seconds, rel=0.07), sample
    fitted = SHARED if made.link.kind == "none" else LINKED
    assert all("made-up clock" in made.sources[each].text for each in fitted)
    assert made.sources["gpu.share_s"].text.startswith("assumed: as on h200")


def test_a_machine_that_differs_is_found() -> None:
    """Half of the memory's rate, twice as long barriers, a third of the link."""
    clock = read("h200x8").changed(
        {
            "gpu.read_rate": 2.2e12,
            "gpu.write_rate": 1.7e12,
            "gpu.copy_rate": 2.1e12,
            "link.flag_s": 3e-6,
            "link.rate": 1e11,
            "link.pair_rate": 1e11,
        }
    )
    source = Source("measured: a test", "2026-11-16")
    made = describe("mine", "a test", "switch", 132, made_up(clock, 8), source)
    assert made.link.rate == pytest.approx(1e11, rel=0.1)
    assert made.link.pair_rate == made.link.rate
    assert figure_of(made, "link.flag_s") == pytest.approx(3e-6, rel=0.3)
    assert made.gpu.copy_rate == pytest.approx(2.1e12, rel=0.01)


@pytest.mark.parametrize(("op", "axes"), AXES)
@pytest.mark.parametrize("size", [2, 8])
def test_the_suite_is_one_that_bench_takes(op: str, axes: tuple[str, ...], size: int) -> None:
    """Every algorithm of it has a model."""
    problems, choices = parse_axes(algorithms_of(op), axes, size)
    assert len(problems) * len(choices) >= 2
    assert all(f"{op}.{algo}" in MODELS for algo, _ in choices)


def _row(op: str, problem: dict, config: dict, seconds: float) -> Row:
    entry = Entry(op, problem, config, 0.0, "", "", 16)
    return Row(op.partition(".")[2], str(problem), "", Cost(0, 0, 0, 0), 0.0, entry=entry,
               times=Times(op, [[seconds, seconds / 2]] * 3))  # fmt: skip


def test_rows_of_bench_become_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: bench is replaced; a refused row is left out, a suite that fails is named."""
    problem = {"numel": 1024, "dtype": "bfloat16", "size": 8, "op": "sum"}
    config = {"block": 1024, "programs": 1, "num_warps": 4}
    rows = [_row("all_reduce.one_shot", problem, config, 7e-6)]
    refused = Row("low_latency", "", "", Cost(0, 0, 0, 0), 0.0, wrong="too large")
    rates = Rates(4.2e12, 3.4e12, 4.5e12, 8e14)
    monkeypatch.setattr(calibrate_command, "bench", lambda options: ([*rows, refused], rates))
    found, _ = calibrate_command.measured(8, "virtual")
    assert len(found) == len(AXES)
    assert found[0].problem == find("all_reduce.one_shot").Problem(1024, torch.bfloat16, 8)
    assert (found[0].seconds, found[0].num_sms) == (7e-6, 16)
    monkeypatch.setattr(
        calibrate_command, "bench", lambda options: ([*rows, refused, refused], rates)
    )
    with pytest.raises(ValueError, match="1 of 3 were timed; the others: low_latency : too large"):
        calibrate_command.measured(8, "virtual")


def test_each_pair_is_measured_alone_and_drawn(tmp_path: Path) -> None:
    """On the simulator, with a clock that is made up: each work takes longer than the last."""

    def main(world: World) -> list[PairRates]:
        turns = iter(range(1, 100))

        def timer(work: Callable[[], object]) -> float:
            work()
            return next(turns) * 1e-3

        return measure_pairs(world, 1 << 12, timer)

    first, *others = sundog.run(main, 3, "sim")
    assert all(each == first for each in others)
    assert [(pair.gpu, pair.peer) for pair in first] == list(itertools.permutations(range(3), 2))
    moved = (1 << 12) / 1e-3
    assert first[2][2:] == pytest.approx((moved / 1, moved / 2, moved / 3))
    clock = dataclasses.replace(read("h200x8"), gpus=3)
    faster = [pair._replace(read=2e11, write=1e14, copy=3e11) for pair in first]
    made = with_pairs(clock, faster, Source("measured: a test", "2026-11-16"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(plain(made)))
    link = read(str(path)).link
    assert link.pair_rates is not None
    assert {pair[2:] for pair in link.pair_rates} == {(2e11, link.rate, 3e11)}, "none has more"
    assert link.copy_rate == 3e11
    assert topology(made).splitlines()[-3:] == [
        "  GPU 0:     -   200   200",
        "  GPU 1:   200     -   200",
        "  GPU 2:   200   200     -",
    ]


def test_the_picture_shows_every_gpu() -> None:
    assert topology(read("h200x8")).count("GPU ") == 8 + 1  # and once in "a GPU and direction"
    assert "the ranks share it" in topology(read("h200-shared"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CalibrateOptions(8), "torch finds no GPU here"),
        (CalibrateOptions(1), "--world must be at least 2"),
        (CalibrateOptions(8, clock="mi300x8"), "its link is a mesh: no suite for it"),
        (CalibrateOptions(8, clock="sundial"), "machine 'sundial' is not known"),
    ],
)
def test_what_cannot_be_calibrated(
    options: CalibrateOptions,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sundog.target.has_gpu", lambda: False)
    assert run(options) == 2
    told = capsys.readouterr()
    assert message in " ".join((told.out + told.err).split())
