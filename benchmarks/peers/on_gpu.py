"""Kernels of kraken on a GPU and on the simulator, by the same adapters: are the results equal?

First here, where nothing needs a GPU, then there:

    python -m benchmarks.peers.on_gpu CHECKOUT --expect FILE --simulate
    python3 scripts/gpu_env.py --mps python3 -m benchmarks.peers.on_gpu CHECKOUT --expect FILE

The first command writes what the simulator's ranks return; the second runs the kernels and
compares. Two processes share the GPU, so the host collectives are gloo's. The inputs are small
integers: sums are exact in any order, and results must have the same bits.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sundog.compat.cuda import provide

_PROGRAMS = "one_shot,two_shot,one_shot_bias,two_shot_bias,gemm_all_reduce,gemm_scatter"
_WORLD = 2
_BEFORE_KILL = 3.0  # seconds: a rank that hangs says where


def main(
    checkout: str,
    expect: Annotated[str, typer.Option(help="the file of the simulator's results")],
    simulate: Annotated[bool, typer.Option(help="write that file, on this machine")] = False,
    programs: Annotated[str, typer.Option(help="names, separated by commas")] = _PROGRAMS,
    seconds: Annotated[float, typer.Option(help="the limit of each program")] = 40.0,
    json_path: Annotated[str, typer.Option("--json")] = "",
) -> None:
    """Run kraken's kernels on a GPU, all programs at once; print a line as each ends."""
    names = programs.split(",")
    if simulate:
        return _simulate(checkout, expect, names)
    wanted = torch.load(expect)
    rows = list(_compared(checkout, names, wanted, seconds))
    if json_path:
        Path(json_path).write_text(json.dumps(rows, indent=1) + "\n")
    if any(row["verdict"] != "equal bits" for row in rows):
        raise typer.Exit(1)
    return None


def _program(checkout: str, name: str) -> Any:
    os.environ["SUNDOG_PEERS_CHECKOUT"] = checkout
    sys.path.insert(0, checkout)
    provide()  # kraken imports cuda-python; these programs do not call it
    return getattr(importlib.import_module(f"{__package__}.kraken"), name)


def _simulate(checkout: str, expect: str, names: list[str]) -> None:
    import sundog

    found = {}
    for name in names:
        found[name] = sundog.run(_program(checkout, name), _WORLD, "sim", torch=True)
        print(f"{name:20} simulated", flush=True)
    torch.save(found, expect)


def _compared(
    checkout: str, names: list[str], wanted: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Run the programs at the same time, two ranks each: starting Python takes the longest."""
    rows, begin = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        left = {name: _ranks(checkout, name, folder, seconds) for name in names}
        while left:
            late = time.perf_counter() - begin > seconds
            for name in [n for n, ranks in left.items() if late or _ended(ranks)]:
                verdict = _verdict(folder, name, left.pop(name), wanted[name])
                taken = round(time.perf_counter() - begin, 1)
                print(f"{name:20} {verdict} after {taken} s", flush=True)
                rows.append({"kernel": name, "verdict": verdict, "seconds": taken})
            time.sleep(0.1)
    return rows


def _ranks(checkout: str, name: str, folder: str, seconds: float) -> list[subprocess.Popen]:
    """Start a process per rank. It writes its results, and what went wrong, to files."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(_WORLD):
        command = [sys.executable, "-m", "benchmarks.peers.on_gpu", "rank", checkout, name,
                   _file(folder, name, rank), str(seconds)]  # fmt: skip
        own = dict(os.environ, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(_WORLD),
                   MASTER_ADDR="localhost", MASTER_PORT=port,
                   SUNDOG_PEERS_BACKEND="gloo")  # fmt: skip
        with open(f"{_file(folder, name, rank)}.err", "w") as errors:
            ranks.append(subprocess.Popen(command, env=own, stderr=errors))
    return ranks


def _rank(checkout: str, name: str, out: str, seconds: str) -> None:
    faulthandler.dump_traceback_later(float(seconds) - _BEFORE_KILL)
    torch.save(_program(checkout, name)(), out)


def _file(folder: str, name: str, rank: int) -> str:
    return os.path.join(folder, f"{name}.{rank}")


def _ended(ranks: list[subprocess.Popen]) -> bool:
    """Return whether all have ended, or one has failed: its peer would wait for it."""
    codes = [rank.poll() for rank in ranks]
    return None not in codes or any(codes)


def _verdict(folder: str, name: str, ranks: list[subprocess.Popen], wanted: list[Any]) -> str:
    codes = [process.poll() for process in ranks]
    for process in ranks:
        process.kill()
        process.wait()
    for rank, code in sorted(enumerate(codes), key=lambda each: each[1] is None):
        if code != 0:
            said = Path(f"{_file(folder, name, rank)}.err").read_text()
            if code is None:  # faulthandler's report, the innermost call of the main thread first
                why, shown = (
                    "no result in time",
                    said.rpartition("call first):")[2].splitlines()[:6],
                )
            else:
                why, shown = f"exit status {code}", said.splitlines()[-6:]
            return f"rank {rank}: {why}: " + " | ".join(line.strip() for line in shown)
    found = [torch.load(_file(folder, name, rank)) for rank in range(_WORLD)]
    pairs = [
        (a, b)
        for mine, theirs in zip(found, wanted, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return "equal bits" if all(torch.equal(a, b) for a, b in pairs) else "other results"


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        _rank(*sys.argv[2:])
    else:
        typer.run(main)
