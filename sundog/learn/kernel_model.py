"""Score the configs of a Triton kernel by how fast they are likely to be, learned from `data/h200`.

    scores = predict(known, "nvidia-h200")      # known: see features.py

A score is the logarithm of a config's time relative to the mean of its task, so only scores of one
kernel, shape and dtype can be compared. There are none for a target that the model was not trained
on. `python -m benchmarks.learn train` makes the file; numpy alone evaluates it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from .features import matrix

MODEL = Path(__file__).parent / "nvidia-h200-kernels.npz"
# Configs of its order that are measured before measurements correct it. On tasks that the networks
# had not seen, the best of five is near the best as often either way, and five need not wait for
# each other. benchmarks/learn/README.md has the figures.
ORDERED = 5
WEIGHTS = ("kernel", "w0", "b0", "w1", "b1", "w2", "b2", "w3", "b3")
_SCALES = ("mean", "scale")
_FAR = 4.0  # standard deviations: values farther away are cut to this


def predict(known: Sequence[Mapping[str, Any]], target: str) -> list[float] | None:
    """Return a score for each, the least for the best; None if the model knows nothing."""
    model = _model()
    if model is None or target != model.about["target"]:
        return None
    if not known:
        return []
    features = matrix(known, model.about["kernels"])
    return [float(score) for score in model.predict(features)]


@functools.cache
def _model() -> Networks | None:
    return Networks.load(MODEL) if MODEL.exists() else None


def encode(features: numpy.ndarray, mean: numpy.ndarray, scale: numpy.ndarray) -> numpy.ndarray:
    """Return a network's input: standardised features, 0 where unknown, then which are unknown."""
    unknown = numpy.isnan(features)
    near = numpy.clip((features - mean) / scale, -_FAR, _FAR)
    return numpy.concatenate([numpy.where(unknown, 0.0, near), unknown], axis=1).astype("f4")


@dataclass(frozen=True)
class Networks:
    """Several networks of two residual layers, whose scores are averaged.

    Arrays have a line per network. `kernel` has what is added to the first layer for each kernel;
    its last line is for kernels that are not among `about["kernels"]`.
    """

    arrays: dict[str, numpy.ndarray]
    about: dict[str, Any]  # version, data hash, target, kernels, how it was trained

    def predict(self, features: numpy.ndarray) -> numpy.ndarray:
        """Take features as `matrix` returns them: the number of the kernel comes first."""
        given = {name: array.astype("f4") for name, array in self.arrays.items()}
        unknown = given["kernel"].shape[1] - 1
        number = numpy.nan_to_num(features[:, 0], nan=unknown).astype(int)
        read = encode(features[:, 1:], given["mean"], given["scale"])
        scores = [
            _one({name: given[name][each] for name in WEIGHTS}, read, number)
            for each in range(len(given["w0"]))
        ]
        return numpy.mean(scores, axis=0)

    def save(self, path: Path) -> None:
        """Write the weights in 16 bits, which moves scores by 0.1 % and keeps their order."""
        kept: dict[str, Any] = {name: self.arrays[name].astype("f2") for name in WEIGHTS}
        kept |= {name: self.arrays[name].astype("f4") for name in _SCALES}
        about = numpy.array(json.dumps(self.about, sort_keys=True))
        numpy.savez_compressed(path, about=about, **kept)

    @staticmethod
    def load(path: Path) -> Networks:
        with numpy.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*WEIGHTS, *_SCALES)}
            return Networks(arrays, json.loads(str(file["about"])))


def _one(w: dict[str, numpy.ndarray], read: numpy.ndarray, number: numpy.ndarray) -> numpy.ndarray:
    hidden = read @ w["w0"] + w["b0"] + w["kernel"][number]
    hidden = hidden + _silu(hidden) @ w["w1"] + w["b1"]
    hidden = hidden + _silu(hidden) @ w["w2"] + w["b2"]
    return (_silu(hidden) @ w["w3"] + w["b3"])[:, 0]


def _silu(value: numpy.ndarray) -> numpy.ndarray:
    return value / (1 + numpy.exp(-value))
