"""Cost models on invented times: what the scores count, and that trees survive their export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
import torch

from benchmarks.learn import evaluate as evaluation
from benchmarks.learn import network, results
from benchmarks.learn import train as training
from benchmarks.learn.evaluate import Part, evaluate, kendall, score_of, steps_to
from benchmarks.learn.gaussian import predict_by_processes
from benchmarks.learn.graph_network import predict_by_graphs
from benchmarks.learn.helion_search import lfbo
from benchmarks.learn.measure import Measured
from benchmarks.learn.network import Settings, train_networks
from benchmarks.learn.pack import pack
from benchmarks.learn.page import PAGE, page
from benchmarks.learn.plan import units
from benchmarks.learn.record import Records
from benchmarks.learn.results import noise, table
from benchmarks.learn.train import fit
from sundog.dataset import KernelData, load
from sundog.learn.features import NAMES, count_ir, matrix
from sundog.learn.kernel_model import WEIGHTS, Networks, encode
from sundog.learn.op_model import Trees
from sundog.tools.tune import space
from sundog.tools.tune.space import pattern


def invented_ns(cell: Any) -> int:
    """More warps are better up to 8, larger blocks up to 1024; a large shape takes longer."""
    config, size = cell.config, math.log2(cell.task.work[0])
    penalty = abs(math.log2(config["num_warps"]) - 3) + abs(math.log2(config["BLOCK"]) - 10)
    return round(1000 * 2 ** (size / 8) * (1 + 0.1 * penalty))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> KernelData:
    run, folder = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("data")
    records = Records(run)
    names = ["softmax_online", "layer_norm", "quantise_rows", "cross_entropy"]
    for cells in units(names, set(), 25):
        for cell in cells:
            records.add_row(cell, Measured("ok", [invented_ns(cell)] * 5, at=1.0), None)
    again = units(names, set(), 1)[0][0]
    repeated = Measured("ok", [round(1.01 * invented_ns(again))] * 5, at=2.0)
    records.add_row(type(again)(**{**again.__dict__, "repeat": 1}), repeated, None)
    records.close({"clock": "gpu"})
    pack(run, folder, "invented")
    return load(folder)


def test_trees_learn_the_order_of_unseen_shapes(
    data: KernelData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(training._SETTINGS, "max_iter", 60)
    monkeypatch.setitem(evaluation.LARGER, "max_iter", 60)
    monkeypatch.setattr(evaluation, "SETTINGS", Settings(1, 32, 60, tasks=4, rate=1e-2))
    monkeypatch.setattr(evaluation, "_SEEDS", 2)
    monkeypatch.setattr(evaluation, "lfbo", lambda times, count, seed: [min(times.values())])
    scores = {score.name: score for score in evaluate(data, "shape")}
    assert scores["trees, compiled"].tau > 0.85
    assert scores["trees, compiled"].near > 0.9
    assert scores["rank on the nearest shape"].tau > 0.9
    assert abs(scores["roofline and last wave"].tau) < 0.3
    assert scores["random search"].near < scores["trees, compiled"].near
    assert scores["trees, compiled"].tasks == scores["random search"].tasks > 5
    assert scores["Helion's LFBO"].near == 1.0, "a stand-in that finds the best at once"
    assert scores["networks"].tau > 0.8
    assert scores["networks and trees"].tau > 0.85
    assert scores["networks and trees, updated as it goes"].near > 0.9
    assert scores["a Gaussian process for each kernel"].tau > 0.85
    assert scores["networks, trees and processes"].tau > 0.85
    assert scores["networks, trees and processes, updated as it goes"].near > 0.9
    assert "trees, compiled" in table("shape", list(scores.values()))


def test_only_the_scores_that_are_asked_for_are_computed(
    data: KernelData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ships is the order alone until its first five are measured: the goal's five."""
    monkeypatch.setattr(evaluation, "SETTINGS", Settings(1, 32, 20, tasks=4, rate=1e-2))
    wanted = ["networks", evaluation.SHIPS]
    order, ships = evaluate(data, "shape", only=wanted)
    assert [order.name, ships.name] == wanted
    assert (order.near, order.by_collection) == (ships.near, ships.by_collection)
    assert [score.name for score in evaluate(data, "shape", None, ["networks"], wanted)] == wanted[
        1:
    ]
    with pytest.raises(ValueError, match="network: expected some of networks; "):
        list(evaluate(data, "shape", only=["network"]))


