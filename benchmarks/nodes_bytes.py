"""Bytes over the link between machines, by the interfaces' counters.

    python -m benchmarks.nodes_bytes --json cpu-nodes-bytes.json                    # as root
    python -m benchmarks.nodes_bytes --machines 3x2 --sizes 48000,384000

Machines are network namespaces (tests/support/namespaces.py), gloo between. The counters see whole
packets: Ethernet, IP and TCP headers, acknowledgements, and what gloo says beside the data. Every
op is called several times between two barriers, and what barriers alone send is taken off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sundog.tools.timing import machine
from tests.support.namespaces import Cluster, sent_bytes, why_not

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
_SIZES = (16, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10)  # bytes of a rank
_HEADERS = 3 * (48 + 66)  # bytes: a message of gloo's takes three packets, at least
_ROUNDS = 5  # the one with the fewest counts: on a busy machine TCP sends some bytes again


class Sent(NamedTuple):
    """Bytes that one machine, or all, sent in a call."""

    ours: float
    flat: float  # by gloo over all ranks


def least_bytes(op: str, nbytes: int, nodes: int, ranks: int) -> float:
    """Return what all machines together must send at least, without any header."""
    others = nodes - 1
    return {
        "all_reduce": 2 * others * nbytes,
        "reduce_scatter": others * nbytes,
        "all_gather": nodes * others * ranks * nbytes,
        "all_to_all": others * ranks * nbytes,
        "broadcast": others * nbytes,
    }[op]


def fewest_messages(op: str, nodes: int) -> int:
    """Return how many messages all machines together send if one rank of each sends them.

    An all_reduce has one from each machine to the first, and one back. Elsewhere every machine has
    its own data for every other one.
    """
    others = nodes - 1
    return {"broadcast": others, "all_reduce": 2 * others}.get(op, nodes * others)


def calls_of(world: Any, nbytes: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return each op's call, and gloo's over all ranks."""
    x = torch.randint(-9, 10, (nbytes,)).to(torch.int8)
    one, same = torch.empty_like(x[: nbytes // world.size]), torch.empty_like(x)
    many = [torch.empty_like(x) for _ in range(world.size)]
    pieces = list(x.chunk(world.size))
    return {
        "all_reduce": (lambda: world.all_reduce(x), lambda: dist.all_reduce(same)),
        "reduce_scatter": (
            lambda: world.reduce_scatter(x),
            lambda: dist.reduce_scatter(one, pieces),
        ),
        "all_gather": (lambda: world.all_gather(x), lambda: dist.all_gather(many, x)),
        "all_to_all": (lambda: world.all_to_all(x), lambda: dist.all_to_all_single(same, x)),
        "broadcast": (lambda: world.broadcast(x, 1), lambda: dist.broadcast(same, 1)),
    }


def count(world: Any, sizes: tuple[int, ...], calls: int) -> dict[tuple[str, int], list[Sent]]:
    """In a rank: what its machine sent in a call of each op and size, in each round."""
    found = {}
    idle = min(_counted(world, _nothing, 0) for _ in range(_ROUNDS))
    for nbytes in sizes:
        for op, both in calls_of(world, nbytes).items():
            for call in both:
                call()  # plans, and opens connections
            ours, flat = (
                [(_counted(world, call, calls) - idle) / calls for _ in range(_ROUNDS)]
                for call in both
            )
            found[op, nbytes] = [Sent(*each) for each in zip(ours, flat, strict=True)]
    return found


def _nothing() -> None:
    """Send nothing: what is left is barriers."""


def _counted(world: Any, call: Callable[[], Any], times: int) -> int:
    world.barrier()
    before = sent_bytes()
    world.barrier()  # all ranks of this machine have read the counter
    for _ in range(times):
        call()
    world.barrier()
    after = sent_bytes()
    world.barrier()
    return after - before


def together(results: dict[int, Any], nodes: int, ranks: int) -> dict[tuple[str, int], Sent]:
    """Add the machines' bytes, round by round; of the rounds take the one with the fewest."""
    machines = [results[node * ranks] for node in range(nodes)]
    for each in machines:
        assert isinstance(each, dict), each
    totals = {}
    for key in machines[0]:
        rounds = list(zip(*(each[key] for each in machines), strict=True))
        ours = min(sum(sent.ours for sent in one) for one in rounds)
        flat = min(sum(sent.flat for sent in one) for one in rounds)
        totals[key] = Sent(ours, flat)
    return totals


def measure(nodes: int, ranks: int, sizes: tuple[int, ...], calls: int) -> list[dict[str, Any]]:
    with Cluster(nodes, ranks, timeout=60) as cluster:
        cluster.start(partial(count, sizes=sizes, calls=calls))
        results = cluster.results(limit=580)
    return [
        {"nodes": nodes, "ranks": ranks, "op": op, "nbytes": nbytes,
         "least": least_bytes(op, nbytes, nodes, ranks), "ours": sent.ours, "flat": sent.flat,
         "headers": _HEADERS * fewest_messages(op, nodes)}
        for (op, nbytes), sent in together(results, nodes, ranks).items()
    ]  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return bytes by the minimum: ours (flat gloo's, the minimum with headers)."""
    shapes = list(dict.fromkeys((row["nodes"], row["ranks"]) for row in rows))
    by_key = {(row["op"], row["nbytes"], row["nodes"], row["ranks"]): row for row in rows}
    heads = " | ".join(f"{nodes} machines of {ranks} ranks" for nodes, ranks in shapes)
    lines = [f"| op | bytes of a rank | {heads} |", "|---|---|" + "---|" * len(shapes)]
    for op, nbytes in dict.fromkeys((row["op"], row["nbytes"]) for row in rows):
        cells = []
        for shape in shapes:
            row = by_key[(op, nbytes, *shape)]
            ours, flat = (_shown(row[name] / row["least"]) for name in ("ours", "flat"))
            cells.append(f"{ours} ({flat}, {_shown(1 + row['headers'] / row['least'])})")
        lines.append(f"| {op} | {nbytes:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(times: float) -> str:
    return f"{times:,.0f}" if times >= 100 else f"{times:.3g}"


def main() -> int:
    given = _arguments()
    reason = why_not()
    if reason:
        print(f"python -m benchmarks.nodes_bytes: {reason}")
        return 2
    sizes = tuple(int(each) for each in given.sizes.split(","))
    rows: list[dict[str, Any]] = []
    for shape in given.machines.split(","):
        nodes, ranks = map(int, shape.split("x"))
        rows += measure(nodes, ranks, sizes, given.calls)
    print(table(rows))
    if given.json:
        content = {"kind": "nodes bytes", "machine": machine(), "calls": given.calls, "rows": rows}
        Path(given.json).write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", default="2x4,4x2", help="machines x ranks of each")
    parser.add_argument("--sizes", default=",".join(map(str, _SIZES)), help="bytes of a rank")
    parser.add_argument("--calls", type=int, default=10, help="between two barriers")
    parser.add_argument("--json", default="", help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
