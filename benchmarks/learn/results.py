"""Print and write what `evaluate` finds, and how noisy the measurements are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy

from sundog.dataset.shards import KernelData, load

from .evaluate import GOALS, Score, evaluate
from .train import TASK

__all__ = ["noise", "show"]


def show(name: str, splits: list[str], path: str) -> None:
    data = load(name)
    found: dict[str, Any] = {"noise": noise(data), "data": data_hash(data), "splits": {}}
    print(f"noise: {found['noise']}")
    for split in splits:
        scores = evaluate(data, split)
        found["splits"][split] = [asdict(score) for score in scores]
        print(table(split, scores), flush=True)
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def table(split: str, scores: list[Score]) -> str:
    count, factor = GOALS[split]
    head = f"{split}: {scores[0].tasks} tasks; near: within {factor - 1:.0%} after {count}"
    lines = [
        f"  {score.name:44} {'' if score.tau is None else f'{score.tau:6.3f}':6}  {score.near:6.1%}"
        for score in scores
    ]
    return "\n".join([f"{head}\n  {'':44} {'tau':>6}  {'near':>6}", *lines])


def noise(data: KernelData) -> dict[str, float]:
    """Return by how much medians of the same row differ when it is measured again, in per cent."""
    rows = data.rows[data.rows.status == "ok"]
    again = rows[~rows.control & (rows["repeat"] > 0)]
    first = rows[~rows.control & (rows["repeat"] == 0)]
    both = first.merge(again, on=[*TASK, "config"], suffixes=("", "_again"))
    apart = numpy.abs(numpy.log(both.median_ns_again.astype(float) / both.median_ns.astype(float)))
    controls = rows[rows.control].groupby("kernel").median_ns
    spread = {
        f"control {name}": float(each.astype(float).std() / each.astype(float).mean())
        for name, each in controls
    }
    middle = {f"p{p}": float(numpy.percentile(apart, p)) for p in (50, 90, 99)} if len(both) else {}
    percent = {name: round(100 * value, 3) for name, value in {**middle, **spread}.items()}
    return {"rows_again": len(both), **percent}


def data_hash(data: KernelData) -> str:
    """Return the checksums' own hash: what a model was trained on."""
    import hashlib

    return hashlib.sha256((data.folder / "SHA256SUMS").read_bytes()).hexdigest()
