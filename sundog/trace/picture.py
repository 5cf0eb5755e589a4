"""The timeline of the slowest rank as a picture: waits in the colour of the rank waited for."""

from __future__ import annotations

import numpy as np

from ..device.trace import BARRIER, COMPUTE, FETCH, WAIT
from .timeline import Timeline, summarise

__all__ = ["draw"]

_PLAIN = {FETCH.value: ("fetch", "#c8d8e8"), COMPUTE.value: ("compute", "#d8e8c8")}


def draw(timeline: Timeline, path: str, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    slowest = max(summarise(timeline), key=lambda each: each.length)
    spans = timeline.spans[timeline.spans["rank"] == slowest.rank]
    programs = np.unique(spans["program"]).tolist()
    figure, axes = plt.subplots(figsize=(10, 1.5 + 0.12 * min(len(programs), 64)))
    colours = plt.get_cmap("tab10")
    for kind, (name, colour) in _PLAIN.items():
        _bars(axes, spans[spans["kind"] == kind], name, colour)
    waits = spans[np.isin(spans["kind"], (WAIT.value, BARRIER.value))]
    for peer in np.unique(waits["ended_by"]).tolist():
        name = f"waited for rank {peer}" if peer >= 0 else "waited, ended by nobody seen"
        _bars(axes, waits[waits["ended_by"] == peer], name, colours(peer % 10 if peer >= 0 else 7))
    part = 100 * slowest.waited / max(slowest.busy, 1)
    axes.set(
        xlabel=f"time [{timeline.unit}]", ylabel="program",
        title=f"{title}: rank {slowest.rank}, the slowest; {part:.0f} % of program time waited",
    )  # fmt: skip
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(1, 0))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _bars(axes: object, spans: np.ndarray, name: str, colour: object) -> None:
    if len(spans):
        axes.barh(  # type: ignore[attr-defined]
            spans["program"], spans["end"] - spans["begin"], left=spans["begin"], height=0.9,
            color=colour, label=name, linewidth=0,
        )  # fmt: skip
