"""A tuning farm on this machine against its pool of processes, while workers are killed.

    python -m benchmarks.farm [--json results.json]
    python -m benchmarks.farm --rounds 3        # compile throughput alone, pool and farm by turns
    python -m benchmarks.farm --gpus 2          # measuring, on GPUs that a cluster says it has

A Ray cluster of two node processes with a CPU each stands for machines. The clock is made up, and
every row says so. Every few moments a compiler or the measurer is killed, at random. Then: does
every config have one row with a time, is the best config that of the local pool, and how many
configs are compiled per second on equal cores, without kills? Rates are counted from the first row
to the last, without the start of workers, and by turns: other work on this machine slows both, so
the processor time of all their processes is counted too, Ray's included.

With --gpus the cluster says that it has GPUs, as resources of Ray's: none is needed, and the clock
is made up. Every measurement notes its GPU, its process and when it began and ended. Was each alone
on its GPU, and were all GPUs used?
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter, defaultdict
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

_ARGUMENTS: dict[str, Any] = {"world": 2, "search": "exhaustive"}  # 502 configs
_ROWS = (20, 100)  # between two kills; a config has two
_KINDS = ("ray::_Compiler", "ray::_Measurer")
_NOTES = "SUNDOG_FARM_NOTES"  # names the file where a measurement notes its GPU
_SECONDS = 0.02  # of a measurement, at least: others would overlap it


def made_up_clock(
    world: World, variants: Sequence[Variant], samples: int, calls: int
) -> list[Times]:
    """Return times that depend on the config alone."""
    found = []
    for variant in variants:
        digest = hashlib.sha256(variant.name.encode()).digest()
        one = 1e-5 * (1 + int.from_bytes(digest[:4], "big") / 2**32)
        found.append(Times(variant.name, [[one] * world.size for _ in range(samples)]))
    return found


def noting_clock(
    world: World, variants: Sequence[Variant], samples: int, calls: int
) -> list[Times]:
    """Return made-up times, and note on which of Ray's GPUs this process is, and when."""
    begin = time.time()
    if world.rank == 0:
        time.sleep(_SECONDS)
        here = ray.get_runtime_context()  # every node counts its GPUs from 0
        gpu = f"{here.get_node_id()[:6]}:{','.join(map(str, ray.get_gpu_ids()))}"
        line = json.dumps([gpu, os.getpid(), begin, time.time()]) + "\n"
        with open(os.environ[_NOTES], "a") as file:  # a short line is written whole
            file.write(line)
    return made_up_clock(world, variants, samples, calls)


