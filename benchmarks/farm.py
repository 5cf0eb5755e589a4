"""A tuning farm on this machine against its pool of processes, while workers are killed.

    python -m benchmarks.farm [--json results.json]

A Ray cluster of two node processes with a CPU each stands for machines. The clock is made up, and
every row says so. Every few moments a compiler or the measurer is killed, at random. Then: does
every config have one row with a time, is the best config that of the local pool, and how many
configs are compiled per second on equal cores, without kills?
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from sundog.tools.timing import Times, Variant
from sundog.tools.tune.measure import TunePlace
from sundog.tools.tune.tune import tune
from sundog.world.world import World

_ARGUMENTS: dict[str, Any] = {"world": 2, "search": "exhaustive", "budget": 180}  # 502 configs
_ROWS = (20, 100)  # between two kills; a config has two
_KINDS = ("ray::_Compiler", "ray::_Measurer")


def made_up_clock(
    world: World, variants: Sequence[Variant], samples: int, calls: int
) -> list[Times]:
    """Times that depend on the config alone."""
    found = []
    for variant in variants:
        digest = hashlib.sha256(variant.name.encode()).digest()
        one = 1e-5 * (1 + int.from_bytes(digest[:4], "big") / 2**32)
        found.append(Times(variant.name, [[one] * world.size for _ in range(samples)]))
    return found


@contextmanager
def _cluster(nodes: int) -> Iterator[str]:
    room = 80_000_000  # bytes of a node's object store, the least that Ray takes
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": room}
    made = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(nodes - 1):
        made.add_node(num_cpus=1, object_store_memory=room)
    try:
        yield str(made.address)
    finally:
        made.shutdown()


class _Killer(threading.Thread):
    """Kills one of the farm's workers whenever the log has grown by some rows."""

    def __init__(self, log: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self.killed: Counter[str] = Counter()
        self.stopped = threading.Event()
        self._log, self._random = log, random.Random(seed)

    def run(self) -> None:
        due = self._random.randint(*_ROWS)
        while not self.stopped.wait(0.2):
            workers = list(_workers())
            if self._rows() < due or not workers:
                continue
            pid, kind = self._random.choice(workers)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed[kind] += 1
            due = self._rows() + self._random.randint(*_ROWS)

    def _rows(self) -> int:
        return self._log.read_bytes().count(b"\n") if self._log.exists() else 0


def _workers() -> Iterator[tuple[int, str]]:
    """Actors of the farm, by their process titles."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            title = path.read_bytes().split(b"\0")[0].decode(errors="replace")
            for kind in _KINDS:
                if title.startswith(kind):
                    yield int(path.parent.name), kind


def _tuned(folder: Path, name: str, **how: Any) -> dict[str, Any]:
    """Tune with a compiler cache of its own; say what was found, and how long it took."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / f"triton-{name}")
    os.environ["SUNDOG_CACHE"] = str(folder / f"cache-{name}")
    log = str(folder / name)
    begin = time.monotonic()
    done = tune("all_gather", "numel=512", log=log, **_ARGUMENTS, **how)
    seconds = time.monotonic() - begin
    with open(f"{log}.csv") as file:
        rows = list(csv.DictReader(file))
    ended = [row for row in rows if row["status"] in ("ok", "compiled") and row["repeat"] == "0"]
    counts = Counter((row["run_id"], row["config"]) for row in ended)
    return {
        "configs": sum(each.tried for each in done),
        "failed": sum(each.failed for each in done),
        "rows": len(ended),
        "rows_more_than_once": sum(count > 1 for count in counts.values()),
        "timers": sorted({row["timer"] for row in ended}),
        "best": {each.op: str(each.config) for each in done},
        "seconds": round(seconds, 1),
    }


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="sundog-farm-"))
    measured = {"place": TunePlace("sim"), "timer": made_up_clock}
    compiled = {"targets": ["sm_90"]}
    found: dict[str, Any] = {"cores": os.cpu_count(), "ray": ray.__version__}
    found["local pool"] = _tuned(folder, "local", **measured)
    found["local pool, compiling only"] = _tuned(folder, "local-compile", **compiled)
    with _cluster(2) as address:
        found["farm, compiling only"] = _tuned(folder, "farm-compile", farm=address, **compiled)
    with _cluster(2) as address:
        killer = _Killer(folder / "farm.csv", seed=28)
        killer.start()
        found["farm, workers killed"] = _tuned(folder, "farm", farm=address, **measured)
        killer.stopped.set()
        found["killed"] = dict(killer.killed)
    local, farm = found["local pool"], found["farm, workers killed"]
    found["same best configs"] = local["best"] == farm["best"]
    pool = found["local pool, compiling only"]
    found["throughput of the farm over the pool's"] = round(
        pool["seconds"] / found["farm, compiling only"]["seconds"], 3
    )
    text = json.dumps(found, indent=1)
    print(text)
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(text + "\n")


if __name__ == "__main__":
    main()
