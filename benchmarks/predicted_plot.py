"""A scatter plot of expected over measured times."""

from __future__ import annotations

from collections.abc import Sequence


def draw_scatter(
    path: str, measured: Sequence[float], predicted: Sequence[float], groups: Sequence[str]
) -> None:
    """Draw a point per row, on logarithmic axes, with the lines of 20 % too much and too little."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 5.4))
    for group in sorted(set(groups)):
        at = [i for i, each in enumerate(groups) if each == group]
        axes.scatter(
            [measured[i] * 1e6 for i in at], [predicted[i] * 1e6 for i in at], s=9, label=group
        )
    ends = [min(measured) * 0.8e6, max(measured) * 1.25e6]
    for factor, style in ((1.0, "-"), (1.2, ":"), (1 / 1.2, ":")):
        axes.plot(ends, [end * factor for end in ends], style, color="gray", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, us", ylabel="expected, us")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
