"""Gradient-boosted trees as arrays: what was trained elsewhere, evaluated with numpy alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

__all__ = ["Trees"]

_ARRAYS = ("feature", "threshold", "missing_left", "left", "right", "value")


@dataclass(frozen=True)
class Trees:
    """Trees side by side: an array has a line per tree and a place per node, node 0 is the root.

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
