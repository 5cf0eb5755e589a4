"""What ranks see when a rank or a machine is lost: its name, on all others, within the timeout."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from benchmarks.nodes_faults import blamed
from sundog.errors import PeerLost
from tests.support.namespaces import Cluster

pytestmark = pytest.mark.namespaces

_TIMEOUT = 16.0


def _work_until_lost(world: Any) -> tuple[str, float]:
    """Call one op after the other; return what was raised, and how long the last call took."""
    x = torch.ones(64) * world.rank
    calls = [
        lambda: world.all_reduce(x),
        lambda: world.all_gather(x),
        lambda: world.barrier(),
        lambda: world.broadcast(x),
        lambda: world.all_reduce(x, algo="chain"),
    ]
    for call in calls:
        call()
    Cluster.tell()
    while True:
        for call in calls:
            begin = time.monotonic()
            try:
                call()
            except PeerLost as error:
                return str(error), time.monotonic() - begin


@pytest.mark.parametrize("how", ["rank", "machine", "cut off"])
def test_a_lost_rank_or_machine_is_named_on_all_others(how: str) -> None:
    lots = random.Random(f"sundog {how}")
    with Cluster(3, 2, timeout=_TIMEOUT) as cluster:
        cluster.start(_work_until_lost)
        cluster.wait_until_told()
        time.sleep(lots.random() * 0.3)  # anywhere in the round of calls
        victim = lots.randrange(6)
        node = victim // 2
        if how == "rank":
            cluster.kill_rank(victim)
            lost = {victim}
        else:
            (cluster.kill_machine if how == "machine" else cluster.cut_off)(node)
            lost = {2 * node, 2 * node + 1}
        others = set(range(6)) - lost
        results = cluster.results(others, limit=4 * _TIMEOUT)
    for rank, result in results.items():
        assert isinstance(result, tuple), (rank, result)
        text, seconds = result
        assert seconds < _TIMEOUT, (rank, seconds)
        assert f"machine {node} (machine{node})" in text, text
        assert blamed(text) == lost, (rank, text)  # and nobody who left because of that
        # A machine's address goes with it: sooner or later nobody is left who refuses a call.
        words = {"rank": ("died",), "cut off": ("does not answer",)}
        assert any(w in text for w in words.get(how, ("died", "does not answer"))), text
