"""What hierarchical ops should take on 2 to 128 machines of 8 GPUs, by the model: a table.

    python -m benchmarks.nodes

Nothing here was measured: the figures of the machine are those of sundog/hardware, and the network
is assumed.
"""

from __future__ import annotations

from sundog.hardware.description import Hardware, read
from sundog.nodes.pipeline import NodesConfig, SpanProblem, SpanTime, span_time

_NODES = (2, 4, 8, 16, 32, 64, 128)
_CHUNKS = tuple(1 << power for power in range(17, 25))
_ROWS = (
    ("all_reduce", 1 << 20),
    ("all_reduce", 64 << 20),
    ("all_reduce", 1 << 30),
    ("reduce_scatter", 1 << 30),
    ("all_gather", 8 << 20),
    ("all_to_all", 64 << 20),
    ("broadcast", 64 << 20),
)


def best(problem: SpanProblem, hardware: Hardware) -> SpanTime:
    """Return the fastest config, as `auto` chooses it."""
    shots = (False, True) if problem.op == "all_reduce" else (False,)
    tried = [NodesConfig(chunk, shot) for shot in shots for chunk in _CHUNKS]
    return min((span_time(problem, each, hardware) for each in tried), key=lambda t: t.seconds)


def main() -> None:
    hardware = read("h200x8-2nodes")
    print("| op | bytes of a rank | " + " | ".join(map(str, _NODES)) + " |")
    print("|---|---|" + "---|" * len(_NODES))
    for op, nbytes in _ROWS:
        times = [best(SpanProblem(op, nbytes, nodes, 8), hardware) for nodes in _NODES]
        cells = [f"{1e3 * each.seconds:.3g} {each.bound[0]}" for each in times]
        print(f"| {op} | {nbytes >> 20} MB | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
