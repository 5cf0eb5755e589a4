"""Kernels of kraken on a GPU and on the simulator, by the same adapters: are the results equal?

    python3 scripts/gpu_env.py --mps python3 -m benchmarks.peers.on_gpu CHECKOUT --json RESULTS

Two processes share the GPU, so the host collectives are gloo's. The inputs are small integers: sums
are exact in any order, and results must have the same bits.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import sundog
from sundog.compat.cuda import provide

from .one import cases

_PROGRAMS = ("one_shot", "two_shot", "one_shot_bias", "two_shot_bias", "gemm_all_reduce",
             "gemm_scatter")  # fmt: skip
_SECONDS, _WORLD = 45, 2


def main(
    checkout: str, json_path: Annotated[str, typer.Option("--json")] = "", rank: int = -1,
    program: str = "", out: str = "",
) -> None:  # fmt: skip
    """Run each program on both, and compare. With `--rank` this process is one rank."""
    os.environ["SUNDOG_PEERS_CHECKOUT"] = checkout
    sys.path.insert(0, checkout)
    provide()  # kraken imports cuda-python; these programs do not call it
    if program:
        function = getattr(cases("kraken"), program)
        simulated = rank < 0
        found: Any = sundog.run(function, _WORLD, "sim", torch=True) if simulated else function()
        torch.save(found, out)
        return
    rows = [_compared(checkout, name) for name in _PROGRAMS]
    if json_path:
        Path(json_path).write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(f"{row['kernel']:20} {row['verdict']}")
    if any(row["verdict"] != "equal bits" for row in rows):
        raise typer.Exit(1)


def _compared(checkout: str, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        on_gpu = _run(checkout, name, folder, range(_WORLD))
        (simulated,) = _run(checkout, name, folder, [-1])
        if isinstance(simulated, str) or any(isinstance(each, str) for each in on_gpu):
            shown = [each for each in (*on_gpu, simulated) if isinstance(each, str)]
            return {"kernel": name, "verdict": "failed: " + shown[0]}
    same = all(
        torch.equal(a, b)
        for mine, theirs in zip(on_gpu, simulated, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )
    return {"kernel": name, "verdict": "equal bits" if same else "other results"}


def _run(checkout: str, name: str, folder: str, ranks: Any) -> list[Any]:
    """Start a process per rank (-1: the simulator), and return what each saved, or why not."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in ranks:
        out = os.path.join(folder, f"{rank}.pt")
        command = [sys.executable, "-m", "benchmarks.peers.on_gpu", checkout, "--rank", str(rank),
                   "--program", name, "--out", out]  # fmt: skip
        own = dict(os.environ, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(_WORLD),
                   MASTER_ADDR="localhost", MASTER_PORT=port,
                   SUNDOG_PEERS_BACKEND="gloo")  # fmt: skip
        if rank < 0:
            own["CUDA_VISIBLE_DEVICES"] = ""
        started.append((out, subprocess.Popen(command, env=own, stderr=subprocess.PIPE, text=True)))
    return [_saved(out, process) for out, process in started]


def _saved(out: str, process: subprocess.Popen) -> Any:
    try:
        errors = process.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"no result within {_SECONDS} s"
    if process.returncode:
        return (errors.strip().splitlines() or ["no message"])[-1]
    return torch.load(out)


if __name__ == "__main__":
    typer.run(main)
