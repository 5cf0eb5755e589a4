"""`python -m benchmarks.learn evaluate data/h200`: cost models and searches on the fixed splits.

For each task of a test part, a model orders the configs that were recorded. Kendall's tau counts
the pairs that it orders as the clock does; pairs whose times are within the noise are left out. A
search measures the first few of that order: how often is the best of them near the best recorded?
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pandas

from sundog.dataset.shards import KernelData
from sundog.learn.features import COMPILED, NAMES
from sundog.learn.kernel_model import ORDERED, Networks
from sundog.tools.tune.space import Space, by_model, pattern

from .gaussian import predict_by_processes
from .helion_search import lfbo
from .network import Settings
from .train import TASK, features_of, fit, networks_of, targets, tasks_hash, usable

NOISE = 0.02
GOALS = {"shape": (5, 1.02), "kernel": (10, 1.05), "dtype": (5, 1.02), "random": (5, 1.02)}
_SEEDS = 5  # of the pattern search

Predict = Callable[["Part"], numpy.ndarray]  # a number for each test row; the least is the best


@dataclass(frozen=True)
class Part:
    """A split: all usable rows, their features and targets, and which are for the test."""

    rows: pandas.DataFrame
    features: numpy.ndarray
    target: numpy.ndarray
    test: numpy.ndarray


@dataclass(frozen=True)
class Score:
    """Of one model on one split."""

    name: str
    tau: float | None
    near: float  # part of the tasks in which the search gets near enough
    tasks: int
    by_kernel: dict[str, float] = dataclasses.field(default_factory=dict)  # tau of each
    by_collection: dict[str, tuple[float, int]] = dataclasses.field(default_factory=dict)  # near


def evaluate(
    data: KernelData,
    split: str,
    networks: Path | None = None,
    known: Collection[str] = (),
    only: Collection[str] = (),
) -> Iterator[Score]:
    """Compare all models and searches on one split, or `only` these, but those that are `known`.

    `networks`: a file that `train` made.
    """
    rows = usable(data)
    test = rows[f"test_{split}"].to_numpy()
    kernels = sorted(set(rows.kernel[~test]))
    part = Part(rows, features_of(data, rows, kernels), targets(rows), test)
    _check_apart(part, split)

    @functools.cache
    def predicted(name: str) -> numpy.ndarray:
        if name == NETWORKS:
            return by_networks(part, kernels, split, networks)
        if name in TOGETHER:
            return average([predicted(each) for each in TOGETHER[name]], part)
        return MODELS[name](part)

    def ordered(name: str) -> Score:
        return score_of(name, predicted(name), part, split)

    def updated(name: str) -> Score:
        return led_by(name, predicted(name.removesuffix(UPDATED)), part, GOALS[split], 1)

    def ships(name: str) -> Score:
        return led_by(name, predicted(NETWORKS), part, GOALS[split], ORDERED)

    scorers: dict[str, Callable[[str], Score]] = {
        NETWORKS: ordered,
        SHIPS: ships,
        NETWORKS + UPDATED: updated,
        "random search": lambda name: _at_random(name, part, split),
        "pattern search": lambda name: _by_pattern(name, part, split),
        **dict.fromkeys((*MODELS, *TOGETHER), ordered),
        **dict.fromkeys((name + UPDATED for name in TOGETHER), updated),
        "Helion's LFBO": lambda name: _by_helion(name, part, split),
    }
    if strange := set(only) - set(scorers):
        raise ValueError(f"{', '.join(sorted(strange))}: expected some of {'; '.join(scorers)}")
    for name, scorer in scorers.items():
        if name not in known and (not only or name in only):
            yield scorer(name)


def _check_apart(part: Part, split: str) -> None:
    """No test task in training, by what the split is made of."""
    columns = {"shape": ["kernel", "shape"], "kernel": ["function"], "dtype": ["kernel", "dtype"]}
    by = columns.get(split, [*TASK, "config"])
    keys = part.rows[by].astype(str).agg("|".join, axis=1)
    shared = set(keys[part.test]) & set(keys[~part.test])
    if shared:
        raise ValueError(f"split {split}: {len(shared)} tasks are in both parts: {min(shared)}")


# models


def by_trees(part: Part, columns: list[str], **settings: Any) -> numpy.ndarray:
    features = part.features.copy()
    features[:, [NAMES.index(name) for name in NAMES if name not in columns]] = numpy.nan
    trees = fit(features[~part.test], part.target[~part.test], {}, **settings)
    return trees.predict(features[part.test])


def by_networks(part: Part, kernels: list[str], split: str, file: Path | None) -> numpy.ndarray:
    """Load networks that were trained on the same tasks, or train them."""
    train = part.rows[~part.test].reset_index(drop=True)
    if file is not None and file.exists():
        made = Networks.load(file)
        if made.about["tasks"] != tasks_hash(train):
            raise ValueError(f"{file} was trained on other tasks than this split's: train it again")
    else:
        settings = dataclasses.replace(SETTINGS, hide_kernel=hidden_kernels(split))
        about = {"kernels": kernels}
        made = networks_of(train, part.features[~part.test], about, settings, "cpu")
    return made.predict(part.features[part.test])


def hidden_kernels(split: str) -> float:
    """Drop a kernel's number: it says nothing of a kernel outside the training part."""
    return 1.0 if split == "kernel" else SETTINGS.hide_kernel


