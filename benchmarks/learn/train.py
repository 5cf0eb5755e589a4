"""Train cost models on the features of sundog/learn/features.py: boosted trees, and networks.

Targets are logarithms of a config's time over another of its task, since a tuner needs the order
within a task: for trees over the best, at most log 8, for networks over the mean. scikit-learn
trains the trees and torch the networks; sundog.learn evaluates both with numpy.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pandas

from sundog.dataset.shards import KernelData
from sundog.learn.features import NAMES, matrix
from sundog.learn.op_model import Trees

if TYPE_CHECKING:
    from sundog.learn.kernel_model import Networks

    from .network import Settings

TARGET, VERSION = "nvidia-h200", 1

TASK = ["kernel", "shape", "dtype"]
FOLDS = 5
_MOST = numpy.log(8.0)
_SETTINGS: dict[str, Any] = {
    "max_iter": 400,
    "learning_rate": 0.06,
    "max_leaf_nodes": 31,
    "min_samples_leaf": 12,
    "l2_regularization": 1.0,
    "random_state": 0,
}


def collected(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the rows of the collector: those of Helion have no launch and no samples."""
    return rows[rows.grid_x.notna()]


def usable(data: KernelData) -> pandas.DataFrame:
    """Return the first measurements that have a time, of tasks with at least eight of them."""
    rows = collected(data.tasks)
    timed = rows[rows.status.isin(["ok", "slow"]) & rows.median_ns.notna()]
    return timed[timed.groupby(TASK).median_ns.transform("size") >= 8].reset_index(drop=True)


def features_of(data: KernelData, rows: pandas.DataFrame, kernels: list[str]) -> numpy.ndarray:
    return matrix([_known(data, row) for row in rows.to_dict("records")], kernels)


def _known(data: KernelData, row: dict[str, Any]) -> dict[str, Any]:
    given = {name: row[name] for name in ("kernel", "dtype", "bytes", "flops", "trips")}
    given |= {name: json.loads(row[name]) for name in ("shape", "config")}
    given |= {"grid": (row["grid_x"], row["grid_y"], row["grid_z"])}
    facts = {name: row[name] for name in ("registers", "spills", "shared", "occupancy")}
    clean = {name: None if pandas.isna(value) else float(value) for name, value in facts.items()}
    return {**given, **clean, "ttgir_text": data.text(row["ttgir"]) if row["ttgir"] else ""}


def targets(rows: pandas.DataFrame) -> numpy.ndarray:
    return numpy.minimum(over_the_best(rows), _MOST)


def over_the_best(rows: pandas.DataFrame) -> numpy.ndarray:
    best = rows.groupby(TASK).median_ns.transform("min").astype(float)
    return numpy.log(rows.median_ns.astype(float) / best).to_numpy()


