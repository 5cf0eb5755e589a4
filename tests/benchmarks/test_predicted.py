"""The time model against measured times: how far off it is on shapes that no fit has seen."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks import predicted_public as public
from benchmarks.predicted import MACHINES, choices, quantile
from benchmarks.predicted_plot import draw_scatter
from benchmarks.predicted_rows import Row, measured_rows, predict_rows, tuning_rows
from sundog.hardware.description import read
from sundog.ops import select

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "data" / "public" / "collectives.csv"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return measured_rows(ROOT / "docs" / "measured")


@pytest.fixture(scope="module")
def predicted(rows: list[Row]) -> list[float]:
    return predict_rows(rows, {name: read(name) for name in MACHINES})


def by_op(rows: list[Row], predicted: list[float], held_out: bool) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        if row.is_held_out == held_out:
            found.setdefault(row.op, []).append(abs(seconds / row.seconds - 1))
    return found


def test_a_shape_is_either_fitted_or_judged(rows: list[Row]) -> None:
    """All algorithms and configs of a problem are on one side, and both sides are large."""
    sides: dict[tuple, set[bool]] = {}
    for row in rows:
        key = row.op.partition(".")[0], row.problem, row.machine
        sides.setdefault(key, set()).add(row.is_held_out)
    assert all(len(each) == 1 for each in sides.values())
    held_out = sum(row.is_held_out for row in rows)
    assert 0.4 < held_out / len(rows) < 0.6
    assert len(rows) > 600


def test_the_error_on_shapes_not_seen(rows: list[Row], predicted: list[float]) -> None:
    """Goal: a median of 8 %. all_to_all.mail was measured on one problem only, with all its rows
    in view."""
    medians = {op: statistics.median(e) for op, e in by_op(rows, predicted, True).items()}
    assert len(medians) == 19
    assert not {op: median for op, median in medians.items() if median > 0.08}


def test_one_row_in_ten_of_an_op_is_far_off(rows: list[Row], predicted: list[float]) -> None:
    """Goal: a 90th percentile of 20 % per op, over all its algorithms and numbers of ranks."""
    found: dict[str, list[float]] = {}
    for op, misses in by_op(rows, predicted, True).items():
        found.setdefault(op.partition(".")[0], []).extend(misses)
    assert len(found) == 7
    assert not {op: quantile(m, 0.9) for op, m in found.items() if quantile(m, 0.9) > 0.20}


def test_the_error_on_each_backend_and_over_pcie(rows: list[Row], predicted: list[float]) -> None:
    """The same goals. A single row of reduce_scatter on symm, 11 % off, has no median."""
    found: dict[tuple[str, str], list[float]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        if row.is_held_out:
            key = row.op.partition(".")[0], row.place
            found.setdefault(key, []).append(abs(seconds / row.seconds - 1))
    assert {place for _, place in found} == {"virtual", "symm", "pcie"}
    assert not {key: quantile(m, 0.9) for key, m in found.items() if quantile(m, 0.9) > 0.20}
    medians = {key: statistics.median(m) for key, m in found.items() if len(m) > 1}
    assert not {key: median for key, median in medians.items() if median > 0.08}


def test_only_two_ranks_are_far_off(rows: list[Row], predicted: list[float]) -> None:
    """A barrier of two ranks took 1.0 us in some runs and 1.9 in others of the same commit."""
    far = [
        row
        for row, seconds in zip(rows, predicted, strict=True)
        if abs(seconds / row.seconds - 1) > 0.3
    ]
    assert {row.problem.size for row in far} == {2}
    assert all(row.seconds < 7e-6 for row in far)


def test_the_model_alone_chooses_well(rows: list[Row], predicted: list[float]) -> None:
    """Goal: at most 1.10 times the best in 90 % of the cases, and 1.3 at worst."""
    found = choices(rows, predicted)
    ratios = [ratio for each in found.values() for ratio in each]
    assert len(ratios) > 150
    assert quantile(ratios, 0.9) <= 1.10
    assert max(ratios) <= 1.3


def test_auto_without_any_measurement(
    rows: list[Row], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The whole way of `auto`, its entries hidden: the same goal."""
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))
    monkeypatch.setattr(select, "entries", lambda target: ())
    cases: dict[tuple, dict[str, float]] = {}
    for row in rows:
        cases.setdefault(row.case, {}).setdefault(row.op.partition(".")[2], row.seconds)
    ratios, unknown = [], 0
    for (op, problem, _, backend, num_sms, _), took in cases.items():
        if len(took) > 1:
            choice = select.choose(op, problem, "nvidia-h200", num_sms, backend=backend)
            assert "the model of h200-" in choice.why
            if choice.algo in took:
                ratios.append(took[choice.algo] / min(took.values()))
            else:
                unknown += 1  # it was not measured there
    assert (len(ratios), unknown) == (176, 0)
    assert quantile(ratios, 0.9) <= 1.10
    assert max(ratios) <= 1.3


