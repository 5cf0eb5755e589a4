"""Pictures of a run: its convergence, and the graph of its IR. Needs matplotlib, and says so."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx
    import pandas

_MAX_LABELS = 150  # more are unreadable at any size


def best_so_far(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the timed rows in order, with the lowest time up to each as `best_ms`."""
    timed = rows[(rows.status == "ok") & rows.perf_ms.notna()].sort_values("timestamp_s")
    return timed.assign(best_ms=timed.perf_ms.cummin())


def draw_convergence(rows: pandas.DataFrame, title: str, path: str) -> None:
    """Draw every time, failures as crosses at the bottom, and the best so far."""
    timed = best_so_far(rows)
    failed = rows[~rows.status.isin(["started", "ok"])]
    figure, axes = _figure(9, 5)
    axes.scatter(timed.timestamp_s, timed.perf_ms, s=12, alpha=0.6, label=f"{len(timed)} timed")
    axes.step(timed.timestamp_s, timed.best_ms, where="post", color="black", label="best so far")
    if len(failed):
        bottom = timed.perf_ms.min() if len(timed) else 1.0
        label = f"{len(failed)} without a time"
        axes.scatter(failed.timestamp_s, [bottom] * len(failed), marker="x", c="red", label=label)
    if len(timed):
        axes.set_yscale("log")
    axes.set(xlabel="seconds since the run started", ylabel="ms", title=title)
    axes.legend()
    _save(figure, path)


def draw_graph(graph: networkx.MultiDiGraph, title: str, path: str) -> None:
    """Draw nodes in layers from top to bottom; data edges grey, others coloured and dashed."""
    import networkx as nx

    positions = _positions(graph)
    height = 1 + max((-y for _, y in positions.values()), default=0)
    width = 1 + 2 * max((abs(x) for x, _ in positions.values()), default=0)
    figure, axes = _figure(min(40, 4 + 1.4 * width), min(60, 3 + 0.6 * height))
    colours = _colours(graph)
    style = {"node_size": 60, "cmap": "tab10", "vmin": 0, "vmax": 9}
    nx.draw_networkx_nodes(graph, positions, ax=axes, node_color=colours, **style)
    for kind, (colour, line) in _edge_styles(graph).items():
        edges = [(u, v) for u, v, k in graph.edges(data="edge_kind") if k == kind]
        look = {"edge_color": colour, "style": line, "arrowsize": 6, "width": 0.7}
        nx.draw_networkx_edges(
            nx.DiGraph(edges), positions, edgelist=edges, ax=axes, node_size=60, **look
        )
        axes.plot([], [], color=colour, linestyle=line, label=str(kind))
    if len(graph) <= _MAX_LABELS:
        names = {node: node_label(node, data) for node, data in graph.nodes(data=True)}
        above = {node: (x, y + 0.2) for node, (x, y) in positions.items()}
        nx.draw_networkx_labels(graph, above, names, font_size=6, ax=axes)
    axes.set_axis_off()
    axes.set_title(f"{title}: {len(graph)} nodes, {graph.number_of_edges()} edges")
    axes.legend(loc="upper right", fontsize=7)
    _save(figure, path)


def _colours(graph: networkx.MultiDiGraph) -> list[int]:
    """Return a colour per node: by graph for Helion's, by kind of node for Triton's."""
    groups = [str(d.get("graph_id", d.get("node_kind"))) for _, d in graph.nodes(data=True)]
    order = sorted(set(groups))
    return [order.index(group) % 10 for group in groups]


def _edge_styles(graph: networkx.MultiDiGraph) -> dict[Any, tuple[str, str]]:
    kinds = sorted({str(kind) for _, _, kind in graph.edges(data="edge_kind")} - {"data"})
    palette = ["tab:red", "tab:blue", "tab:green", "tab:purple", "tab:orange", "tab:brown"]
    styles = {kind: (palette[i % len(palette)], "--") for i, kind in enumerate(kinds)}
    return {"data": ("grey", "-"), **styles}


def layers(graph: networkx.MultiDiGraph) -> dict[Hashable, int]:
    """Put each node below its operands. Edges that run backwards (loops) do not count."""
    import networkx as nx

    order = {node: i for i, node in enumerate(graph)}
    forward = nx.DiGraph()
    forward.add_nodes_from(graph)
    forward.add_edges_from((u, v) for u, v in graph.edges() if order[u] < order[v])
    found = enumerate(nx.topological_generations(forward))
    return {node: depth for depth, generation in found for node in generation}


def _positions(graph: networkx.MultiDiGraph) -> dict[Hashable, tuple[float, float]]:
    """Place layers from top to bottom; in a layer, nodes in the order of their operands."""
    rows: dict[int, list[Hashable]] = {}
    for node, depth in layers(graph).items():
        rows.setdefault(depth, []).append(node)
    found: dict[Hashable, tuple[float, float]] = {}
    for depth, nodes in sorted(rows.items()):
        nodes.sort(key=lambda node: _middle(found[p][0] for p in graph.pred[node] if p in found))
        for i, node in enumerate(nodes):
            found[node] = (i - (len(nodes) - 1) / 2, -depth)
    return found


def _middle(positions: Iterable[float]) -> float:
    known = list(positions)
    return sum(known) / len(known) if known else 0.0


def node_label(node: Hashable, data: dict[str, Any]) -> str:
    """Return the operation's name, whichever front end wrote it, without its module."""
    name = str(next((data[k] for k in ("target", "op", "name") if data.get(k)), node))
    return name.rsplit(":", 1)[-1][-24:]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: str) -> None:
    figure.savefig(path, dpi=120)