def fit(
    features: numpy.ndarray, target: numpy.ndarray, about: dict[str, Any], **settings: Any
) -> Trees:
    """Train, and take the trees out of scikit-learn."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    chosen = {**_SETTINGS, **settings}
    model = HistGradientBoostingRegressor(**chosen)
    # An empty column would be dropped from every tree anyway, with a warning.
    model.fit(numpy.where(numpy.isnan(features).all(axis=0), 0.0, features), target)
    nodes = [each[0].nodes for each in model._predictors]
    base = float(numpy.ravel(model._baseline_prediction)[0])
    return _exported(nodes, {**about, "base": base, "settings": chosen, "features": list(NAMES)})


def _exported(trees: list[numpy.ndarray], about: dict[str, Any]) -> Trees:
    size = max(len(nodes) for nodes in trees)
    arrays = {
        name: numpy.zeros((len(trees), size), dtype=kind)
        for name, kind in (
            ("feature", "i2"),
            ("threshold", "f4"),
            ("missing_left", "?"),
            ("left", "i2"),
            ("right", "i2"),
            ("value", "f4"),
        )
    }
    for line, nodes in enumerate(trees):
        count, leaf = len(nodes), nodes["is_leaf"].astype(bool)
        own = numpy.arange(count)
        arrays["feature"][line, :count] = numpy.where(leaf, 0, nodes["feature_idx"])
        arrays["threshold"][line, :count] = _upward(nodes["num_threshold"])
        arrays["missing_left"][line, :count] = nodes["missing_go_to_left"]
        arrays["left"][line, :count] = numpy.where(leaf, own, nodes["left"])
        arrays["right"][line, :count] = numpy.where(leaf, own, nodes["right"])
        arrays["value"][line, :count] = numpy.where(leaf, nodes["value"], 0)
    depth = max(int(nodes["depth"].max()) for nodes in trees)
    return Trees(**arrays, depth=depth, about=about)


def _upward(threshold: numpy.ndarray) -> numpy.ndarray:
    """Round to 32 bits, never down: a value at the threshold still goes left."""
    short = threshold.astype("f4")
    up = numpy.nextafter(short, numpy.float32(numpy.inf))
    return numpy.where(short.astype("f8") < threshold, up, short)


def over_the_mean(rows: pandas.DataFrame) -> numpy.ndarray:
    logs = numpy.log(rows.median_ns.astype(float))
    return (logs - logs.groupby([rows[name] for name in TASK]).transform("mean")).to_numpy()


def numbered(rows: pandas.DataFrame) -> numpy.ndarray:
    """Return the number of each row's task."""
    return rows.groupby(TASK, sort=False).ngroup().to_numpy()


def tasks_hash(rows: pandas.DataFrame) -> str:
    """Return a hash of the tasks: what a model was trained on, and what it was not."""
    keys = sorted(set(rows[TASK].astype(str).agg("|".join, axis=1)))
    return hashlib.sha256("\n".join(keys).encode()).hexdigest()


def data_hash(data: KernelData) -> str:
    """Return the hash of the shards' checksums."""
    return hashlib.sha256((data.folder / "SHA256SUMS").read_bytes()).hexdigest()


def networks_of(
    rows: pandas.DataFrame,
    features: numpy.ndarray,
    about: dict[str, Any],
    settings: Settings,
    device: str,
) -> Networks:
    """Train networks on these rows."""
    from .network import train_networks

    return train_networks(
        features,
        over_the_mean(rows),
        numbered(rows),
        settings,
        {**about, "tasks": tasks_hash(rows), "features": list(NAMES), "settings": vars(settings)},
        device,
    )


def folds_of(rows: pandas.DataFrame) -> numpy.ndarray:
    """Return a number below FOLDS for each row, by a hash of its kernel and shape.

    What is to be chosen is chosen on a fold that networks have not seen: never on a test part.
    """
    keys = "fold\n" + rows["kernel"] + "\n" + rows["shape"]
    numbers = {key: _number(key) % FOLDS for key in keys.unique()}
    return keys.map(numbers).to_numpy()


def _number(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


def save_networks(
    data: KernelData, split: str, out: Path, settings: Settings, device: str, fold: int = -1
) -> Networks:
    """Train on the training part of a split, on all rows if it is empty, and write the file.

    `fold`: this fifth of the training part is left out as well.
    """
    rows = usable(data)
    chosen = ~rows[f"test_{split}"].to_numpy() if split else numpy.ones(len(rows), dtype=bool)
    chosen &= folds_of(rows) != fold
    kernels = sorted(set(rows.kernel[chosen]))
    rows = rows[chosen].reset_index(drop=True)
    about = {"version": VERSION, "target": TARGET, "data": data_hash(data), "split": split}
    about |= {"fold": fold} if fold >= 0 else {}
    about |= {"kernels": kernels, "script": "python -m benchmarks.learn train"}
    made = networks_of(rows, features_of(data, rows, kernels), about, settings, device)
    made.save(out)
    return made
