"""A graph model for comparison: message passing over the TTIR, with config, shape and launch.

`python -m benchmarks.learn graphs h200 --split shape` trains it and prints its scores. The graphs
of a batch are one large graph without edges between them: a step embeds all of them at once.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from sundog.dataset.shards import ELEMENTS, KINDS, KernelData
from sundog.learn.features import COMPILED, NAMES
from sundog.learn.kernel_model import encode

from .evaluate import Part, Score, score_of
from .network import Settings
from .train import features_of, numbered, over_the_mean, targets, usable

_ROUNDS, _WIDTH = 3, 48
_Arrays = list[dict[str, numpy.ndarray]]  # of each graph: see `shards.graph_arrays`


@dataclass(frozen=True)
class Graphs:
    """Many graphs side by side: nodes as in `shards.NODE`, and which graph each is of."""

    node: torch.Tensor
    edge: torch.Tensor
    owner: torch.Tensor
    count: int

    @staticmethod
    def of(arrays: _Arrays, device: str) -> Graphs:
        sizes = [len(each["node"]) for each in arrays]
        first = numpy.concatenate([[0], numpy.cumsum(sizes)[:-1]])
        edges = [each["edge"] + start for each, start in zip(arrays, first, strict=True)]
        owner = numpy.repeat(numpy.arange(len(arrays)), sizes)
        node = numpy.concatenate([each["node"] for each in arrays])
        found = (node, numpy.concatenate(edges, axis=1), owner)
        nodes, edge, whose = (torch.from_numpy(each).to(device) for each in found)
        return Graphs(nodes, edge, whose, len(arrays))


class _Model(torch.nn.Module):
    """Embeds each graph, and scores a row by its graph and its features."""

    def __init__(self, operations: int, features: int, width: int) -> None:
        super().__init__()
        self.operation = torch.nn.Embedding(operations + 1, 24)
        self.kind = torch.nn.Embedding(len(KINDS), 4)
        self.element = torch.nn.Embedding(len(ELEMENTS), 4)
        self.first = torch.nn.Linear(34, _WIDTH)
        self.rounds = torch.nn.ModuleList(
            torch.nn.Linear(3 * _WIDTH, _WIDTH) for _ in range(_ROUNDS)
        )
        self.read = torch.nn.Linear(features + 2 * _WIDTH, width)
        self.hidden = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.score = torch.nn.Linear(width, 1)

    def embed(self, graphs: Graphs) -> torch.Tensor:
        node = graphs.node.long()
        words = [self.operation(node[:, 1]), self.kind(node[:, 0]), self.element(node[:, 2])]
        at = self.first(torch.cat([*words, graphs.node[:, 3:]], dim=1))
        for each in self.rounds:
            used = _mean(at[graphs.edge[0]], graphs.edge[1], len(at))
            users = _mean(at[graphs.edge[1]], graphs.edge[0], len(at))
            at = at + torch.nn.functional.silu(each(torch.cat([at, used, users], dim=1)))
        whose = graphs.owner[:, None].expand_as(at)
        most = torch.full((graphs.count, _WIDTH), -1e9, device=at.device)
        most = most.scatter_reduce(0, whose, at, "amax")
        return torch.cat([_mean(at, graphs.owner, graphs.count), most], dim=1)

    def forward(self, graph: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        hidden = self.read(torch.cat([graph, features], dim=1))
        for layer in self.hidden:
            active = torch.nn.functional.silu(hidden)
            hidden = hidden + layer(torch.nn.functional.dropout(active, 0.1, self.training))
        return self.score(torch.nn.functional.silu(hidden))[:, 0]


def _mean(values: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    total = torch.zeros(count, values.shape[1], device=values.device).index_add(0, owner, values)
    ones = torch.ones(len(owner), 1, device=values.device)
    return total / torch.zeros(count, 1, device=values.device).index_add(0, owner, ones).clamp(1)


def predict_by_graphs(
    arrays: _Arrays, place: numpy.ndarray, features: numpy.ndarray, rows: Any, test: numpy.ndarray,
    operations: int, settings: Settings, device: str = "cpu",
) -> numpy.ndarray:  # fmt: skip
    """Train on the rows that are not for the test; return a number for those that are.

    `place`: the graph of each row. `features`: without the kernel's number.
    """
    own = numpy.where(numpy.isnan(features[~test]).all(axis=0), 0.0, features[~test])
    read = encode(features, numpy.nanmean(own, axis=0), numpy.nanstd(own, axis=0) + 1e-6)
    given = torch.from_numpy(read).to(device)
    target = torch.from_numpy(numpy.clip(over_the_mean(rows), -2.5, 2.0).astype("f4")).to(device)
    torch.manual_seed(settings.seed)
    model = _Model(operations, given.shape[1], settings.width).to(device)

    def scores(chosen: numpy.ndarray) -> torch.Tensor:
        ids, at = numpy.unique(place[chosen], return_inverse=True)
        graphs = Graphs.of([arrays[n] for n in ids], device)
        which = torch.from_numpy(chosen).to(device)
        return model(model.embed(graphs)[torch.from_numpy(at).to(device)], given[which])

    train = numpy.flatnonzero(~test)
    tasks = numbered(rows)[train]
    order = numpy.argsort(tasks, kind="stable")
    parts = numpy.split(train[order], numpy.flatnonzero(numpy.diff(tasks[order])) + 1)
    _fit(model, scores, target, parts, settings)
    model.eval()
    with torch.no_grad():
        pieces = numpy.array_split(numpy.flatnonzero(test), max(int(test.sum()) // 1000, 1))
        return torch.cat([scores(each) for each in pieces]).cpu().numpy()


def _fit(
    model: _Model,
    scores: Callable[[numpy.ndarray], torch.Tensor],
    target: torch.Tensor,
    parts: list[numpy.ndarray],
    settings: Settings,
) -> None:
    """Descend on the error within tasks: `parts` are the rows of each."""
    steps = max(len(parts) // settings.tasks, 1)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=settings.decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate / 2, total_steps=settings.epochs * steps
    )
    rng = numpy.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        shuffled = rng.permutation(len(parts))
        for step in range(steps):
            chosen = [parts[n] for n in shuffled[step * settings.tasks :][: settings.tasks]]
            rows = numpy.concatenate(chosen)
            sizes = torch.tensor([len(each) for each in chosen])
            owner = torch.repeat_interleave(torch.arange(len(chosen)), sizes).to(target.device)
            error = scores(rows) - target[torch.from_numpy(rows).to(target.device)]
            error = error - _mean(error[:, None], owner, len(chosen))[owner, 0]
            loss = torch.nn.functional.smooth_l1_loss(error, torch.zeros_like(error), beta=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def evaluate_graphs(
    data: KernelData, split: str, settings: Settings, device: str
) -> Iterator[Score]:
    """Score the graph in place of what is counted in the compiled kernel, and beside it."""
    rows = usable(data)
    test = rows[f"test_{split}"].to_numpy()
    features = features_of(data, rows, [])
    part = Part(rows, features, targets(rows), test)
    ids = sorted(set(rows.ttir))
    arrays = _read(data, ids)
    place = rows.ttir.map({ir_id: n for n, ir_id in enumerate(ids)}).to_numpy()
    plain = [n for n, name in enumerate(NAMES) if n and name not in COMPILED]
    for name, columns in (("graph", plain), ("graph, compiled", list(range(1, len(NAMES))))):
        predicted = predict_by_graphs(
            arrays, place, features[:, columns], rows, test, len(data.vocabulary), settings, device
        )
        yield score_of(name, predicted, part, split)


def _read(data: KernelData, ids: list[str]) -> _Arrays:
    """Read the graphs in processes: 30 ms each."""
    len(data.vocabulary)  # before the processes part
    with multiprocessing.get_context("fork").Pool(min(os.cpu_count() or 1, 14)) as pool:
        return pool.map(data.arrays, ids, chunksize=20)
