"""What `sundog bench all_gather_matmul --link pcie --plot` draws: time over N, and the limit."""

from __future__ import annotations

import re
from collections import defaultdict

from .run import Row

__all__ = ["draw"]


def draw(path: str, rows: list[Row], size: int) -> None:
    """A line per algorithm, of its fastest config, and per alternative."""
    import matplotlib.pyplot as plt

    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found = re.search(r"\bn=(\d+)|numel=(\d+)", row.problem)
        if row.times is None or found is None:
            continue
        at = int(found[1] or found[2])
        best = lines[row.variant].get(at, row.times.median)
        lines[row.variant][at] = min(best, row.times.median)
        lines["limit"][at] = row.limit
    figure, axes = plt.subplots(layout="constrained")
    for name, points in lines.items():
        style = "k:" if name == "limit" else "o-"
        places = sorted(points)
        axes.plot(places, [1e3 * points[at] for at in places], style, label=name)
    axes.set(xlabel="N", ylabel="ms on rank 0", ylim=(0, None))
    axes.set_title(f"{size} ranks, the others' A behind PCIe")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