def test_configs_of_tuning_runs_are_read() -> None:
    """Those of ops: data/h200 has runs of Helion too. Moving data is near for every config."""
    found = tuning_rows(ROOT / "data" / "h200")
    assert len(found) > 3000
    gathered = [row for row in found if row.op == "all_gather.gluon"]
    expected = predict_rows(gathered, {"h200-shared": read("h200-shared")})
    misses = [abs(s / row.seconds - 1) for s, row in zip(expected, gathered, strict=True)]
    assert statistics.median(misses) < 0.06


def test_quantile() -> None:
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == 5.0


@pytest.mark.parametrize("op", public.OPS)
@pytest.mark.parametrize(("version", "count"), [("2.29.2", 21), ("2.26.2", 42)])
def test_nccl_on_eight_gpus_after_two_and_four(op: str, version: str, count: int) -> None:
    rate = read("h200x8").link.multicast_rate if op == "all_reduce" else 0.0
    asked = public.nccl(TABLE, op, rate, version)
    assert len(asked) == count
    assert sum(abs(row.miss) for row in asked) / count <= public.GOALS[op]


def test_the_engines_kernels_on_eight_gpus_after_two_and_four() -> None:
    asked, hardware = public.engines(TABLE, "sglang", "0.5.10", read("h200x8"))
    for kind, count in (("one", 10), ("two", 6)):
        rows = [row for row in asked if row.what.endswith(f"{kind}-shot")]
        assert len(rows) == count
        assert sum(abs(row.miss) for row in rows) / count <= 0.15
    assert [public.figure(hardware, name) for name in public.LINK] == pytest.approx(
        [public.figure(read("h200x8"), name) for name in public.LINK], rel=0.02
    ), "what ships is what was fitted"


def test_where_two_shots_begin_to_win() -> None:
    true = public.measured_crossing(TABLE)
    hardware = read("h200x8")
    found = public.crossing(
        lambda n: public.engine_seconds(hardware, 8, n, False),
        lambda n: public.engine_seconds(hardware, 8, n, True),
    )
    assert max(true / found, found / true) <= 1.5


def test_our_kernels_are_near_the_published_ones() -> None:
    """Rows outside of the spread and its 10 %: one narrowly, two of a table that is hardly of this
    link, and one shot of 2 MB and more on 4 GPUs, which vLLM's kernel pulls faster than ours."""
    outside = {
        ("Helion issue 245", 8, "one"): 1,
        ("vLLM 24111", 4, "one"): 3,
        ("vLLM 24111", 8, "two"): 2,
    }
    for table in public.PUBLISHED:
        spread, key = public.published(table), (table.source, table.size, table.op[11:14])
        assert sum(not fits for _, _, fits in spread) <= outside.get(key, 0), key
        for nbytes, micros, _ in spread:
            times = table.times[nbytes]
            assert 0.85 * min(times) < micros < 1.3 * max(times)


def test_simulated_times_are_near_the_published_ones() -> None:
    """On two sizes, to be quick: `python -m benchmarks predict public --simulate` takes all."""
    table = public.PUBLISHED[0]
    few = {n: times for n, times in table.times.items() if n in (8 << 10, 64 << 10)}
    assert [fits for *_, fits in public.published(table._replace(times=few), True)] == [True] * 2


def test_a_scatter_plot_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    draw_scatter(str(path), [1e-6, 2e-6], [1.1e-6, 2e-6], ["a", "b"])
    assert path.read_bytes().startswith(b"\x89PNG")
