"""`sundog bench OP` from axes to files, on the simulator: all but the timing itself."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

import sundog
from sundog.backends.sim import Sim
from sundog.device import signal
from sundog.ops.load import find
from sundog.ops.op import Cost
from sundog.ops.select import read_entries, user_file, write_entries
from sundog.report import page
from sundog.tools import timing
from sundog.tools.baselines import BASELINES, Baseline, chosen
from sundog.tools.bench import bench_command, limits
from sundog.tools.bench import run as bench
from sundog.tools.bench.limits import Rates
from sundog.tools.timing import Times, Variant, times_of

pytestmark = pytest.mark.sim_only


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The simulator in a GPU's place, and a clock by which every variant takes 10 us more."""
    told: list[str] = []

    def measure(
        world: sundog.World,
        variants: Sequence[Variant],
        samples: int,
        at_least: int,
        step: Callable[[str], None],
        warmup: int,
    ) -> list[Times]:
        for variant in variants:
            step(variant.name)
            told.append(variant.name)
        seconds = [1e-5 * (n + 1) for n in range(len(variants))]
        return [
            Times(v.name, [[t] * world.size] * samples)
            for v, t in zip(variants, seconds, strict=True)
        ]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.target, "has_gpu", lambda: True)
    monkeypatch.setattr(bench.target, "of", lambda _: SimpleNamespace(key="none", l2_bytes=1 << 12))
    monkeypatch.setattr(limits, "measure_rates", lambda _: Rates(4e12, 2e12, 5e12, 8e14))

    def run_ranks(main: Any, size: int, backend: str, heap_size: int, link: str) -> list:
        assert heap_size == 0  # these problems are small
        return sundog.run(main, size, backend="sim", link=link)

    monkeypatch.setattr(bench, "run_ranks", run_ranks)
    return told


AXES = ["algo=push,pull", "programs=2,3", "numel=48,96", "dtype=float32"]


def run(*axes: str, op: str = "all_gather", only: str = "torch.cat,copy_") -> list[bench.Row]:
    return bench.bench(options(op, axes, baselines=only.split(",") if only else []))[0]


def options(op: str, axes: Sequence[str], **more: Any) -> bench.BenchOptions:
    return bench.BenchOptions(op, axes, world=3, samples=5, **more)


def test_baselines_by_their_names() -> None:
    known = BASELINES["all_gather_matmul"]
    name = "our GEMM, A gathered"
    assert list(chosen(known, [name])) == [name]
    assert list(chosen(known, ["none"])) == []
    assert chosen(known, []) == known
    with pytest.raises(ValueError, match=f"'our GEMM' is not known; there are: '{name}', "):
        chosen(known, ["our GEMM"])


def test_every_variant_is_run_compared_and_timed(simulated: list[str]) -> None:
    rows = run(*AXES)
    assert [(r.variant, r.programs, r.wrong) for r in rows[:6]] == [
        ("push", 2, ""),
        ("push", 3, ""),
        ("pull", 2, ""),
        ("pull", 3, ""),
        ("torch.cat", 0, ""),
        ("copy_", 0, ""),
    ]
    assert len(rows) == 12
    assert len(simulated) == 3 * 12  # on every rank
    assert all(row.times is not None for row in rows)


def test_a_wrong_baseline_is_not_timed(
    simulated: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*given: Any) -> Callable[[], None]:
        def launch() -> None:
            raise RuntimeError("not for this GPU [/0]\nand more")

        return launch

    makes = {"idle": lambda *given: lambda: None, "fails": fails}
    broken = {name: bench.Baseline(make) for name, make in makes.items()}
    monkeypatch.setitem(BASELINES, "all_gather", broken)
    rows = {row.variant: row for row in run("algo=push", "numel=48", "dtype=int32", only="")}
    assert rows["push"].times is not None
    # 144 elements on each of 3 ranks, of 4 sets: two L2 caches full of them.
    assert rows["idle"].wrong == f"{144 * 3 * 4} elements differ from the reference"
    assert rows["fails"].wrong == "not for this GPU [/0]"
    assert rows["idle"].times is rows["fails"].times is None
    bench_command.print_rows([rows["fails"]], 3)
    assert "not for this GPU [/0]" in capsys.readouterr().out  # it means nothing to rich


