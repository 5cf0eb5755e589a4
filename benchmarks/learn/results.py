"""Print and write what `evaluate` finds, and how noisy the measurements are."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import pandas

from sundog.dataset.shards import KernelData, load
from sundog.learn.kernel_model import ORDERED, Networks
from sundog.tools.tune import space

from .evaluate import (
    GOALS,
    MODELS,
    NETWORKS,
    PROCESSES,
    TREES,
    Part,
    Score,
    average,
    evaluate,
    kendall,
    led_by,
    score_of,
)
from .network import Settings
from .train import TASK, collected, data_hash, features_of, folds_of, networks_of, targets, usable


def show(name: str, splits: list[str], path: str, networks: Path | None, only: list[str]) -> None:
    """Print scores as they come and write them to a file; what that has is not computed again.

    `networks`: a folder with a file for each split, made by `train`; without it they train. `only`:
    names of scores, all if it is empty.
    """
    data = load(name)
    found: dict[str, Any] = {"noise": noise(data), "data": data_hash(data), "splits": {}}
    if path and Path(path).exists():
        before = json.loads(Path(path).read_text())
        if before["data"] != found["data"]:
            raise ValueError(f"{path} has scores of other rows: take another file, or remove it")
        found["splits"] = before["splits"]
    print(f"noise: {found['noise']}")
    for split in splits:
        scores = found["splits"].setdefault(split, [])
        known = [score["name"] for score in scores]
        file = networks and networks / f"{split}.npz"
        for score in evaluate(data, split, file, known, only):
            print(table(split, [score]), flush=True)
            scores.append(asdict(score))
            if path:
                Path(path).write_text(json.dumps(found, indent=1) + "\n")


def show_graphs(name: str, split: str, path: str, settings: Settings, device: str) -> None:
    """Train the graph model on one split; write its scores as `show` does."""
    from .graph_network import evaluate_graphs

    data = load(name)
    found: dict[str, Any] = {
        "data": data_hash(data),
        "settings": asdict(settings),
        "splits": {split: []},
    }
    for score in evaluate_graphs(data, split, settings, device):
        print(table(split, [score]), flush=True)
        found["splits"][split].append(asdict(score))
        if path:
            Path(path).write_text(json.dumps(found, indent=1) + "\n")


TRIED = ((0.03, 1.5), (0.05, 1.5), (0.08, 1.5), (0.12, 1.5), (0.05, 2.0), (0.08, 2.0), (0.15, 2.0))


CANDIDATES = ((NETWORKS,), (NETWORKS, TREES))  # that numpy evaluates, from a small file
BUDGETS = (5, 10)
BY_ORDER = (1, ORDERED, BUDGETS[-1])  # measurements by the order, until each updates the model


def choose(name: str, folder: Path, path: str) -> None:
    """Try what could ship on folds that networks did not see; write what is near.

    That is: each model of CANDIDATES, from which measurement on each one updates it, and each pair
    of figures of that update, where it begins with the second measurement.
    """
    data = load(name)
    rows = usable(data)
    rows = rows[~rows.test_shape].reset_index(drop=True)
    kept = [_on_fold(data, rows, Networks.load(file)) for file in sorted(folder.glob("fold*.npz"))]
    found: dict[str, Any] = {"data": data_hash(data), "folds": len(kept), "tried": []}
    found |= {"budgets": list(BUDGETS)}
    found |= {"tasks": sum(part.rows[part.test].groupby(TASK).ngroups for part, _ in kept)}
    chosen = space._ERROR, space._REACH
    for names in CANDIDATES:
        together = [(part, average([each[n] for n in names], part)) for part, each in kept]

        def near(ordered: int, budget: int, together: list[Any] = together) -> float:
            goal = budget, GOALS["shape"][1]
            return _mean([led_by("", s, part, goal, ordered) for part, s in together])

        begun = [{"ordered": n, "near": [near(n, budget) for budget in BUDGETS]} for n in BY_ORDER]
        print(f"{names}: {begun}", flush=True)
        updated: list[dict[str, float]] = []
        for error, reach in TRIED:
            space._ERROR, space._REACH = error, reach
            updated.append({"error": error, "reach": reach, "near": near(1, BUDGETS[0])})
            print(f"{names}: {updated[-1]}", flush=True)
        space._ERROR, space._REACH = chosen
        found["tried"].append({"models": list(names), "begun": begun, "updated": updated})
    Path(path).write_text(json.dumps({**found, "chosen": list(chosen)}, indent=1) + "\n")


def _on_fold(
    data: KernelData, rows: pandas.DataFrame, made: Networks
) -> tuple[Part, dict[str, numpy.ndarray]]:
    """Return the training rows with one fold as the test, and what each model says of it."""
    fold = folds_of(rows) == made.about["fold"]
    part = Part(rows, features_of(data, rows, made.about["kernels"]), targets(rows), fold)
    return part, {NETWORKS: made.predict(part.features[fold]), TREES: MODELS[TREES](part)}


SMALL = Settings(networks=2, width=128, epochs=25)  # a tenth of the time of those that ship
COMBINED = (
    (NETWORKS,),
    (TREES,),
    (PROCESSES,),
    (NETWORKS, TREES),
    (NETWORKS, PROCESSES),
    (NETWORKS, TREES, PROCESSES),
)


def combine(name: str, path: str) -> None:
    """Average models of several sorts on all folds of the training tasks; write how near they come.

    The networks are small ones, so that all folds are trained in minutes.
    """
    data = load(name)
    rows = usable(data)
    rows = rows[~rows.test_shape].reset_index(drop=True)
    kernels = sorted(set(rows.kernel))
    features, folds = features_of(data, rows, kernels), folds_of(rows)
    scores: dict[tuple[str, ...], list[tuple[Score, Score]]] = {names: [] for names in COMBINED}
    for fold in sorted(set(folds)):
        part = Part(rows, features, targets(rows), folds == fold)
        train = rows[~part.test].reset_index(drop=True)
        small = networks_of(train, features[~part.test], {"kernels": kernels}, SMALL, "cpu")
        found = {NETWORKS: small.predict(features[part.test])}
        found |= {each: MODELS[each](part) for each in (TREES, PROCESSES)}
        for names, kept in scores.items():
            both = average([found[each] for each in names], part)
            led = led_by("", both, part, GOALS["shape"], 1)
            kept.append((score_of("", both, part, "shape"), led))
    ends = []
    for names, kept in scores.items():
        orders, updated = [order for order, _ in kept], [led for _, led in kept]
        tau = sum((order.tau or 0.0) * order.tasks for order in orders)
        tasks = sum(order.tasks for order in orders)
        ends.append({"models": list(names), "tau": tau / tasks, "order_alone": _mean(orders),
                     "near": _mean(updated), "tasks": tasks})  # fmt: skip
        print(ends[-1], flush=True)
    about = {"data": data_hash(data), "folds": len(set(folds)), "networks": asdict(SMALL)}
    Path(path).write_text(json.dumps({**about, "combined": ends}, indent=1) + "\n")


def _mean(scores: list[Score]) -> float:
    """Weigh each by its tasks."""
    return sum(s.near * s.tasks for s in scores) / sum(s.tasks for s in scores)


def table(split: str, scores: list[Score]) -> str:
    count, factor = GOALS[split]
    head = f"{split}: {scores[0].tasks} tasks; near: within {factor - 1:.0%} after {count}"
    lines = [
        f"  {score.name:44} {'' if score.tau is None else f'{score.tau:6.3f}':6}  {score.near:6.1%}"
        for score in scores
    ]
    return "\n".join([f"{head}\n  {'':44} {'tau':>6}  {'near':>6}", *lines])


def noise(data: KernelData) -> dict[str, Any]:
    """Return by how much medians of the same row differ when it is measured again, in per cent.

    Repeats of the same collection are seconds to minutes apart, those of another one hours.
    """
    rows = collected(data.rows[data.rows.status == "ok"])
    again = rows[~rows.control & (rows["repeat"] > 0)]
    first = rows[~rows.control & (rows["repeat"] == 0)]
    both = first.merge(again, on=[*TASK, "config"], suffixes=("", "_again"))
    same = both.collection == both.collection_again
    controls = rows[rows.control].groupby(["collection", "kernel"]).median_ns
    spread = {
        f"{collection} {kernel}": _percent(each.astype(float).std() / each.astype(float).mean())
        for (collection, kernel), each in controls
        if len(each) > 2
    }
    return {
        "same_collection": _apart(both[same]),
        "another_collection": _apart(both[~same]),
        "controls": spread,
    }


def _apart(both: pandas.DataFrame) -> dict[str, float]:
    """Compare first and second medians; tau is over pairs of one task that both were repeated."""
    if both.empty:
        return {"rows_again": 0}
    times, later = both.median_ns.astype(float), both.median_ns_again.astype(float)
    apart = numpy.abs(numpy.log(later / times))
    taus = [
        kendall(later[group.index].to_numpy(), times[group.index].to_numpy())
        for _, group in both.groupby(TASK)
        if len(group) > 1
    ]
    known = [tau for tau in taus if not math.isnan(tau)]
    found = {f"p{p}": _percent(numpy.percentile(apart, p)) for p in (50, 90, 99)}
    order = {"tau": round(float(numpy.mean(known)), 3)} if known else {}
    return {"rows_again": len(both), **found, **order}


def _percent(part: float) -> float:
    return round(100 * float(part), 3)