def _take_caches(folder: Path, name: str) -> None:
    """Compile into empty caches. A farm's workers have what is set when their cluster starts."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / f"triton-{name}")
    os.environ["SUNDOG_CACHE"] = str(folder / f"cache-{name}")


@contextmanager
def _cluster(nodes: int, folder: Path, name: str, gpus: int = 0) -> Iterator[str]:
    """Start node processes with a CPU each; `gpus`: what they say they have, together.

    A node with GPUs has a CPU more for each, which its measurer takes.
    """
    _take_caches(folder, name)
    room = 80_000_000  # bytes of a node's object store, the least that Ray takes
    has = [gpus // nodes + (n < gpus % nodes) for n in range(nodes)]
    head = {"include_dashboard": False, "object_store_memory": room}
    made = Cluster(
        initialize_head=True, head_node_args={**head, "num_cpus": 1 + has[0], "num_gpus": has[0]}
    )
    for count in has[1:]:
        made.add_node(num_cpus=1 + count, num_gpus=count, object_store_memory=room)
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


def _processor_s() -> tuple[float, float]:
    """Processor time of this process and all below it; then that of Ray's servers among them.

    Those count as much in an idle second as in a busy one.
    """
    parents, times, servers = {}, {}, set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            pid, command = int(path.parent.name), (path.parent / "cmdline").read_bytes()
            parents[pid], times[pid] = int(fields[1]), sum(map(int, fields[11:15]))
            servers |= {pid} if b"/ray/" in command else set()
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(times[p] for p in below) / ticks, sum(times[p] for p in below & servers) / ticks


class _Meter:
    """Reads the processor time at the first config, and twice a second after that."""

    def __init__(self) -> None:
        self.configs = 0
        self._readings: list[tuple[int, float, float]] = []
        self._read_at = 0.0

    def __call__(self, what: str, done: int, total: int, text: str) -> None:
        self.configs += 1
        if time.monotonic() - self._read_at > 0.5:
            self._readings.append((self.configs, *_processor_s()))
            self._read_at = time.monotonic()

    def per_config_s(self) -> tuple[float, float]:
        (first, all_1, ray_1), (last, all_2, ray_2) = self._readings[0], self._readings[-1]
        configs = max(last - first, 1)
        return (all_2 - all_1) / configs, (ray_2 - ray_1) / configs


def _tuned(folder: Path, name: str, budget: int = 180, **how: Any) -> dict[str, Any]:
    """Tune with a compiler cache of its own; say what was found, and how long it took."""
    _take_caches(folder, name)
    log = str(folder / name)
    begin, meter = time.monotonic(), _Meter()
    done = tune(
        "all_gather", "numel=512", log=log, budget=budget, progress=meter, **_ARGUMENTS, **how
    )
    seconds = time.monotonic() - begin
    with open(f"{log}.csv") as file:
        rows = list(csv.DictReader(file))
    ended = [row for row in rows if row["status"] in ("ok", "compiled") and row["repeat"] == "0"]
    counts = Counter((row["run_id"], row["config"]) for row in ended)
    spans = defaultdict(list)
    for row in ended:
        spans[row["session"]].append(float(row["timestamp_s"]))
    busy = sum(max(times) - min(times) for times in spans.values())
    return {
        "configs": sum(each.tried for each in done),
        "failed": sum(each.failed for each in done),
        "rows": len(ended),
        "rows_more_than_once": sum(count > 1 for count in counts.values()),
        "timers": sorted({row["timer"] for row in ended}),
        "best": {each.op: str(each.config) for each in done},
        "seconds": round(seconds, 1),
        "configs_per_s": round((len(ended) - len(spans)) / busy, 3),
        "processor_s_per_config": [round(seconds, 4) for seconds in meter.per_config_s()],
    }


def _throughput(folder: Path, rounds: int, budget: int) -> dict[str, Any]:
    """Compile by the pool and by a farm on as many cores, by turns."""
    rates: dict[str, list[float]] = {"pool": [], "farm": []}
    costs: dict[str, list[float]] = {"pool": [], "farm": []}
    servers: dict[str, list[float]] = {"pool": [], "farm": []}
    for number in range(rounds):
        pool = _tuned(folder, f"pool{number}", budget, targets=["sm_90"])
        with _cluster(os.cpu_count() or 1, folder, f"farm{number}") as address:
            farm = _tuned(folder, f"farm{number}", budget, farm=address, targets=["sm_90"])
        for name, found in (("pool", pool), ("farm", farm)):
            rates[name].append(found["configs_per_s"])
            costs[name].append(found["processor_s_per_config"][0])
            servers[name].append(found["processor_s_per_config"][1])
        print(f"round {number}: {pool['rows']} configs, {rates}, {costs}, {servers}", flush=True)
    return {
        "load": os.getloadavg()[1],
        "configs per second": rates,
        "farm over pool": round(sum(rates["farm"]) / sum(rates["pool"]), 3),
        "processor seconds per config": costs,
        "of which Ray's servers": servers["farm"],
        "pool over farm, processor": round(sum(costs["pool"]) / sum(costs["farm"]), 3),
    }


def on_gpus(folder: Path, gpus: int, budget: int = 180) -> dict[str, Any]:
    """Measure by as many measurers as a cluster of two nodes says it has GPUs."""
    notes = folder / "notes"
    os.environ[_NOTES] = str(notes)  # Ray's workers have what is set when their cluster starts
    measured: dict[str, Any] = {"place": TunePlace("sim"), "timer": noting_clock}
    with _cluster(2, folder, "gpus", gpus) as address:
        farm = _tuned(folder, "gpus", budget, farm=address, **measured)
    found = [json.loads(line) for line in notes.read_text().splitlines()]
    return {"GPUs in Ray's resources": gpus, "farm": farm, **who_measured(found)}


def who_measured(notes: list[tuple[str, int, float, float]]) -> dict[str, Any]:
    """Count measurements by GPU, the processes, and how often a GPU had two at a moment."""
    by_gpu = defaultdict(list)
    for gpu, _, begin, end in notes:
        by_gpu[gpu].append((begin, end))
    shared = sum(
        later[0] < earlier[1]
        for times in by_gpu.values()
        for earlier, later in itertools.pairwise(sorted(times))
    )
    ends = sorted((begin, end, gpu) for gpu, _, begin, end in notes)
    beside = sum(b[0] < a[1] and a[2] != b[2] for a, b in itertools.pairwise(ends))
    return {
        "measurements by GPU": {gpu: len(times) for gpu, times in sorted(by_gpu.items())},
        "processes": len({pid for _, pid, *_ in notes}),
        "beside another one on its GPU": shared,
        "beside one on another GPU": beside,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", default="")
    parser.add_argument("--rounds", type=int, default=0, help="of throughput, and nothing else")
    parser.add_argument("--budget", type=int, default=20, help="configs per algorithm of a round")
    parser.add_argument(
        "--gpus", type=int, default=0, help="measure on this number, and nothing else"
    )
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="sundog-farm-"))
    found: dict[str, Any] = {"cores": os.cpu_count(), "ray": ray.__version__}
    if given.gpus:
        found |= on_gpus(folder, given.gpus)
    elif given.rounds:
        found |= _throughput(folder, given.rounds, given.budget)
    else:
        found |= _with_kills(folder) | _throughput(folder, 1, 180)
    text = json.dumps(found, indent=1)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n")


def _with_kills(folder: Path) -> dict[str, Any]:
    measured: dict[str, Any] = {"place": TunePlace("sim"), "timer": made_up_clock}
    local = _tuned(folder, "local", **measured)
    with _cluster(2, folder, "farm") as address:
        killer = _Killer(folder / "farm.csv", seed=28)
        killer.start()
        farm = _tuned(folder, "farm", farm=address, **measured)
        killer.stopped.set()
    return {
        "local pool": local,
        "farm, workers killed": farm,
        "killed": dict(killer.killed),
        "same best configs": local["best"] == farm["best"],
    }


if __name__ == "__main__":
    main()
