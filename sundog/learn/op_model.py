"""Which configs of an op are likely to be fast on a problem, learned from recorded tunings.

    scores = predict("all_reduce.two_shot", problem, configs, "nvidia-h200")

A score is the logarithm of a config's time over the best one's. There is none for an algorithm or
a target that the model was not trained on. `python -m benchmarks.learn train-ops` makes the file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from .trees import Trees

__all__ = ["MODEL", "columns_of", "fields_of", "lines", "predict"]

MODEL = Path(__file__).parent / "nvidia-h200-ops.npz"


def predict(op: str, problem: Any, configs: Sequence[Any], target: str) -> list[float] | None:
    """Return a score for each config, the least is the best; None where the model knows nothing."""
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
    """Return a line of features for each; NaN for what it does not have."""
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
