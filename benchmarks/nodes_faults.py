"""Ranks and machines killed at random: are they named on all others, within the timeout?

    python -m benchmarks.nodes_faults --cases 24 --json cpu-faults-nodes.json     # as root

Machines are network namespaces (tests/support/namespaces.py). Ranks call one op after the other.
At a random moment a rank is killed, a machine is killed or cut off from the network, or all
connections are reset. A case is good if every rank that is left raises PeerLost that names who was
lost, and nobody else, before the timeout has passed since the fault. After a reset nobody is lost:
then the sentences must blame no rank.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sundog.errors import PeerLost
from sundog.tools.timing import machine
from tests.support.namespaces import Cluster, why_not

FAULTS = ("rank", "machine", "cut off", "reset")
_SHAPES = ((2, 2), (3, 2), (2, 4), (4, 1))  # machines, ranks of each
_TIMEOUT = 16.0


class Case(NamedTuple):
    fault: str
    nodes: int
    ranks: int
    victim: int  # a rank; of its machine if that is lost
    wait_s: float  # after all ranks have made every call once

    @property
    def lost(self) -> set[int]:
        node = self.victim // self.ranks
        whole = set(range(node * self.ranks, (node + 1) * self.ranks))
        return {"rank": {self.victim}, "reset": set()}.get(self.fault, whole)


def made(number: int, seed: int) -> Case:
    chosen = random.Random(f"{seed} {number}")
    fault = FAULTS[number % len(FAULTS)]
    nodes, ranks = chosen.choice(_SHAPES)
    return Case(fault, nodes, ranks, chosen.randrange(nodes * ranks), round(chosen.random(), 3))


def work_until_lost(world: Any) -> tuple[str, float]:
    """Call one op after the other; return what was raised, and when."""
    x = torch.ones(64 * world.size) * world.rank
    calls = [
        lambda: world.all_reduce(x), lambda: world.all_gather(x), lambda: world.barrier(),
        lambda: world.broadcast(x), lambda: world.all_reduce(x, algo="chain"),
        lambda: world.reduce_scatter(x), lambda: world.all_to_all(x), lambda: world.exchange(1),
    ]  # fmt: skip
    for call in calls:
        call()
    Cluster.tell()
    try:
        while True:
            for call in calls:
                call()
    except PeerLost as error:
        return str(error), time.monotonic()


def run(case: Case) -> dict[str, Any]:
    relay = case.fault == "reset"
    with Cluster(case.nodes, case.ranks, relay=relay, timeout=_TIMEOUT) as cluster:
        cluster.start(work_until_lost)
        if relay:
            cluster.relay.start(delay=0)
        cluster.wait_until_told(limit=180)
        time.sleep(case.wait_s)
        struck = time.monotonic()
        _strike(cluster, case)
        others = set(range(case.nodes * case.ranks)) - case.lost
        try:
            results = cluster.results(others, limit=4 * _TIMEOUT)
        except AssertionError as error:
            return {**case._asdict(), "named": False, "in_time": False, "why": str(error)}
    return {**case._asdict(), **judged(case, results, struck)}


def _strike(cluster: Cluster, case: Case) -> None:
    node = case.victim // case.ranks
    if case.fault == "rank":
        cluster.kill_rank(case.victim)
    elif case.fault == "machine":
        cluster.kill_machine(node)
    elif case.fault == "cut off":
        cluster.cut_off(node)
    else:
        cluster.relay.start(delay=0, resets=True)


def judged(case: Case, results: dict[int, Any], struck: float) -> dict[str, Any]:
    """Judge every rank's sentence: does it name the lost ones, nobody else, and how soon?"""
    texts = {rank: each[0] for rank, each in results.items() if isinstance(each, tuple)}
    slowest = max(
        (each[1] - struck for each in results.values() if isinstance(each, tuple)), default=0.0
    )
    wrong = {rank: str(results[rank]) for rank in results.keys() - texts.keys()}
    wrong |= {rank: text for rank, text in texts.items() if blamed(text) != case.lost}
    return {
        "named": not wrong,
        "in_time": slowest <= _TIMEOUT,
        "seconds": round(slowest, 2),
        "sentence": next(iter(texts.values()), ""),
        "why": next(iter(wrong.values()), ""),
    }


def blamed(text: str) -> set[int]:
    """Return the ranks that a sentence says are lost."""
    clauses = text.partition("; rank")[0].split(" and ")
    found = [re.fullmatch(r"rank ([\d, ]+) of machine .* died", each) for each in clauses]
    found += [re.fullmatch(r".* does not answer: it has rank ([\d, ]+)", each) for each in clauses]
    found += [re.fullmatch(r"rank ([\d, ]+) of machine .* does not answer", e) for e in clauses]
    return {int(rank) for each in found if each for rank in each[1].split(",")}


def table(cases: list[dict[str, Any]]) -> str:
    by_fault = defaultdict(list)
    for case in cases:
        by_fault[case["fault"]].append(case)
    lines = [
        "| fault | injected | named by all others | in time | slowest, s |",
        "|---|---|---|---|---|",
    ]
    for fault, group in by_fault.items():
        counts = [sum(case[key] for case in group) for key in ("named", "in_time")]
        slowest = max(case.get("seconds", 0.0) for case in group)
        lines.append(f"| {fault} | {len(group)} | {counts[0]} | {counts[1]} | {slowest:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=28)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    reason = why_not()
    if reason:
        raise SystemExit(f"no machines can be made here: {reason}")
    cases = []
    for number in range(arguments.cases):
        cases.append(run(made(number, arguments.seed)))
        print(f"{number}: {cases[-1]}", flush=True)
    print(table(cases))
    if arguments.json:
        content = {"kind": "nodes faults", "machine": machine(), "timeout_s": _TIMEOUT}
        Path(arguments.json).write_text(json.dumps(content | {"cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
