"""Two groups of processes on one GPU that stand for machines, gloo between them.

    python3 scripts/gpu_env.py --mps python3 -m benchmarks.nodes_gpu OUT.json
    python -m benchmarks.nodes_gpu OUT.json --backend shm      # the same, on a CPU

Every process counts itself as on the machine that its number says, so each group has a heap and
kernels of its own, and data between the groups goes through host memory and gloo. Results are
compared with gloo's, bit by bit: reductions on whole numbers, which no order rounds. Times are of
this arrangement alone: one GPU and one host do the work of all.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sundog.backends import load
from sundog.backends._groups import members_of
from sundog.backends._rendezvous import Locality
from sundog.errors import SundogError
from sundog.nodes.pipeline import NodesConfig
from sundog.nodes.spanning import open_world
from sundog.tools.timing import machine

_CHUNKED = NodesConfig(chunk_bytes=16 << 10)  # several chunks of the small tensors below
_NUMEL = 48_000  # of a tensor that is compared
_TIMED = (1 << 16, 1 << 22)  # elements of bfloat16
_SAMPLES = 7
_HEAP = 128 << 20  # bytes of a rank


def cases(world: Any) -> dict[str, Callable[[], bool]]:
    """By name: run an op over all machines and say whether gloo has the same bits."""
    torch.manual_seed(world.rank)
    whole = torch.randint(-8, 8, (world.size * _NUMEL // 8,), device=world.device)
    tensors = {dtype: whole.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    noise = torch.randn(world.size * _NUMEL // 8, device=world.device)

    def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
        return torch.equal(got.cpu(), want)

    def summed(x: torch.Tensor) -> torch.Tensor:
        total = x.double().cpu()
        dist.all_reduce(total)
        return total.to(x.dtype)

    def part(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(world.size)[world.rank]

    def gathered(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(world.size)]
        dist.all_gather(parts, x.cpu())
        return torch.cat(parts)

    def exchanged(x: torch.Tensor) -> torch.Tensor:
        got = torch.empty_like(x, device="cpu")
        dist.all_to_all_single(got, x.cpu())
        return got

    def sums(x: torch.Tensor, algo: str) -> bool:
        return equal(world.all_reduce(x, algo=algo, config=_CHUNKED), summed(x))

    def parts_of_sums(x: torch.Tensor, algo: str) -> bool:
        return equal(world.reduce_scatter(x, algo=algo, config=_CHUNKED), part(summed(x)))

    found: dict[str, Callable[[], bool]] = {}
    for dtype, x in tensors.items():
        name = str(dtype).removeprefix("torch.")
        for algo in ("hierarchical", "chain"):
            found[f"all_reduce {algo} {name}"] = partial(sums, x, algo)
            found[f"reduce_scatter {algo} {name}"] = partial(parts_of_sums, x, algo)
    found["all_gather"] = lambda: equal(world.all_gather(noise, config=_CHUNKED), gathered(noise))
    found["all_to_all"] = lambda: equal(world.all_to_all(noise, config=_CHUNKED), exchanged(noise))
    found["broadcast"] = lambda: equal(
        world.broadcast(noise, world.size - 1, config=_CHUNKED),
        gathered(noise).chunk(world.size)[-1],
    )
    found["all_gather_matmul m"] = lambda: _matmul(world, gathered)
    return found


def _matmul(world: Any, gathered: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Of whole numbers: every order of additions gives the same."""
    torch.manual_seed(world.rank)
    a = torch.randint(-2, 3, (64, 128), device=world.device).to(torch.bfloat16)
    b = torch.randint(-2, 3, (128, 64), device=world.device).to(torch.bfloat16)
    dist.broadcast(shared := b.cpu(), 0)
    got = world.all_gather_matmul(a, shared.to(world.device), shard="m", out_dtype=torch.float32)
    return torch.equal(got.cpu(), gathered(a).float() @ shared.float())