def average(predicted: list[numpy.ndarray], part: Part) -> numpy.ndarray:
    """Average what models predict, each around its mean over the task."""
    rows = part.rows[part.test].reset_index(drop=True)
    keys = [rows[name] for name in TASK]
    frames = [pandas.Series(each) for each in predicted]
    around = [each - each.groupby(keys).transform("mean") for each in frames]
    return numpy.mean(around, axis=0)


def by_nearest_shape(part: Part) -> numpy.ndarray:
    """Rate a config by its time over the best on the kernel's nearest shape that has it."""
    train, test = part.rows[~part.test], part.rows[part.test]
    known: dict[str, list[tuple[dict[str, Any], str, dict[str, float]]]] = {}
    for key, group in train.assign(target=part.target[~part.test]).groupby(TASK):
        kernel, shape, dtype = key
        times = dict(zip(group.config, group.target, strict=True))
        known.setdefault(kernel, []).append((json.loads(shape), dtype, times))
    found = []
    for (kernel, shape, dtype), group in test.groupby(TASK, sort=False):
        place = json.loads(shape)
        near = sorted(known.get(kernel, []), key=lambda each: _distance(each, place, dtype))
        scores = [next((t[c] for *_, t in near if c in t), 1.0) for c in group.config]
        found.append(pandas.Series(scores, index=group.index))
    return pandas.concat(found).reindex(test.index).to_numpy()


def _distance(each: tuple[dict[str, Any], str, Any], shape: dict[str, Any], dtype: str) -> float:
    other, its_dtype, _ = each
    numbers = [name for name in shape if isinstance(shape[name], int)]
    far = sum(abs(numpy.log2(max(shape[n], 1) / max(other.get(n, 1), 1))) for n in numbers)
    words = sum(shape[n] != other.get(n) for n in shape if n not in numbers)
    return float(far + 4 * words + 0.5 * (dtype != its_dtype))


def by_roofline(part: Part) -> numpy.ndarray:
    """All configs move the same bytes; what differs is how well the last wave fills the GPU."""
    return part.features[part.test, NAMES.index("tail")]


TREES, PROCESSES = "trees, compiled, larger", "a Gaussian process for each kernel"
NETWORKS, UPDATED = "networks", ", updated as it goes"
SHIPS = f"networks, updated after {ORDERED}"
TOGETHER = {
    "networks and trees": (NETWORKS, TREES),
    "networks, trees and processes": (NETWORKS, TREES, PROCESSES),
}
LARGER = {"max_iter": 600, "max_leaf_nodes": 63, "min_samples_leaf": 8, "max_features": 0.25}
SETTINGS = Settings()
MODELS: dict[str, Predict] = {
    "roofline and last wave": by_roofline,
    "rank on the nearest shape": by_nearest_shape,
    TREES: lambda p: by_trees(p, list(NAMES), **LARGER),
    "trees, before compiling": lambda p: by_trees(p, [n for n in NAMES if n not in COMPILED]),
    "trees, compiled": lambda p: by_trees(p, list(NAMES)),
    "trees, compiled, without the kernel's name": lambda p: by_trees(p, list(NAMES[1:])),
    PROCESSES: lambda p: predict_by_processes(p.features, p.rows, p.test),
}


# scores


def _scored(
    name: str, part: Part, near: Sequence[float], taus: pandas.DataFrame | None = None
) -> Score:
    """Make a score of what each task got, in the order in which `groupby` has them."""
    owner = part.rows[part.test].groupby(TASK).collection.first().to_numpy()
    groups = pandas.Series(near, dtype=float).groupby(owner)
    parts = {str(each): (float(own.mean()), len(own)) for each, own in groups}
    score = Score(name, None, float(numpy.mean(near)), len(near), by_collection=parts)
    if taus is None:
        return score
    by_kernel = taus.groupby("kernel").tau.mean().round(3).to_dict()
    return dataclasses.replace(score, tau=float(taus.tau.mean()), by_kernel=by_kernel)


