"""Two groups of processes on one GPU that stand for machines, gloo or NCCL between them.

    python3 scripts/gpu_env.py --mps python3 -m benchmarks.nodes_gpu OUT.json
    python3 scripts/gpu_env.py --mps python3 -m benchmarks.nodes_gpu OUT.json --between nccl
    python -m benchmarks.nodes_gpu OUT.json --backend shm      # the same, on a CPU

Every process counts itself as on the machine that its number says, so each group has a heap and
kernels of its own. Data between the groups goes through host memory and gloo, or by NCCL through
sockets: NCCL refuses two ranks on one GPU, unless NCCL_HOSTID says that they are on two hosts.
Results are
compared with gloo's, bit by bit: reductions on whole numbers, which no order rounds. Times are of
this arrangement alone: one GPU and one host do the work of all.

OUT.json is written again after each step. If the time is over, every rank writes its threads'
stacks into OUT.json.rankN, and they are printed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
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
_TIMEOUT = 30.0
_GROUPS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
_ONE_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}  # each rank counts as a host


def cases(world: Any) -> dict[str, Callable[[], bool]]:
    """Return by name what runs an op over all machines and compares its bits with gloo's."""
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
    found["matmul_reduce_scatter"] = lambda: _scattered(world)
    found["gradients of all_gather_matmul"] = lambda: _gradients(world)
    return found


