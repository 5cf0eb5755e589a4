"""A Gaussian process for each kernel: what its times on other shapes say of a new one.

All kernels share its figures: how much a step in each feature matters. They are learned from tasks
of the training part, by the likelihood of its times. A process keeps the rows that it was trained
on, so it is for kernels of the dataset alone: networks and trees know of others, too.
"""

from __future__ import annotations

import numpy
import pandas
import torch

from sundog.learn.features import NAMES
from sundog.learn.kernel_model import encode

from .train import numbered, over_the_best

_FAST, _SLOWER = 0.5, 0.2  # of the target: what is slower than this counts in part
_ROWS, _KERNELS, _RATE = 400, 6, 0.08  # of a step of the figures: rows of each kernel
_LEVEL, _LEAST = 1.0, 1e-4  # what a task's rows share, and a variance that is never undercut
_PENALTY = 5e-4  # of features that matter
STEPS = 60

_Figures = dict[str, torch.Tensor]


def predict_by_processes(
    features: numpy.ndarray, rows: pandas.DataFrame, test: numpy.ndarray, steps: int = STEPS
) -> numpy.ndarray:
    """Return a number for each test row: around 0 in each task, and 0 for an unknown kernel."""
    with numpy.errstate(all="ignore"):
        own = numpy.where(numpy.isnan(features[~test]).all(axis=0), 0.0, features[~test])
        mean, scale = numpy.nanmean(own, axis=0), numpy.nanstd(own, axis=0) + 1e-6
    read = torch.from_numpy(encode(features, mean, scale)[:, 1 : len(NAMES)])
    target = torch.from_numpy(_target(rows).astype("f4"))
    tasks = torch.from_numpy(numbered(rows).copy())
    by_kernel = {k: numpy.flatnonzero(~test & (rows.kernel == k)) for k in set(rows.kernel[~test])}
    figures = _learn(read, target, tasks, dict(sorted(by_kernel.items())), steps)
    found = numpy.zeros(len(rows))
    with torch.no_grad():
        for kernel, train in by_kernel.items():
            wanted = numpy.flatnonzero(test & (rows.kernel == kernel))
            among = _among(figures, read[train], tasks[train]).double()
            weights = torch.cholesky_solve(
                target[train].double()[:, None], torch.linalg.cholesky(among)
            )
            shared = _shared(figures, read[wanted], read[train]).double()
            found[wanted] = (shared @ weights)[:, 0].numpy()
    return found[test]


def _target(rows: pandas.DataFrame) -> numpy.ndarray:
    """Return logarithms of time, around their mean in the task; slow configs differ by less."""
    slow = over_the_best(rows)
    kept = pandas.Series(numpy.where(slow < _FAST, slow, _FAST + _SLOWER * (slow - _FAST)))
    return (kept - kept.groupby(numbered(rows)).transform("mean")).to_numpy()


def _learn(
    read: torch.Tensor,
    target: torch.Tensor,
    tasks: torch.Tensor,
    by_kernel: dict[str, numpy.ndarray],
    steps: int,
) -> _Figures:
    """Ascend on the likelihood of some tasks of some kernels."""
    count = read.shape[1]
    figures = {name: torch.full((count,), -2.0) for name in ("rough", "smooth")}
    figures |= {"rough_size": torch.tensor(-1.0), "smooth_size": torch.tensor(-1.0)}
    figures |= {"noise": torch.tensor(-3.0)}
    for value in figures.values():
        value.requires_grad_()
    optimizer = torch.optim.Adam(figures.values(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    rng = numpy.random.default_rng(0)
    kernels = list(by_kernel)
    for _ in range(steps):
        optimizer.zero_grad()
        for kernel in rng.choice(kernels, min(_KERNELS, len(kernels)), replace=False):
            chosen = _some(by_kernel[kernel], tasks, rng)
            among = _among(figures, read[chosen], tasks[chosen])
            root = torch.linalg.cholesky(among)
            white = torch.linalg.solve_triangular(root, target[chosen][:, None], upper=False)
            loss = 0.5 * white.square().sum() + root.diagonal().log().sum()
            (loss / len(chosen) / _KERNELS).backward()
        (_PENALTY * (figures["rough"].exp().sum() + figures["smooth"].exp().sum())).backward()
        optimizer.step()
        schedule.step()
    return figures


def _some(rows: numpy.ndarray, tasks: torch.Tensor, rng: numpy.random.Generator) -> numpy.ndarray:
    """Draw whole tasks, as many as a step has rows for."""
    own = tasks[rows].numpy()
    order = rng.permutation(numpy.unique(own))
    return numpy.concatenate([rows[own == task] for task in order])[:_ROWS]


def _among(figures: _Figures, read: torch.Tensor, tasks: torch.Tensor) -> torch.Tensor:
    """Return the covariance of what was measured: a task's rows share a level, each has noise."""
    level = _LEVEL**2 * (tasks[:, None] == tasks).float()
    noise = (torch.exp(2 * figures["noise"]) + _LEAST) * torch.eye(len(read))
    return _shared(figures, read, read) + level + noise


def _shared(figures: _Figures, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add a covariance that falls off quickly in some features, and a smooth one in others."""
    far = 3**0.5 * _apart(left, right, figures["rough"])
    near = _apart(left, right, figures["smooth"])
    rough = torch.exp(2 * figures["rough_size"] - far) * (1 + far)
    return rough + torch.exp(2 * figures["smooth_size"] - near.square() / 2)


def _apart(left: torch.Tensor, right: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cdist(left * weight.exp(), right * weight.exp()).clamp(min=1e-6)