def score_of(name: str, predicted: numpy.ndarray, part: Part, split: str) -> Score:
    count, factor = GOALS[split]
    taus: list[tuple[str, float]] = []
    near = []
    rows = part.rows[part.test].assign(predicted=predicted)
    for (kernel, *_), group in rows.groupby(TASK):
        times = group.median_ns.to_numpy(dtype=float)
        order = numpy.argsort(group.predicted.to_numpy(), kind="stable")
        taus.append((kernel, kendall(group.predicted.to_numpy(), times)))
        near.append(times[order[:count]].min() <= factor * times.min())
    return _scored(name, part, near, pandas.DataFrame(taus, columns=["kernel", "tau"]).dropna())


def kendall(predicted: numpy.ndarray, times: numpy.ndarray) -> float:
    """Return tau over the pairs whose times differ by more than the noise; NaN if there is none."""
    left, right = numpy.triu_indices(len(times), 1)
    apart = numpy.log(times[left] / times[right])
    counted = numpy.abs(apart) > NOISE
    if not counted.any():
        return float("nan")
    signs = numpy.sign(predicted[left] - predicted[right]) * numpy.sign(apart)
    return float(signs[counted].mean())


# searches


def led_by(
    name: str, predicted: numpy.ndarray, part: Part, goal: tuple[int, float], ordered: int
) -> Score:
    """Replay the tuner's search: after the first `ordered` each measurement updates the model."""
    count, factor = goal
    rows = part.rows[part.test].assign(predicted=predicted)
    near = []
    for _, group in rows.groupby(TASK):
        scores = dict(zip(group.config, group.predicted, strict=True))
        near.append(steps_to(_times(group), by_model, count, 0, scores, ordered) <= factor)
    return _scored(name, part, near)


def _at_random(name: str, part: Part, split: str) -> Score:
    """Return the probability that one of a few configs drawn at random is near the best."""
    count, factor = GOALS[split]
    near = []
    for _, group in part.rows[part.test].groupby(TASK):
        times = group.median_ns.to_numpy(dtype=float)
        far = int((times > factor * times.min()).sum())
        near.append(1 - math.comb(far, count) / math.comb(len(times), min(count, len(times))))
    return _scored(name, part, near)


def _by_pattern(name: str, part: Part, split: str) -> Score:
    count, factor = GOALS[split]
    found = [
        sum(steps_to(_times(group), pattern, count, n) <= factor for n in range(_SEEDS)) / _SEEDS
        for _, group in part.rows[part.test].groupby(TASK)
    ]
    return _scored(name, part, found)


def _by_helion(name: str, part: Part, split: str) -> Score:
    count, factor = GOALS[split]
    near = []
    for _, group in part.rows[part.test].groupby(TASK):
        times = _times(group)
        near.append(min(lfbo(times, count, 0)) <= factor * min(times.values()))
    return _scored(name, part, near)


def _times(group: pandas.DataFrame) -> dict[str, float]:
    return dict(zip(group.config, group.median_ns.astype(float), strict=True))


def steps_to(
    times: dict[str, float],
    search: Any,
    count: int,
    seed: int,
    scores: dict[str, float] | None = None,
    ordered: int = 1,
) -> float:
    """Return how far from the best, as a factor, a search of the tuner ends on recorded times.

    `scores`: a model's; the config that it likes most comes first. `ordered`: as of a `Space`.
    """
    fields = sorted(json.loads(next(iter(times))))
    made = dataclasses.make_dataclass("Recorded", fields, frozen=True)
    by_config = {made(**json.loads(text)): time for text, time in times.items()}
    liked = {made(**json.loads(text)): score for text, score in (scores or {}).items()}
    configs = list(by_config)
    random.Random(seed).shuffle(configs)  # a recorded space has no default that comes first
    configs.sort(key=lambda config: liked.get(config, 0.0))
    liking = tuple(liked[config] for config in configs) if liked else ()
    space = Space(tuple(configs), liking, ordered)
    asked: list[float] = []

    def measure(wanted: list[Any], generation: int) -> list[float | None]:
        asked.extend(by_config[config] for config in wanted)
        return [by_config[config] for config in wanted]

    search(space, measure, count, random.Random(seed))
    return min(asked) / min(times.values())
