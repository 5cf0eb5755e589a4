"""Train the networks of sundog/learn/kernel_model.py, with torch, on a CPU or a GPU.

The target is the logarithm of a config's time over the mean of its task. A batch has whole tasks,
and the error's mean over each task is left out: only the order within it counts. All networks of an
ensemble see the same batches and differ in their first weights and in what dropout hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

from sundog.learn.features import GROUPS, NAMES
from sundog.learn.kernel_model import WEIGHTS, Networks, encode

_FASTEST, _SLOWEST = -2.5, 2.0  # of the target: what is farther from the mean counts as this


@dataclass(frozen=True)
class Settings:
    networks: int = 4
    width: int = 192
    epochs: int = 40
    tasks: int = 16  # of a batch
    rate: float = 4e-3
    decay: float = 1e-2
    dropout: float = 0.1
    hide_kernel: float = 0.15  # part of the rows whose kernel is unknown
    hide: float = 0.0  # part of the rows of which a group of features is unknown, for each group
    seed: int = 0


def train_networks(
    features: numpy.ndarray,
    target: numpy.ndarray,
    tasks: numpy.ndarray,
    settings: Settings,
    about: dict[str, Any],
    device: str = "cpu",
) -> Networks:
    """`tasks`: the number of each row's task; the first column of `features` is the kernel's."""
    with numpy.errstate(all="ignore"):
        own = numpy.where(numpy.isnan(features[:, 1:]).all(axis=0), 0.0, features[:, 1:])
        mean, scale = numpy.nanmean(own, axis=0), numpy.nanstd(own, axis=0) + 1e-6
    kernels = len(about["kernels"])
    data = _Data(
        torch.from_numpy(encode(features[:, 1:], mean, scale)).to(device),
        torch.from_numpy(numpy.nan_to_num(features[:, 0], nan=kernels).astype(int)).to(device),
        torch.from_numpy(numpy.clip(target, _FASTEST, _SLOWEST).astype("f4")).to(device),
    )
    torch.manual_seed(settings.seed)
    weights = _first_weights(data.read.shape[1], kernels, settings, device)
    _descend(weights, data, tasks, settings)
    arrays = {name: value.detach().cpu().numpy() for name, value in weights.items()}
    return Networks({**arrays, "mean": mean, "scale": scale}, about)


@dataclass(frozen=True)
class _Data:
    read: torch.Tensor
    kernel: torch.Tensor
    target: torch.Tensor


def _first_weights(
    inputs: int, kernels: int, settings: Settings, device: str
) -> dict[str, torch.Tensor]:
    count, width = settings.networks, settings.width

    def layer(rows: int, columns: int) -> torch.Tensor:
        return (2 * torch.rand(count, rows, columns) - 1) / rows**0.5

    made = {"kernel": 0.3 * torch.randn(count, kernels + 1, width)}
    for number, (rows, columns) in enumerate([(inputs, width), *[(width, width)] * 2, (width, 1)]):
        made |= {f"w{number}": layer(rows, columns), f"b{number}": torch.zeros(count, 1, columns)}
    return {name: made[name].to(device).requires_grad_() for name in WEIGHTS}


def _descend(
    weights: dict[str, torch.Tensor], data: _Data, tasks: numpy.ndarray, settings: Settings
) -> None:
    order = numpy.argsort(tasks, kind="stable")
    places = numpy.split(order, numpy.flatnonzero(numpy.diff(tasks[order])) + 1)
    steps = max(len(places) // settings.tasks, 1)
    optimizer = torch.optim.AdamW(weights.values(), weight_decay=settings.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate, total_steps=settings.epochs * steps
    )
    rng = numpy.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        shuffled = rng.permutation(len(places))
        for step in range(steps):
            chosen = [places[n] for n in shuffled[step * settings.tasks :][: settings.tasks]]
            loss = _loss(weights, data, chosen, settings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def _loss(
    weights: dict[str, torch.Tensor], data: _Data, chosen: list[numpy.ndarray], settings: Settings
) -> torch.Tensor:
    device = data.read.device
    rows = torch.from_numpy(numpy.concatenate(chosen)).to(device)
    sizes = torch.tensor([len(each) for each in chosen], device=device)
    owner = torch.repeat_interleave(torch.arange(len(chosen), device=device), sizes)
    nobody = weights["kernel"].shape[1] - 1
    other = torch.rand(len(rows), device=device) < settings.hide_kernel
    kernel = torch.where(other, nobody, data.kernel[rows])
    read = _hidden(data.read[rows], settings.hide)
    error = _forward(weights, read, kernel, settings.dropout) - data.target[rows]
    sums = torch.zeros(len(error), len(chosen), device=device).index_add(1, owner, error)
    error = error - (sums / sizes)[:, owner]
    zero = torch.zeros_like(error)
    return torch.nn.functional.smooth_l1_loss(error, zero, beta=0.1) * len(error)


def _hidden(read: torch.Tensor, part: float) -> torch.Tensor:
    """Hide groups of features of some rows, as of a kernel that is not ours or not compiled."""
    if not part:
        return read
    count = len(NAMES) - 1
    hidden = torch.zeros(len(read), count, dtype=torch.bool, device=read.device)
    for names in GROUPS.values():
        columns = [NAMES.index(name) - 1 for name in names]
        hidden[:, columns] |= torch.rand(len(read), 1, device=read.device) < part
    values, unknown = read[:, :count], read[:, count:]
    return torch.cat([values.masked_fill(hidden, 0.0), unknown.masked_fill(hidden, 1.0)], 1)


def _forward(
    w: dict[str, torch.Tensor], read: torch.Tensor, kernel: torch.Tensor, dropout: float
) -> torch.Tensor:
    """As kernel_model._one, for all networks at once: a line per network."""

    def layer(hidden: torch.Tensor, number: int) -> torch.Tensor:
        active = torch.nn.functional.dropout(torch.nn.functional.silu(hidden), dropout)
        return active @ w[f"w{number}"] + w[f"b{number}"]

    hidden = read @ w["w0"] + w["b0"] + w["kernel"][:, kernel]
    hidden = hidden + layer(hidden, 1)
    hidden = hidden + layer(hidden, 2)
    return layer(hidden, 3)[:, :, 0]
