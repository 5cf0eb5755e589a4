"""Score the configs of an op on a problem by how fast they are likely to be, learned from tunings.

    scores = predict("all_reduce.two_shot", problem, configs, "nvidia-h200")

A score is the logarithm of a config's time relative to the best one's. There is none for an
algorithm or a target that the model was not trained on. `python -m benchmarks.learn train-ops`
makes the file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

MODEL = Path(__file__).parent / "nvidia-h200-ops.npz"
_ARRAYS = ("feature", "threshold", "missing_left", "left", "right", "value")


def predict(op: str, problem: Any, configs: Sequence[Any], target: str) -> list[float] | None:
    """Return a score for each config, the least for the best; None if the model knows nothing."""
    trees = _model()
    if trees is None or target != trees.about["target"] or op not in trees.about["ops"]:
        return None
    given = [fields_of(op, problem, config) for config in configs]
    about = trees.about
    return [float(each) for each in trees.predict(lines(given, about["ops"], about["columns"]))]


@functools.cache
def _model() -> Trees | None:
    return Trees.load(MODEL) if MODEL.exists() else None


def fields_of(op: str, problem: Any, config: Any) -> dict[str, Any]:
    """Return the fields of a problem and of a config, with the op; both are dataclasses."""
    found = {"op": op}
    for prefix, value in (("problem", problem), ("config", config)):
        fields = dataclasses.fields(value)
        found |= {f"{prefix}_{each.name}": getattr(value, each.name) for each in fields}
    return found


def columns_of(given: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the fields that are numbers."""
    return sorted({name for each in given for name, value in each.items() if _number(value)})


def lines(
    given: Sequence[Mapping[str, Any]], ops: Sequence[str], columns: Sequence[str]
) -> numpy.ndarray:
    """Return a line of features for each, with NaN for what it does not have."""
    table = [
        [float(ops.index(each["op"])), *(_log(each.get(name)) for name in columns)]
        for each in given
    ]
    return numpy.array(table, dtype=float)


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def _log(value: Any) -> float:
    if not _number(value):
        return math.nan
    return math.log2(value) if value > 0 else -1.0


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted trees, trained elsewhere and evaluated with numpy alone.

    An array has a line per tree and a place per node; node 0 is the root.

    A leaf is its own child, so all rows take as many steps as the deepest tree has.
    """

    feature: numpy.ndarray
    threshold: numpy.ndarray
    missing_left: numpy.ndarray
    left: numpy.ndarray
    right: numpy.ndarray
    value: numpy.ndarray
    depth: int
    about: dict[str, Any]  # version, data hash, kernels, how it was trained

    def predict(self, features: numpy.ndarray) -> numpy.ndarray:
        """Return the sum over the trees, for each line of features."""
        rows = numpy.arange(len(features))[:, None]
        trees = numpy.arange(len(self.feature))[None, :]
        node = numpy.zeros((len(features), len(self.feature)), dtype=numpy.intp)
        for _ in range(self.depth):
            value = features[rows, self.feature[trees, node]]
            missing = numpy.isnan(value)
            below = value <= self.threshold[trees, node]
            goes_left = numpy.where(missing, self.missing_left[trees, node], below)
            node = numpy.where(goes_left, self.left[trees, node], self.right[trees, node])
        return self.value[trees, node].sum(axis=1) + self.about["base"]

    def save(self, path: Path) -> None:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        about = json.dumps({**self.about, "depth": self.depth}, sort_keys=True)
        numpy.savez_compressed(path, about=numpy.array(about), **arrays)

    @staticmethod
    def load(path: Path) -> Trees:
        with numpy.load(path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            depth = about.pop("depth")
            return Trees(**{name: file[name] for name in _ARRAYS}, depth=depth, about=about)