def test_a_process_learns_from_its_own_kernel_alone() -> None:
    """Two kernels want the opposite of each other, and a third one is unknown."""
    rng = numpy.random.default_rng(0)
    kernel, block = numpy.repeat(["a", "b", "c"], 120), rng.integers(0, 8, 360)
    features = numpy.full((360, len(NAMES)), numpy.nan)
    features[:, NAMES.index("config_BLOCK")] = block
    shape = [str(n) for n in numpy.arange(360) // 20]
    rows = pandas.DataFrame({"kernel": kernel, "shape": shape, "dtype": "d"})
    sign = pandas.Series(kernel).map({"a": 1.0, "b": -1.0, "c": 1.0})
    rows["median_ns"] = numpy.exp(
        rng.normal(0, 0.005, 360)
        + rng.normal(10, 1, 18)[numpy.arange(360) // 20]
        + 0.05 * sign * block
    )
    test = (numpy.arange(360) % 120 >= 100) | (kernel == "c")
    found = predict_by_processes(features, rows, test)
    for name, corner in (("a", 1.0), ("b", -1.0)):
        own = kernel[test] == name
        slope = numpy.polyfit(block[test][own], found[own], 1)[0]
        assert slope == pytest.approx(0.05 * corner, rel=0.1)
    assert (found[kernel[test] == "c"] == 0).all()


def test_models_together_count_alike(data: KernelData) -> None:
    """An average has the scale of a time's logarithm: the update compares it with measurements."""
    rows = training.usable(data)
    part = Part(rows, numpy.empty(0), numpy.empty(0), numpy.ones(len(rows), dtype=bool))
    times = numpy.log(rows.median_ns.astype(float)).to_numpy()
    both = evaluation.average([times, times + 7.0], part)
    numpy.testing.assert_allclose(both, training.over_the_mean(rows), atol=1e-9)


def test_combinations_are_compared_on_folds_of_training_tasks(
    data: KernelData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def watched(part: Part) -> numpy.ndarray:
        seen.append(set(part.rows["kernel"] + part.rows["shape"]))
        return part.target[part.test]

    monkeypatch.setattr(results, "SMALL", Settings(1, 8, epochs=1))
    monkeypatch.setitem(evaluation.MODELS, evaluation.TREES, watched)
    monkeypatch.setitem(evaluation.MODELS, evaluation.PROCESSES, watched)
    results.combine(str(data.folder), str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    rows = training.usable(data)
    train = rows[~rows.test_shape]
    assert all(keys == set(train["kernel"] + train["shape"]) for keys in seen)
    by_models = {tuple(each["models"]): each for each in found["combined"]}
    assert {each["tasks"] for each in found["combined"]} == {train.groupby(training.TASK).ngroups}
    assert by_models[(evaluation.TREES,)]["near"] == 1.0, "a stand-in that knows the times"
    assert by_models[(evaluation.NETWORKS,)]["tau"] < 0.9


def test_networks_of_other_tasks_are_refused(data: KernelData, tmp_path: Path) -> None:
    rows = training.usable(data)
    features = training.features_of(data, rows, ["layer_norm"])
    test = rows.test_shape.to_numpy()
    part = Part(rows, features, training.targets(rows), test)
    file, settings = tmp_path / "shape.npz", Settings(1, 8, epochs=1)
    train = rows[~test].reset_index(drop=True)
    about = {"kernels": ["layer_norm"]}
    training.networks_of(train, features[~test], about, settings, "cpu").save(file)
    assert len(evaluation.by_networks(part, ["layer_norm"], "shape", file)) == test.sum()
    training.networks_of(rows, features, about, settings, "cpu").save(file)
    with pytest.raises(ValueError, match="trained on other tasks"):
        evaluation.by_networks(part, ["layer_norm"], "shape", file)


def test_a_fold_leaves_a_fifth_of_the_training_tasks_out(data: KernelData, tmp_path: Path) -> None:
    """A shape is in one fold, in every dtype, and no fold has a task of the test part."""
    rows = training.usable(data)
    train = rows[~rows.test_shape].reset_index(drop=True)
    folds = pandas.Series(training.folds_of(train))
    assert folds.groupby([train.kernel, train["shape"]]).nunique().max() == 1
    assert sorted(set(folds)) == list(range(training.FOLDS))
    settings = Settings(networks=1, epochs=1, width=8)
    made = training.save_networks(data, "shape", tmp_path / "net.npz", settings, "cpu", 2)
    assert made.about["tasks"] == training.tasks_hash(train[folds != 2])
    assert made.about["fold"] == 2


def test_the_page_is_made_from_what_was_measured() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.learn page"


def test_the_readme_gives_the_figures_of_what_ships() -> None:
    fresh = json.loads((PAGE.parent / "measured" / "fresh.json").read_text())["splits"]
    text = (PAGE.parent / "README.md").read_text()
    for split, words in (("shape", "near in {} of {} tasks"), ("kernel", "near in {} of {}")):
        scores = {score["name"]: score for score in fresh[split]}
        near, tasks = scores[evaluation.SHIPS]["near"], scores[evaluation.SHIPS]["tasks"]
        error = (near * (1 - near) / tasks) ** 0.5
        said = (
            words.format(round(near * tasks), tasks) + f" ({100 * near:.1f} ± {100 * error:.1f} %"
        )
        assert said in text
        assert f"tau {scores[evaluation.NETWORKS]['tau']:.3f} (goal " in text


def test_figures_of_an_update_are_tried_on_folds(
    data: KernelData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks know nothing of their fold; what is chosen is put back."""
    settings = Settings(1, 8, epochs=1)
    for fold in (0, 1):
        file = tmp_path / f"fold{fold}.npz"
        training.save_networks(data, "shape", file, settings, "cpu", fold)
    monkeypatch.setattr(results, "TRIED", ((0.1, 1.0),))
    monkeypatch.setitem(evaluation.MODELS, evaluation.TREES, lambda part: part.target[part.test])
    before = space._ERROR, space._REACH
    figures: list[tuple[float, float]] = []

    def watched(*given: Any) -> Any:
        figures.append((space._ERROR, space._REACH))
        return evaluation.led_by(*given)

    monkeypatch.setattr(results, "led_by", watched)
    results.choose(str(data.folder), tmp_path, str(tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    rows = training.usable(data)
    train = rows[~rows.test_shape & (training.folds_of(rows) < 2)]
    assert found["tasks"] == train.groupby(training.TASK).ngroups
    assert found["folds"] == 2
    alone, both = found["tried"]
    assert (alone["models"], both["models"]) == (["networks"], ["networks", evaluation.TREES])
    assert [each["ordered"] for each in both["begun"]] == [1, 5, 10]
    by_order = [each["begun"][1]["near"][0] for each in (alone, both)]
    assert 0 <= by_order[0] < by_order[1] <= 1, "the stand-in knows the times"
    assert by_order == [each["begun"][2]["near"][0] for each in (alone, both)], "five of ten"
    assert [each["error"] for each in both["updated"]] == [0.1]
    folds, begun = 2, 3 * 2
    each_model = [before] * (begun * folds) + [(0.1, 1.0)] * folds
    assert figures == 2 * each_model, "only figures that are tried are put in their place"
    assert tuple(found["chosen"]) == before == (space._ERROR, space._REACH)


def test_numpy_predicts_as_torch_does(tmp_path: Path) -> None:
    rng = numpy.random.default_rng(0)
    features = rng.normal(size=(60, len(NAMES)))
    features[:, 0] = rng.integers(0, 3, 60)
    features[rng.random(features.shape) < 0.1] = numpy.nan
    settings = Settings(2, 16, epochs=2, tasks=3, hide=0.2)
    tasks, target = numpy.arange(60) // 10, rng.normal(size=60)
    made = train_networks(features, target, tasks, settings, {"kernels": ["a", "b", "c"]})
    made.save(tmp_path / "model.npz")
    weights = {name: torch.from_numpy(made.arrays[name]) for name in WEIGHTS}
    read = torch.from_numpy(encode(features[:, 1:], made.arrays["mean"], made.arrays["scale"]))
    number = torch.from_numpy(numpy.nan_to_num(features[:, 0], nan=3).astype(int))
    wanted = network._forward(weights, read, number, 0.0).mean(0).numpy()
    numpy.testing.assert_allclose(made.predict(features), wanted, atol=1e-5)
    loaded = Networks.load(tmp_path / "model.npz")
    assert loaded.about == {"kernels": ["a", "b", "c"]}
    numpy.testing.assert_allclose(loaded.predict(features), wanted, atol=0.02)


def test_a_graph_model_sees_what_is_in_the_graph() -> None:
    """The time depends on how many nodes are of operation 2, and on nothing else."""
    rng = numpy.random.default_rng(0)
    arrays = []
    for number in range(24):
        node = numpy.zeros((12, 5), dtype="f4")
        node[:, 1] = 1
        node[: number % 12, 1] = 2
        edge = numpy.stack([numpy.arange(11), numpy.arange(1, 12)])
        arrays.append({"node": node, "edge": edge})
    place = rng.integers(0, 24, 400)
    rows = pandas.DataFrame(
        {"kernel": "k", "dtype": "d", "shape": [str(n // 20) for n in range(400)]}
    )
    rows["median_ns"] = numpy.exp(0.2 * (place % 12))
    test = numpy.arange(400) >= 300
    found = predict_by_graphs(
        arrays, place, numpy.zeros((400, 1)), rows, test, 2, Settings(width=16, epochs=40, tasks=4)
    )
    assert numpy.corrcoef(found, place[test] % 12)[0, 1] > 0.9


def test_hidden_groups_look_unknown() -> None:
    torch.manual_seed(0)
    count = len(NAMES) - 1
    read = torch.cat([torch.ones(200, count), torch.zeros(200, count)], 1)
    hidden = network._hidden(read, 0.5)
    values, unknown = hidden[:, :count], hidden[:, count:]
    assert ((values == 1) == (unknown == 0)).all()
    registers, flops = NAMES.index("registers") - 1, NAMES.index("flops") - 1
    assert 50 < unknown[:, registers].sum() < 150
    assert (unknown[:, registers] != unknown[:, flops]).any()
    assert not unknown[:, NAMES.index("programs") - 1].any()


def test_a_task_in_both_parts_is_refused(data: KernelData) -> None:
    rows = data.tasks.reset_index(drop=True)
    test = numpy.arange(len(rows)) % 2 == 0
    part = Part(rows, numpy.zeros((len(rows), 1)), numpy.zeros(len(rows)), test)
    with pytest.raises(ValueError, match="tasks are in both parts"):
        evaluation._check_apart(part, "shape")


def test_noise_is_what_a_second_measurement_differs_by(data: KernelData) -> None:
    found = noise(data)["same_collection"]
    assert found["rows_again"] == 1
    assert found["p50"] == pytest.approx(1.0, abs=0.01)
    assert noise(data)["another_collection"] == {"rows_again": 0}


def test_noise_tells_minutes_from_hours(data: KernelData) -> None:
    """A second collection measured two configs of a task again, in the other order."""
    task = data.tasks[data.tasks.kernel == "layer_norm"]
    two = task[(task["shape"] == task["shape"].iloc[0]) & (task.dtype == task.dtype.iloc[0])]
    two = two.sort_values("median_ns").iloc[[0, -1]]
    later = two.assign(collection="later", repeat=1, median_ns=two.median_ns.to_numpy()[::-1])
    both = KernelData(data.folder)
    both.__dict__["rows"] = pandas.concat([data.rows, later], ignore_index=True)
    found = noise(both)
    assert found["same_collection"]["rows_again"] == 1
    assert found["another_collection"]["rows_again"] == 2
    apart = math.log(two.median_ns.max() / two.median_ns.min())
    assert found["another_collection"]["p50"] == pytest.approx(100 * apart, abs=0.01)
    assert found["another_collection"]["tau"] == -1.0


def test_kendall_leaves_out_pairs_within_the_noise() -> None:
    times = numpy.array([100.0, 101.0, 200.0])
    assert kendall(numpy.array([1.0, 0.0, 2.0]), times) == 1.0
    assert kendall(numpy.array([2.0, 2.0, 1.0]), times) == -1.0
    assert kendall(numpy.array([2.0, 0.0, 1.0]), times) == 0.0
    assert math.isnan(kendall(numpy.array([1.0, 2.0]), numpy.array([100.0, 101.0])))


def test_near_counts_the_first_few_of_the_order() -> None:
    rows = pandas.DataFrame(
        {"kernel": "k", "shape": "{}", "dtype": "d", "median_ns": [100 + n for n in range(10)]}
    ).assign(collection="c")
    test = numpy.ones(10, dtype=bool)
    part = Part(rows, numpy.zeros((10, 1)), numpy.zeros(10), test)
    backwards = -numpy.arange(10.0)
    assert score_of("x", backwards, part, "shape").near == 0.0  # 105 of 100: not within 2 %
    assert score_of("x", backwards, part, "kernel").near == 1.0  # ten are all of them
    assert score_of("x", backwards, part, "shape").tau == -1.0


def test_near_is_counted_by_collection() -> None:
    tasks = [("a", "old"), ("b", "new"), ("c", "new")]
    rows = pandas.DataFrame(
        {"kernel": kernel, "shape": "{}", "dtype": "d", "collection": name, "median_ns": 100 + n}
        for kernel, name in tasks
        for n in range(10)
    )
    part = Part(rows, numpy.zeros((30, 1)), numpy.zeros(30), numpy.ones(30, dtype=bool))
    right, wrong = numpy.arange(10.0), -numpy.arange(10.0)
    found = score_of("x", numpy.concatenate([right, right, wrong]), part, "shape")
    assert found.by_collection == {"old": (1.0, 1), "new": (0.5, 2)}
    assert found.near == pytest.approx(2 / 3)


def test_a_search_ends_with_its_best() -> None:
    times = {
        json.dumps({"BLOCK": 2**n, "num_warps": w}): 1.0 + n + w for n in range(6) for w in (1, 2)
    }
    assert steps_to(times, pattern, len(times), 0) == 1.0
    assert steps_to(times, pattern, 1, 0) >= 1.0


def test_helions_search_asks_for_recorded_configs_alone() -> None:
    pytest.importorskip("helion")
    times = {
        json.dumps({"BLOCK": 2**n, "num_warps": w}): 1.0 + abs(n - 4) + w
        for n in range(8)
        for w in (1, 2, 4)
        if (n, w) != (4, 1)
    }
    asked = lfbo(times, 10, 0)
    assert len(asked) == 10
    assert set(asked) <= set(times.values())
    assert min(lfbo(times, 20, 1)) < 4.5, "it chooses after the first population"


def test_exported_trees_predict_as_scikit_learn_does(tmp_path: Path) -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = numpy.random.default_rng(0)
    features = rng.normal(size=(400, 5))
    features[rng.random(features.shape) < 0.1] = numpy.nan
    target = numpy.nan_to_num(features[:, 0]) * 2 + (features[:, 1] > 0)
    trees = fit(features, target, {"version": 1}, max_iter=30)
    model = HistGradientBoostingRegressor(**trees.about["settings"]).fit(features, target)
    trees.save(tmp_path / "model.npz")
    loaded = Trees.load(tmp_path / "model.npz")
    assert loaded.about["version"] == 1
    numpy.testing.assert_allclose(loaded.predict(features), model.predict(features), atol=1e-5)


def test_features_of_a_kernel_that_is_not_compiled_are_missing() -> None:
    known = {
        "kernel": "new", "dtype": "bfloat16", "shape": {"m": 8, "layout": "nn"},
        "config": {"BLOCK": 64, "num_warps": 4}, "grid": (264, 1, 1), "bytes": 2.0**20,
        "flops": 0.0, "trips": 3.0,
    }  # fmt: skip
    line = dict(zip(NAMES, matrix([known], ["old"])[0], strict=True))
    assert math.isnan(line["kernel"])
    assert math.isnan(line["registers"])
    assert (line["shape_m"], line["config_BLOCK"], line["waves"]) == (3.0, 6.0, 1.0)
    text = (
        "#blocked = #ttg.blocked<{sizePerThread = [1, 8]}>\n  %0 = tt.load %a : tensor<4x64xf16>\n"
    )
    compiled = {**known, "ttgir_text": text, "shared": 0.0, "registers": 32.0, "spills": 0.0}
    line = dict(zip(NAMES, matrix([{**compiled, "occupancy": 1.0}])[0], strict=True))
    assert dict(count_ir(text))["tt.load"] == 1
    assert (line["tt.load"], line["per_thread"], line["size_per_thread"]) == (1.0, 1.0, 3.0)