def _refused(world: Any) -> bool:
    """Gloo moves data on the host: a graph can't hold that, and the error says so."""
    x = torch.ones(64, device=world.device)
    try:
        with world.capture():
            world.all_reduce(x)
    except SundogError as error:
        return "gloo moves data on the host" in str(error)
    return False


def timed(world: Any) -> list[dict[str, Any]]:
    """Median seconds of an all_reduce over all ranks, hierarchical and by gloo alone."""
    rows = []
    for numel in _TIMED if world.device.type == "cuda" else _TIMED[:1]:
        x = torch.ones(numel, dtype=torch.bfloat16, device=world.device)
        host = x.cpu()
        ours = _median(world, partial(world.all_reduce, x))
        gloo = _median(world, partial(dist.all_reduce, host))
        rows.append({"numel": numel, "hierarchical_s": ours, "gloo_on_host_s": gloo})
        if world.rank == 0:
            print(f"timed: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def _median(world: Any, call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_SAMPLES if world.device.type == "cuda" else 1):
        world.barrier()
        begin = time.perf_counter()
        call()
        world.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def _noted(world: Any, name: str, run: Callable[[], bool]) -> bool:
    """Run a case; rank 0 says what it saw and how long it took, so that a hang has a name."""
    begin = time.monotonic()
    same = run()
    if world.rank == 0:
        seen = "same" if same else "DIFFERENT"
        print(f"{name}: {seen}, {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    return same


def rank_main(arguments: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    node = rank // (size // arguments.nodes)
    where = Locality(f"machine{node}", f"boot{node}", "pids")
    module = load(arguments.backend)
    with open_world(members_of(None, None, None, 60.0), module, _HEAP, 60.0, where) as world:
        assert (world.node, world.num_nodes) == (node, arguments.nodes), world
        results = {name: _noted(world, name, run) for name, run in cases(world).items()}
        times = timed(world)
        results["capture is refused"] = _noted(world, "capture", lambda: _refused(world))
        everyone = world.exchange([name for name, same in results.items() if not same])
    if rank == 0:
        content = {
            "kind": "nodes", "machine": machine(), "backend": arguments.backend,
            "nodes": arguments.nodes, "ranks": size // arguments.nodes, "between": "gloo",
            "same": sorted(name for name in results if not any(name in each for each in everyone)),
            "wrong": {r: each for r, each in enumerate(everyone) if each}, "times": times,
        }  # fmt: skip
        Path(arguments.out).write_text(json.dumps(content, indent=1))
    dist.destroy_process_group()


def main(arguments: argparse.Namespace) -> int:
    """Start the ranks, and print a table at the end."""
    size = arguments.nodes * arguments.ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nodes_gpu", *sys.argv[1:]],
            env=os.environ | given | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + arguments.seconds
    try:
        codes = [each.wait(max(deadline - time.monotonic(), 0.1)) for each in started]
    except subprocess.TimeoutExpired:
        print(f"not done after {arguments.seconds:g} s", file=sys.stderr)
        return 1
    finally:
        for each in started:
            each.kill()
    if any(codes):
        print(f"exit statuses of the ranks: {codes}", file=sys.stderr)
        return 1
    return _print(json.loads(Path(arguments.out).read_text()))


def _print(content: dict[str, Any]) -> int:
    print(f"{content['nodes']} machines of {content['ranks']} ranks on {content['backend']}")
    print(f"the same as gloo, bit by bit: {', '.join(content['same'])}")
    for row in content["times"]:
        ours, gloo = 1e3 * row["hierarchical_s"], 1e3 * row["gloo_on_host_s"]
        print(f"all_reduce of {row['numel']} bfloat16: {ours:.2f} ms, gloo on the host {gloo:.2f}")
    for rank, names in content["wrong"].items():
        print(f"WRONG on rank {rank}: {', '.join(names)}")
    return 1 if content["wrong"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--backend", default="symm")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=85)
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(_arguments())
    else:
        sys.exit(main(_arguments()))
