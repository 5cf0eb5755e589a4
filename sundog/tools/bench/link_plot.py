"""Time over N, and the limit, of `sundog bench all_gather_matmul --link pcie`.

python -m sundog.tools.bench.link_plot FILE.json     draws FILE.png, which docs/measured.md shows
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

__all__ = ["draw"]


def draw(path: str, rows: list[dict[str, Any]], size: int) -> None:
    """A line per algorithm, of its fastest config, and per alternative; a panel per M.

    `rows`: as in the JSON.
    """
    import matplotlib.pyplot as plt

    panels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found = re.search(r"\bm=\d+", row["problem"])
        if row["times"] is not None:
            panels[found[0] if found else ""].append(row)
    figure, axes = plt.subplots(
        1, len(panels), layout="constrained", squeeze=False, figsize=(6.4 * len(panels), 4.8)
    )
    for each, (name, some) in zip(axes[0], panels.items(), strict=True):
        _panel(each, some)
        over = f", {name.replace('m=', 'M=')}" if name else ""
        each.set_title(f"{size} ranks, the others' data behind PCIe{over}")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found = re.search(r"\bn=(\d+)|numel=(\d+)", row["problem"])
        if found is None:
            continue
        at = int(found[1] or found[2])
        median = statistics.median(ranks[0] for ranks in row["times"]["samples_ns"])
        lines[row["variant"]][at] = min(lines[row["variant"]].get(at, median), median)
        lines["limit"][at] = row["limit_ns"]
    for name, points in lines.items():
        style = "k:" if name == "limit" else "o-"
        places = sorted(points)
        axes.plot(places, [1e-6 * points[at] for at in places], style, label=name)
    axes.set(xlabel="N", ylabel="ms on rank 0", ylim=(0, None))


if __name__ == "__main__":
    file = Path(sys.argv[1])
    content = json.loads(file.read_text())
    draw(str(file.with_suffix(".png")), content["rows"], content["world"])