def test_a_variant_that_fails_costs_its_row(
    simulated: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wait runs out where one is compared, in the first world; where another one is timed, in the
    second: in a third one both are left out. The first problem is not measured again."""
    measure, worlds = bench.measure, []

    def hangs(world: sundog.World, problem: Any, given: Any, out: torch.Tensor) -> Callable:
        return lambda: _never(world) if problem.numel == 96 else copy(world, problem, given, out)()

    def some_hang(
        world: sundog.World, variants: Sequence[Variant], *given: Any, **more: Any
    ) -> Any:
        for variant in variants:
            with timing.blame(variant.name):
                if "programs=3" in variant.name and variant.calls[0].args[-1].numel() == 3 * 96:
                    _never(world)
        return measure(world, variants, *given, **more)

    def run_ranks(main: Any, size: int, backend: str, heap_size: int, link: str) -> list:
        worlds.append(size)
        return sundog.run(main, size, backend="sim", sim=Sim(expire=True))

    copy = BASELINES["all_gather"]["copy_"].make
    monkeypatch.setitem(BASELINES, "all_gather", {"hangs": bench.Baseline(hangs)})
    monkeypatch.setattr(bench, "measure", some_hang)
    monkeypatch.setattr(bench, "run_ranks", run_ranks)
    rows = run("algo=push", *AXES[1:], only="")
    assert [(r.variant, r.programs, bool(r.times)) for r in rows] == [
        ("push", 2, True),
        ("push", 3, True),
        ("hangs", 0, True),
        ("push", 2, True),
        ("push", 3, False),
        ("hangs", 0, False),
    ]
    assert len(worlds) == 3
    assert len(simulated) == 3 * (3 + 1), "what was measured stays"
    for row in rows[4:]:
        assert "WaitTimeout: rank" in row.wrong
        assert "waited for never[0] to reach 1" in row.wrong
    assert capsys.readouterr().err.count("not timed: ") == 2
    monkeypatch.setattr(bench, "measure", measure)
    assert bench_command.run(options("all_gather", ["algo=push", "numel=96"])) == 1


def _never(world: sundog.World) -> None:
    """Rank 0 waits for what nobody signals; the others are in a barrier then."""
    flag = world.signals(1, "never")
    if world.rank == 0:
        _wait_for_nothing[(1,)](flag, world.ctx)
    world.barrier()


@triton.jit
def _wait_for_nothing(flag, ctx):  # type: ignore[no-untyped-def]
    signal.wait(flag, 1, 1, ctx)


def test_a_config_that_does_not_fit_is_named(
    simulated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("algo=push", "programs=2,0", "numel=48")
    assert {row.programs for row in rows if row.config} == {2}
    assert "not run: all_gather.push" in capsys.readouterr().err


def test_large_problems_get_a_large_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 MB of each of 8 ranks, all-gathered: two sets of inputs and outputs."""
    monkeypatch.delenv("SUNDOG_HEAP_SIZE", raising=False)
    assert bench._heap_size(1 << 20) == 0
    assert 2 * (9 << 29) < bench._heap_size(9 << 29) < 3 * (9 << 29)
    monkeypatch.setenv("SUNDOG_HEAP_SIZE", "16G")
    assert bench._heap_size(9 << 29) == 0


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_baselines_on_peers_give_the_same_answers(simulated: list[str], op: str) -> None:
    rows = run("numel=0,48", "dtype=float32", op=op, only="")
    assert {row.variant for row in rows if not row.config} in (
        {"torch.cat", "copy_"},
        {"add_"},
        {"copy_"},
    )
    assert not [row.wrong for row in rows if row.wrong]


def _on_gloo(world: sundog.World, op: str, folder: str) -> bool:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{op}", rank=world.rank, world_size=world.size
    )
    module = find(op)
    problem = module.cases(world.size)[0]
    inputs = module.inputs(world, problem, 0)
    parts = world.exchange([tensor.clone() for tensor in inputs])
    want = module.reference(problem, world.rank, *map(list, zip(*parts, strict=True)))
    out = torch.full_like(want, 7)
    BASELINES[op]["gloo"].make(world, problem, inputs, out)()
    dist.destroy_process_group()
    return torch.equal(out, want)


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"])
def test_torch_distributed_gives_the_same_answers(op: str, tmp_path: Path) -> None:
    def main(world: sundog.World) -> bool:
        return _on_gloo(world, op, str(tmp_path))

    assert sundog.run(main, 2, backend="shm") == [True, True]


def test_over_a_link_rank_0_alone_counts(
    simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.limits, "link_rate", lambda _: 3e8)
    axes = ["m=24,192", "n=16", "k=96"]
    rows, rates = bench.bench(options("all_gather_matmul", axes, link="pcie"))
    assert rates.link == 3e8
    assert not any(row.wrong for row in rows)
    gemm = [row.times.median for row in rows if row.variant == "cuBLAS alone" and row.times]
    assert len(gemm) == 2
    for row in rows:
        assert row.times is not None
        assert [len(ranks) for ranks in row.times.samples] == [1] * 5
        crossing = row.cost.link_bytes / 3e8
        assert row.limit in [max(crossing, each) for each in gemm]
    small, *_, large = (row.limit for row in rows)
    assert small in gemm  # the product takes longer
    assert large == 192 * 96 // 3 * 2 * 2 / 3e8


