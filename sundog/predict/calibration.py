"""Fit a machine's figures to measured times of ops: first those of moving data, then of products.

Collectives say nothing about products, and a product's time depends on both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..hardware.description import Hardware, Source
from .expected import time

__all__ = [
    "LINKED", "SHARED", "Sample", "errors", "figure_of", "fit", "fit_moving", "fit_products",
    "product_figures", "signed", "with_rates",
]  # fmt: skip

# What can be told apart by collectives: where ranks share a GPU, and where they are linked.
SHARED = (
    "gpu.launch_s", "gpu.flag_s", "gpu.load_s", "gpu.cache_rate", "gpu.sm_rate",
    "gpu.sm_load_rate", "gpu.poll_rate",
)  # fmt: skip
LINKED = (
    "gpu.launch_s",
    "gpu.sm_rate",
    "gpu.sm_load_rate",
    "link.flag_s",
    "link.load_s",
    "link.rate",
)


class Sample(NamedTuple):
    """What one config of an algorithm took."""

    op: str
    problem: Any
    config: Any
    num_sms: int
    seconds: float


def fit_moving(hardware: Hardware, samples: Sequence[Sample], names: Sequence[str]) -> Hardware:
    """The figures `names` as the samples suggest them."""
    start = {name: figure_of(hardware, name) for name in names}
    return _changed(hardware, _fitted(start, samples, lambda figures: _changed(hardware, figures)))


def fit_products(hardware: Hardware, samples: Sequence[Sample]) -> Hardware:
    """The rates of products over their size, and what a tile costs besides."""

    def made(figures: dict[str, float]) -> Hardware:
        return hardware.changed(with_rates(hardware, figures))

    return made(_fitted(product_figures(hardware), samples, made))


def product_figures(hardware: Hardware) -> dict[str, float]:
    """What a fit of products begins with: a rate per size of the table, and a tile's cost."""
    rates = {f"rate {i}": rate for i, (_, rate) in enumerate(hardware.gpu.matmul_rate)}
    return {"gpu.tile_s": max(hardware.gpu.tile_s, 1e-9), **rates}


def with_rates(hardware: Hardware, figures: dict[str, float]) -> dict[str, Any]:
    """The same figures by the names that `Hardware.changed` takes."""
    rates = [(size, figures[f"rate {i}"]) for i, (size, _) in enumerate(hardware.gpu.matmul_rate)]
    return {"gpu.tile_s": figures["gpu.tile_s"], "gpu.matmul_rate": tuple(rates)}


def _fitted(
    start: dict[str, float], samples: Sequence[Sample],
    made: Callable[[dict[str, float]], Hardware],
) -> dict[str, float]:  # fmt: skip
    def predict(figures: dict[str, float]) -> list[float]:
        there = made(figures)
        return [time(s.op, s.problem, s.config, there, s.num_sms).seconds for s in samples]

    return fit(start, predict, [sample.seconds for sample in samples])


def _changed(hardware: Hardware, figures: dict[str, float]) -> Hardware:
    """By a switch a pair has the full rate."""
    if "link.rate" in figures and hardware.link.kind == "switch":
        figures = {**figures, "link.pair_rate": figures["link.rate"]}
    return hardware.changed(figures)


def figure_of(hardware: Hardware, name: str) -> float:
    part, _, inside = name.partition(".")
    value: float = getattr(getattr(hardware, part), inside)
    return value


def signed(hardware: Hardware, names: Sequence[str], source: Source) -> Hardware:
    """Say where these figures come from, and round them: three digits are known at most."""
    changes: dict[str, Any] = {}
    for name in names:
        value = figure_of(hardware, name)
        changes[name] = (
            tuple((size, _rounded(rate)) for size, rate in value)
            if isinstance(value, tuple)
            else _rounded(value)
        )
    sources = {**hardware.sources, **dict.fromkeys(names, source)}
    return dataclasses.replace(hardware.changed(changes), sources=sources)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.3g}")


# the search

Predict = Callable[[dict[str, float]], Sequence[float]]

_STEP = 1e-4  # of a figure's logarithm, for a derivative
_MOST = 60


def fit(start: dict[str, float], predict: Predict, measured: Sequence[float]) -> dict[str, float]:
    """Figures by name, from `start` on; `predict` gives the times that they lead to.

    Least squares of the logarithm of predicted over measured, so that 5 us count as much as 5 ms;
    by damped Gauss-Newton steps on the logarithms of the figures, which stay positive.
    """
    names, goal = list(start), np.log(np.asarray(measured, float))
    at = np.log([start[name] for name in names])

    def miss(point: np.ndarray) -> np.ndarray:
        figures = dict(zip(names, np.exp(point).tolist(), strict=True))
        return np.asarray(np.log(np.asarray(predict(figures), float)) - goal)

    found, damping = miss(at), 1e-2
    for _ in range(_MOST):
        slopes = [(miss(at + _STEP * unit) - found) / _STEP for unit in np.eye(len(names))]
        jacobian = np.stack(slopes, axis=1)
        normal, pull = jacobian.T @ jacobian, jacobian.T @ found
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.eye(len(names)), -pull)
            tried = miss(at + np.clip(step, -1, 1))
            if tried @ tried < found @ found:
                break
            damping *= 4
        else:
            break
        gain = found @ found - tried @ tried
        at, found, damping = at + np.clip(step, -1, 1), tried, damping / 4
        if gain < 1e-7 * (found @ found):
            break
    return dict(zip(names, np.exp(at).tolist(), strict=True))


def errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """How far each is off, as a share of what was measured."""
    return [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