def _matmul(world: Any, gathered: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Multiply whole numbers: every order of additions gives the same."""
    torch.manual_seed(world.rank)
    a = torch.randint(-2, 3, (64, 128), device=world.device).to(torch.bfloat16)
    b = torch.randint(-2, 3, (128, 64), device=world.device).to(torch.bfloat16)
    dist.broadcast(shared := b.cpu(), 0)
    got = world.all_gather_matmul(a, shared.to(world.device), shard="m", out_dtype=torch.float32)
    return torch.equal(got.cpu(), gathered(a).float() @ shared.float())


def _whole(world: Any, *shape: int, seed: int) -> torch.Tensor:
    """Whole numbers, the same on every rank that has the same seed."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=made).to(world.device, torch.float32)


def _scattered(world: Any) -> bool:
    a, b = _whole(world, 128, 64, seed=world.rank), _whole(world, 64, 64, seed=100 + world.rank)
    dist.all_reduce(total := (a @ b).cpu())
    return torch.equal(world.matmul_reduce_scatter(a, b).cpu(), total.chunk(world.size)[world.rank])


def _gradients(world: Any) -> bool:
    """Against one rank's that has all of A; each rank's loss has weights of its own."""
    a, b = _whole(world, 128, 64, seed=1), _whole(world, 64, 64, seed=2)
    weights = [_whole(world, 128, 64, seed=3 + rank) for rank in range(world.size)]
    mine = a.chunk(world.size)[world.rank].clone().requires_grad_()
    b.requires_grad_()
    (world.all_gather_matmul(mine, b, shard="m") * weights[world.rank]).sum().backward()
    assert mine.grad is not None
    assert b.grad is not None
    of_a = sum(weights[1:], weights[0]).cpu() @ b.detach().cpu().T
    same_a = torch.equal(mine.grad.cpu(), of_a.chunk(world.size)[world.rank])
    return same_a and torch.equal(b.grad.cpu(), a.cpu().T @ weights[world.rank].cpu())


def _refused(world: Any) -> bool:
    """Gloo moves data on the host: a graph can't hold that, and the error says so."""
    x = torch.ones(64, device=world.device)
    try:
        with world.capture():
            world.all_reduce(x)
    except SundogError as error:
        return "gloo moves data on the host" in str(error)
    return False


def _captured(world: Any) -> bool:
    """Replay a graph that holds NCCL's transfers: they send what the input has then."""
    x = torch.ones(_NUMEL, device=world.device)
    world.all_reduce(x, config=_CHUNKED)  # plans, and opens NCCL's connections
    with world.capture() as graph:
        out = world.all_reduce(x, config=_CHUNKED)
    found = []
    for value in (2.0, 3.0):
        x.fill_(value + world.rank)
        graph.replay()
        world.synchronize()
        found.append(bool((out == sum(value + rank for rank in range(world.size))).all()))
    return all(found)


def timed(world: Any, numel: int) -> dict[str, Any]:
    """Median seconds of an all_reduce over all ranks, hierarchical and by gloo alone."""
    x = torch.ones(numel, dtype=torch.bfloat16, device=world.device)
    host = x.cpu()
    ours = _median(world, partial(world.all_reduce, x))
    gloo = _median(world, partial(dist.all_reduce, host))
    return {"numel": numel, "hierarchical_s": ours, "gloo_on_host_s": gloo}


def _median(world: Any, call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(_SAMPLES if world.device.type == "cuda" else 1):
        world.barrier()
        begin = time.perf_counter()
        call()
        world.synchronize()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


class Report:
    """What rank 0 writes: the file is whole after each step, so that a hang has a place."""

    def __init__(self, arguments: argparse.Namespace, rank: int, size: int) -> None:
        self.is_writer, self._size, self._path = rank == 0, size, Path(arguments.out)
        self._begin = time.monotonic()
        self.content: dict[str, Any] = {
            "kind": "nodes", "machine": machine(), "backend": arguments.backend,
            "nodes": arguments.nodes, "ranks": size // arguments.nodes,
            "between": arguments.between,
            "same": [], "wrong": {}, "times": [], "is_done": False,
        }  # fmt: skip

    def case(self, name: str, run: Callable[[], bool]) -> None:
        """Run a case on every rank, and note on which of them gloo has other bits."""
        self.say(f"{name} ...")
        verdicts = [torch.zeros(1) for _ in range(self._size)]
        dist.all_gather(verdicts, torch.tensor([float(run())]))
        wrong = [rank for rank, same in enumerate(verdicts) if not same]
        if wrong:
            self.content["wrong"][name] = wrong
        else:
            self.content["same"].append(name)
        self.say(f"{name}: {f'DIFFERENT on ranks {wrong}' if wrong else 'same on all ranks'}")

    def time(self, world: Any, numel: int) -> None:
        self.say(f"all_reduce of {numel} ...")
        self.content["times"].append(timed(world, numel))
        self.say(f"{self.content['times'][-1]}")

    def say(self, text: str) -> None:
        if self.is_writer:
            self._path.write_text(json.dumps(self.content, indent=1))
            print(f"{time.monotonic() - self._begin:6.1f} s  {text}", file=sys.stderr, flush=True)


def rank_main(arguments: argparse.Namespace) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(_stacks(arguments, rank), "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        dist.init_process_group(_GROUPS[arguments.between])
        report = Report(arguments, rank, size)
        report.say("opening the world ...")
        node = rank // (size // arguments.nodes)
        where = Locality(f"machine{node}", f"boot{node}", "pids")
        members, module = members_of(None, None, None, _TIMEOUT), load(arguments.backend)
        with open_world(members, module, _HEAP, _TIMEOUT, where) as world:
            assert (world.node, world.num_nodes) == (node, arguments.nodes), world
            _share(world, arguments.nodes)
            measure(world, report)
        report.content["is_done"] = True
        report.say("closed the world")
        dist.destroy_process_group()


def _share(world: Any, nodes: int) -> None:
    """Leave the other groups their SMs.

    Machines have GPUs of their own, and a world counts the ranks of its machine alone: each group
    would fill the GPU. Programs that fill an SM then have no place while others wait for them.
    """
    backend = world.local._backend
    backend.num_sms = max(backend.num_sms // nodes, 1)


def measure(world: Any, report: Report) -> None:
    report.say(f"open: {world!r}, {world.local._backend.num_sms} SMs a rank")
    for name, run in cases(world).items():
        report.case(name, run)
    if world._levels.between.is_ordered:
        report.case("captured and replayed", lambda: _captured(world))
    else:
        report.case("capture is refused", lambda: _refused(world))
    for numel in _TIMED if world.device.type == "cuda" else _TIMED[:1]:
        report.time(world, numel)


def main(arguments: argparse.Namespace) -> int:
    """Start the ranks, and print a table at the end."""
    size = arguments.nodes * arguments.ranks
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    given |= _ONE_HOST
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.nodes_gpu", *sys.argv[1:]],
            env=os.environ | given | _identity(rank),
        )
        for rank in range(size)
    ]
    deadline = time.monotonic() + arguments.seconds
    try:
        codes = [each.wait(max(deadline - time.monotonic(), 0.1)) for each in started]
    except subprocess.TimeoutExpired:
        print(f"not done after {arguments.seconds:g} s", file=sys.stderr)
        _show_stacks(arguments, started)
        return 1
    finally:
        for each in started:
            each.kill()
    if any(codes):
        print(f"exit statuses of the ranks: {codes}", file=sys.stderr)
        return 1
    for rank in range(size):
        os.remove(_stacks(arguments, rank))
    return _print(json.loads(Path(arguments.out).read_text()))


def _identity(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}


def _stacks(arguments: argparse.Namespace, rank: int) -> str:
    return f"{arguments.out}.rank{rank}"


def _show_stacks(arguments: argparse.Namespace, started: list[subprocess.Popen]) -> None:
    """Let the ranks that still run write their stacks, and print the main thread's of each."""
    running = [rank for rank, each in enumerate(started) if each.poll() is None]
    for rank in running:
        started[rank].send_signal(signal.SIGUSR1)
    time.sleep(1)
    for rank in running:
        threads = Path(_stacks(arguments, rank)).read_text().split("\n\n")
        print(f"rank {rank}: {threads[-1]}", file=sys.stderr)


def _print(content: dict[str, Any]) -> int:
    print(
        f"{content['nodes']} machines of {content['ranks']} ranks on {content['backend']}, "
        f"{content['between']} between them"
    )
    print(f"the same as gloo, bit by bit: {', '.join(content['same'])}")
    for row in content["times"]:
        ours, gloo = 1e3 * row["hierarchical_s"], 1e3 * row["gloo_on_host_s"]
        print(f"all_reduce of {row['numel']} bfloat16: {ours:.2f} ms, gloo on the host {gloo:.2f}")
    for name, ranks in content["wrong"].items():
        print(f"WRONG: {name} on ranks {ranks}")
    return 1 if content["wrong"] or not content["is_done"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--backend", default="symm")
    parser.add_argument("--between", choices=list(_GROUPS), default="gloo")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=85)
    return parser.parse_args()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(_arguments())
    else:
        sys.exit(main(_arguments()))