def test_times_are_taken_on_normal_data(simulated: list[str], monkeypatch: Any) -> None:
    """Results are compared on whole numbers; what is timed then sees others, in the same places."""
    seen: dict[str, list[bool]] = {"compared": [], "timed": []}
    phase = "compared"

    def is_whole(x: Any) -> bool:
        return bool((x == x.round()).all())

    def cat(world: sundog.World, problem: Any, inputs: tuple, out: Any) -> Callable[[], None]:
        x = inputs[0].clone()  # as a baseline that gathers once

        def call() -> None:
            seen[phase].append(is_whole(x) or is_whole(inputs[0]))
            out.copy_(torch.cat([world.peer(inputs[0], r) for r in range(world.size)]))

        return call

    def measure(world: sundog.World, variants: Any, samples: int, **_: Any) -> list[Times]:
        nonlocal phase
        phase = "timed"
        for variant in variants:
            for call in variant.calls:
                call()
        return [Times(v.name, [[1e-5] * world.size] * samples) for v in variants]

    monkeypatch.setitem(bench.BASELINES, "all_gather", {"mine": Baseline(cat)})
    monkeypatch.setattr(bench, "measure", measure)
    rows = run("algo=push", "numel=48", "dtype=float32", only="mine")
    assert [row.wrong for row in rows] == ["", ""]
    assert set(seen["compared"]) == {True}
    assert set(seen["timed"]) == {False}


def test_bars_stand_for_the_fastest_config() -> None:
    cost = Cost(flops=1, read_bytes=1, written_bytes=1, link_bytes=1)

    def row(variant: str, seconds: float, expected: float = 0.0) -> bench.Row:
        times = Times(variant, [[seconds]])
        return bench.Row(variant, "A", "", cost, 1e-6, times=times, expected=expected)

    slow, fast, other = row("push", 9e-6, 8e-6), row("push", 4e-6, 3e-6), row("copy_", 5e-6)
    failed = bench.Row("idle", "A", "", cost, 1e-6, wrong="no")
    (ours, theirs) = bench_command.bars_of([slow, fast, other, failed])["A"]
    assert (ours[0], theirs[0]) == ("push", "copy_")
    assert ours[1:] == pytest.approx((4, 3, 1))
    assert theirs[1:] == pytest.approx((5, 0, 1))


