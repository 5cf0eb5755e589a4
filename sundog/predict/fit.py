"""Find the figures of a machine with which a model's times are nearest to measured ones.

Least squares of the logarithm of predicted over measured, so that 5 us count as much as 5 ms; by
damped Gauss-Newton steps on the logarithms of the figures, which stay positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["errors", "fit"]

Predict = Callable[[dict[str, float]], Sequence[float]]

_STEP = 1e-4  # of a figure's logarithm, for a derivative
_MOST = 60


def fit(start: dict[str, float], predict: Predict, measured: Sequence[float]) -> dict[str, float]:
    """Figures by name, from `start` on; `predict` gives the times that they lead to."""
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