def test_files(simulated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("report.js", "report.css", "licences.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(page, "ASSETS", tmp_path)  # the page's data is looked at, not its script
    names = [str(tmp_path / name) for name in ("a.csv", "a.json", "a.png")]
    kept = tmp_path / "gpu.json"
    files = dict(zip(("csv", "json", "plot"), names, strict=True)) | {"entries": str(kept)}
    files["bars"] = str(tmp_path / "bars.png")
    files["html"] = str(tmp_path / "page.html")
    wanted = options("all_gather", AXES, baselines=["torch.cat"], **files)
    assert bench_command.run(wanted) == 0
    with open(names[0]) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10
    assert [row["programs"] for row in rows[:5]] == ["2", "3", "2", "3", ""]
    assert rows[0]["median_us"] == "10.000"
    moved = 4 * (48 + 3 * 48)  # each rank: reads its own, writes all
    assert float(rows[0]["gb_per_s"]) == pytest.approx(3 * moved / 1e-5 / 1e9, abs=0.05)
    assert json.loads(Path(names[1]).read_text())["rows"][1]["programs"] == 3
    assert Path(names[2]).stat().st_size > 10_000
    assert {"tflop_per_s", "expected_us"} <= rows[0].keys()
    assert (tmp_path / "bars.png").stat().st_size > 5_000
    (shown,) = page.read_report(files["html"])["sections"]
    assert (shown["kind"], shown["name"]) == ("bench", "all_gather")
    assert [row["variant"] for row in shown["data"]["rows"][:2]] == ["push", "push"]
    assert shown["data"]["rows"][0]["samples_ns"] == [pytest.approx(1e4)] * 5
    found = read_entries(kept)
    numels = [("push", 48), ("pull", 48), ("push", 96), ("pull", 96)]
    assert [(e.op, e.problem["numel"]) for e in found] == [
        (f"all_gather.{a}", n) for a, n in numels
    ]
    for entry in found:
        problem = f"Problem(numel={entry.problem['numel']}, dtype=torch.float32, size=3)"
        mine = [r for r in rows if (r["variant"], r["problem"]) == (entry.op[11:], problem)]
        fastest = min(mine, key=lambda row: float(row["median_us"]))
        assert f"programs={entry.config['programs']}" in fastest["config"]
        assert entry.seconds == pytest.approx(1e-6 * float(fastest["median_us"]))
        assert (entry.run, entry.num_sms) == ("a.json", 16)


def lines_of(panel: Any) -> dict[str, tuple[list, list]]:
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in panel.lines
    }


def test_the_plot_has_a_panel_per_size_and_a_line_per_algorithm(
    simulated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(pytest.importorskip("matplotlib.pyplot"), "close", drawn.append)
    rows = run(*AXES)
    for each in (rows, [dataclasses.replace(row, limit=0.0) for row in rows]):
        bench_command.draw(str(tmp_path / "a.png"), each, 3)
    figure, empty = drawn
    small, large = figure.axes
    assert [panel.get_title().partition("\n")[0] for panel in figure.axes] == [
        "numel=48, dtype=float32, size=3",
        "numel=96, dtype=float32, size=3",
    ]
    lines = lines_of(large)
    assert list(lines) == ["push", "pull", "torch.cat", "copy_", "limit"]
    rates = [row.cost.hbm_bytes * 3 / row.times.median / 1e9 for row in rows[6:] if row.times]
    assert lines["push"] == ([2, 3], rates[:2])
    assert lines["pull"] == ([2, 3], rates[2:4])
    assert set(lines["torch.cat"][1]) == {rates[4]}
    assert lines_of(small)["push"][1] != lines["push"][1]
    assert list(lines_of(empty.axes[0])) == ["push", "pull", "torch.cat", "copy_"]


def test_a_time_is_compared_with_the_stored_one(
    simulated: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the very config and problem, and of no other."""
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))
    axes = "algo=push", "programs=2,3", "numel=48,96", "dtype=float32"
    (entry,) = [row.entry for row in run(*axes, only="none") if "numel=48" in row.problem][:1]
    assert entry is not None
    write_entries(user_file("none"), [dataclasses.replace(entry, seconds=8e-6)])
    rows = run(*axes, only="none")
    assert [row.stored for row in rows] == [8e-6, 0, 0, 0]
    bench_command.print_rows(rows, 3)
    assert "1.25" in capsys.readouterr().out  # 10 us by the clock of `simulated`
    assert [bench_command.row_json(row)["stored_ns"] for row in rows] == [8000, 0, 0, 0]


def test_the_table_names_algorithms(
    simulated: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bench_command.print_rows(run("algo=push", "programs=2", "numel=48", only="copy_"), 3)
    shown = capsys.readouterr().out
    assert "push" in shown
    assert "copy_ 2.00" in shown  # times as fast as


def test_the_figures_of_a_row() -> None:
    """Of 21 samples and two ranks, the second slower; baselines count on their problem only."""
    cost = Cost(flops=6_000_000_000, read_bytes=300_000, written_bytes=100_000, link_bytes=7)
    samples = [[1e-6 * n, 2e-6 * n] for n in range(10, 31)]  # medians: 20 and 40 us
    ours = bench.Row("push", "A", "Config()", cost, 3e-5, 2, times=Times("push", samples))
    near = bench.Row("copy_", "A", "", cost, 3e-5, times=Times("copy_", [[5e-5, 6e-5]]))
    other = bench.Row("copy_", "B", "", cost, 3e-5, times=Times("copy_", [[9e-5, 9e-5]]))
    failed = bench.Row("idle", "A", "", cost, 3e-5, wrong="7 elements differ")
    rows = [ours, near, other, failed]
    assert bench_command._cells(ours, rows, 2) == [
        "A", "push Config()", "40.0 us", "28.0 us", "52.0 us", "20.0 us",
        "20", "300.0", "0.75", "", "copy_ 1.50",
    ]  # fmt: skip
    assert bench_command._cells(near, rows, 2)[-2:] == ["", ""]
    assert bench_command._cells(failed, rows, 2)[:3] == ["A", "idle", "wrong: 7 elements differ"]
    written = bench_command.row_json(ours)
    figures = {"flops": 6e9, "hbm_bytes": 4e5, "link_bytes": 7, "limit_ns": 3e4, "stored_ns": 0}
    assert {name: written[name] for name in figures} == figures
    assert times_of(written["times"]).median == pytest.approx(4e-5)
    assert bench_command.row_json(failed)["times"] is None
