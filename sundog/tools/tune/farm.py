"""Tuning on a Ray cluster: the pool's interface, with an actor of Ray's for every worker.

    sundog tune all_gather --farm ray://head:10001       # or host:port of the cluster; or "local"

Compilers take a CPU each, anywhere. Each world that measures has a GPU to itself. A run uses all
GPUs of one kind, then those of the next, which are another target. Workers send their results,
graphs too, and only this process writes the dataset. If a worker or its machine dies, Ray starts
another one and gives it the config again, so only time is lost. A compiler already has the next
config while it compiles one, so that it does not wait for this process.

Workers must have this process's versions of Python, torch, Triton and sundog, since another
compiler makes other kernels.
"""

from __future__ import annotations

import importlib
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from typing import Any

import torch

from ...dataset.graph_file import EncodedGraph, encode
from ...dataset.hardware import versions
from ...errors import SundogError
from ...ops.load import find
from .._pool import LONGEST_WAIT, Failure, Worker
from .compile_configs import (
    CompiledConfig,
    Compilers,
    compile_config,
    graph_writer,
    warm_cache_keys,
)
from .measure import Timer, TunePlace, serve_world
from .space import Job

_TRIES = 3  # for a config whose worker dies each time
_CALLS = 2  # of a compiler: one runs, one waits there
_KNOCK_S = 5.0  # in which the cluster's port must answer
_START_S = 120.0  # in which a worker must answer for the first time
_MOST_USED = 0.1  # of a GPU's memory, by others
_TYPE = "accelerator_type:"  # what Ray's resources of that name begin with
_COMPARED = ("python", "torch", "triton", "sundog")

JobName = tuple[str, Any, int]  # op, problem, size, which mean the same on another machine
Sent = tuple[EncodedGraph, bytes]  # a graph without its rows, and the compressed rows


class Farm:
    """A connection to a cluster."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._ray = _connected(address)
        self._mine = versions()

    @property
    def num_cpus(self) -> int:
        return int(self._ray.cluster_resources().get("CPU", 0))

    def compilers(
        self, jobs: dict[int, tuple[Job, str]], target: str, log: str, seconds: float, reserved: int
    ) -> Compilers:
        """Start one for every CPU of the cluster except the reserved ones."""
        named = {n: (_name(job), run_id) for n, (job, run_id) in jobs.items()}
        write, written = graph_writer(log), set[str]()

        def receive(reply: tuple[CompiledConfig, list[Sent]]) -> CompiledConfig:
            compiled, graphs = reply
            for graph, rows in graphs:
                if graph.ir_id not in written:  # two compilers may make one kernel
                    write(graph._replace(rows=zlib.decompress(rows).decode().split("\n")))
                    written.add(graph.ir_id)
            return compiled

        def make() -> Any:
            return self._actor(_Compiler, num_cpus=1).remote(named, target, self._mine)

        count = max(self.num_cpus - reserved, 1)
        actors = [FarmActor(self._ray, make, self._check) for _ in range(count)]
        for actor in actors:  # side by side, since each imports torch
            actor.start()
        workers: list[Worker] = [
            FarmWorker(actor, seconds, receive) for _ in range(_CALLS) for actor in actors
        ]
        return Compilers(workers, self.address, count)

    def measurers(
        self, jobs: Sequence[Job], place: TunePlace, timer: Timer, seconds: float, on_gpu: bool
    ) -> Iterator[list[Worker]]:
        """Start one for each GPU that the cluster says it has, kind by kind.

        An actor that dies comes again on a GPU of the same kind. With a made-up clock and no GPU
        there is one measurer.
        """
        named = [_name(job) for job in jobs]
        kinds = gpu_kinds(self._ray.nodes())
        num_gpus = int(on_gpu or bool(kinds))
        for kind, count in (kinds or {"": 1}).items():  # without a GPU, _open raises
            resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": num_gpus}
            resources |= {"accelerator_type": kind} if kind else {}
            made = self._actor(_Measurer, **resources)

            def make(made: Any = made) -> Any:
                return made.remote(named, place, timer, self._mine)

            actors = [FarmActor(self._ray, make, self._check) for _ in range(count)]
            for actor in actors:
                actor.start()
            yield [FarmWorker(actor, seconds) for actor in actors]

    def close(self) -> None:
        self._ray.shutdown()

    def _actor(self, kind: type, **resources: Any) -> Any:
        options = {"max_restarts": -1, "max_task_retries": _TRIES - 1, **resources}
        return self._ray.remote(**options)(kind)

    def _check(self, about: dict[str, Any]) -> None:
        reason = different(self._mine, about) or gpu_in_use(about)
        if reason:
            raise SundogError(reason)


def _connected(address: str) -> Any:
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise SundogError(
            "a farm needs Ray, which is not installed: pip install 'ray[client]'. Without a farm "
            "the processes of this machine tune."
        ) from None
    where = None if address == "local" else address
    try:
        _knock(address)
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, ImportError, OSError) as error:
        raise SundogError(f"farm {address}: {_why_not_connected(str(error))}") from None
    return ray


def _knock(address: str) -> None:
    """Raise OSError if there is no listener, which Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), _KNOCK_S).close()


def _why_not_connected(error: str) -> str:
    text = " ".join(error.split())
    if "ersion" in text and "mismatch" in text:  # of Ray or Python, on several lines
        return f"its Ray cluster has other versions than this process. {text}"
    return (
        f"no Ray cluster answers {socket.gethostname()} there ({text[:200]}). Start one with `ray "
        "start --head`, or name the farm local for one on this machine."
    )


def gpu_kinds(nodes: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the GPUs of each kind, by the accelerator types that Ray found on its nodes."""
    kinds: dict[str, int] = {}
    for node in nodes:
        has = node["Resources"] if node["Alive"] else {}
        if gpus := int(has.get("GPU", 0)):
            types = (n.removeprefix(_TYPE) for n in has if n.startswith(_TYPE))
            kind = next(types, "")
            kinds[kind] = kinds.get(kind, 0) + gpus
    return kinds


def different(mine: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the versions in which a worker differs from this process; empty if none."""
    theirs = about["versions"]
    unlike = [name for name in _COMPARED if mine.get(name) != theirs.get(name)]
    if not unlike:
        return ""
    shown = "; ".join(f"{name} {mine.get(name)} here, {theirs.get(name)} there" for name in unlike)
    return (
        f"the worker on {about['host']} has other versions than this process: {shown}. Kernels "
        "would differ: install the same ones on both sides."
    )


def gpu_in_use(about: dict[str, Any]) -> str:
    """Return a sentence if others use a worker's GPU; empty if not, or it has none."""
    used, total = about["gpu_used"], about["gpu_total"]
    if used <= _MOST_USED * total:
        return ""
    return (
        f"the GPU of the worker on {about['host']} is busy: {used:,} of {total:,} bytes are in use "
        "by others, whose kernels would be in the measured times. Free it, or use another."
    )


class FarmActor:
    """A process of the cluster. It answers its calls one after the other.

    If it dies, all its calls go to the next one, but one at a time, so that a config that ends its
    process costs no other config.
    """

    def __init__(
        self, ray: Any, make: Callable[[], Any], check: Callable[[dict[str, Any]], None]
    ) -> None:
        self.ray = ray
        self.calls: list[FarmWorker] = []  # whose answers are awaited; the first one runs
        self.depth = _CALLS  # how many of them the actor has
        self._make, self._check = make, check
        self._actor: Any = None
        self._about: Any = None  # awaited from an actor that has not answered yet

    def start(self) -> None:
        """Start its process without waiting."""
        self._actor = self._make()
        self._about = self._actor.about.remote()

    def send(self) -> None:
        for call in self.calls[: self.depth]:
            if call.reply is None:
                call.reply = self._run(call.task)

    def send_again(self, depth: int) -> None:
        """Send it again after a death, since what the actor had is lost."""
        self.depth = depth
        for call in self.calls:
            call.reply = None
        self.send()

    def _run(self, task: Any) -> Any:
        if self._actor is None:
            self.start()
        if self._about is not None:
            self._open()
        return self._actor.run.remote(task)

    def _open(self) -> None:
        try:
            about = self.ray.get(self._about, timeout=_START_S)
        except self.ray.exceptions.GetTimeoutError:
            room = f"{self.ray.cluster_resources()}, and {self.ray.available_resources()} of that"
            self.close()  # which frees the worker's own share
            raise SundogError(
                f"no worker started within {_START_S:.0f} s: the cluster has {room} is free. If a "
                "worker has a place, its machine is too busy: free it, and resume the run."
            ) from None
        except self.ray.exceptions.RayError as error:
            self.close()
            raise SundogError(f"a worker could not start: {str(error).splitlines()[-1]}") from None
        self._about = None
        self._check(about)

    def close(self) -> None:
        if self._actor is not None:
            self.ray.kill(self._actor)
            self._actor = self._about = None


class FarmWorker(Worker):
    """A call of an actor. If a config takes too long, its actor is replaced."""

    def __init__(
        self,
        actor: FarmActor,
        seconds: float,
        receive: Callable[[Any], Any] = lambda reply: reply,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(lambda pipe: None, seconds, clock)
        self.reply: Any = None  # of Ray's: a reference to what will come
        self._actor, self._receive = actor, receive
        self._has_come = False

    def submit(self, task: Any) -> None:
        assert self.task is None
        self.task, self._since = task, self._clock()
        self._actor.calls.append(self)
        self._actor.send()

    def answer(self) -> Any:
        if self._has_come:
            self._has_come = False
            return self._value()
        if self is self._actor.calls[0] and self._clock() - self._since > self._seconds:
            self._actor.close()
            text = f"no answer after {self._seconds:.0f} s: it hangs, and was ended"
            failure = self._ended(Failure("timeout", text))
            self._actor.send_again(_CALLS)
            return failure
        return None

    def _value(self) -> Any:
        ray = self._actor.ray
        try:
            reply = ray.get(self.reply)
        except ray.exceptions.RayError as error:
            return self._died(str(error).splitlines()[0])
        answer = self._ended(reply if isinstance(reply, Failure) else self._receive(reply))
        self._actor.depth = _CALLS
        self._actor.send()
        return answer

    def _died(self, how: str) -> Any:
        """Note that its process died with each try. If it was alone, it was the cause."""
        if self._actor.depth > 1 and len(self._actor.calls) > 1:
            self._actor.send_again(1)
            return None
        failure = self._ended(Failure("error", f"its worker died {_TRIES} times: {how}"))
        self._actor.send_again(_CALLS)
        return failure

    def _ended(self, reply: Any) -> Any:
        calls = self._actor.calls
        calls.remove(self)
        self.reply = None
        if calls:  # the next one's time begins now
            calls[0]._since = max(calls[0]._since, self._clock())
        return super()._ended(reply)

    def close(self) -> None:
        self._actor.close()

    @staticmethod
    def wait_some(workers: Sequence[Any]) -> None:
        """Ask Ray once about all of them."""
        sent = [worker for worker in workers if worker.reply is not None]
        replies = [worker.reply for worker in sent]
        come, _ = sent[0]._actor.ray.wait(replies, num_returns=1, timeout=LONGEST_WAIT)
        for worker in sent:
            worker._has_come = worker.reply in come


# in a worker's process


def _about() -> dict[str, Any]:
    """Return what the driver compares before it sends work."""
    used = total = 0
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = total - free
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "gpu_used": used,
        "gpu_total": total,
    }


def _check_versions(wanted: dict[str, Any]) -> None:
    """Raise if this process differs from the driver, since an actor may restart anywhere."""
    reason = different(wanted, _about())
    if reason:
        raise SundogError(reason)


def _name(job: Job) -> JobName:
    return job.op, job.problem, job.size


def _job(name: JobName) -> Job:
    op, problem, size = name
    return Job(op, find(op), problem, size)


class _Compiler:
    """Compiles one config at a time, and sends graphs that it has not sent before."""

    def __init__(
        self, named: dict[int, tuple[JobName, str]], target: str, wanted: dict[str, Any]
    ) -> None:
        _check_versions(wanted)
        torch.set_num_threads(1)
        self._graphs: list[Sent] = []
        jobs = {number: (_job(name), run_id) for number, (name, run_id) in named.items()}
        warm_cache_keys([job for job, _ in jobs.values()])
        self._compile = compile_config(jobs, target, self._keep)

    def about(self) -> dict[str, Any]:
        return _about()

    def _keep(self, graph: Any) -> str:
        made = encode(graph)  # here, since the process that writes has one core for all
        # Above 100 KB Ray moves a reply through its object stores; rows shrink to a tenth of that.
        rows = zlib.compress("\n".join(made.rows).encode(), 1)
        self._graphs.append((made._replace(rows=[]), rows))
        return made.ir_id

    def run(self, task: tuple[int, Any]) -> tuple[CompiledConfig, list[Sent]] | Failure:
        self._graphs.clear()
        try:
            return self._compile(task), list(self._graphs)
        except Exception as error:
            return Failure("error", f"{type(error).__name__}: {error}")


class _Measurer:
    """Opens the world with the first task; the world's ranks run in a thread of this process."""

    def __init__(
        self, named: list[JobName], place: TunePlace, timer: Timer, wanted: dict[str, Any]
    ) -> None:
        _check_versions(wanted)
        jobs = [_job(name) for name in named]
        warm_cache_keys(jobs)
        self._body = serve_world(jobs, place, timer)
        self._pipe, theirs = Pipe()
        self._error = ""
        self._thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        self._thread.start()

    def about(self) -> dict[str, Any]:
        return _about()

    def _serve(self, pipe: Any) -> None:
        try:
            self._body(pipe)
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def run(self, task: Any) -> Any:
        self._pipe.send(task)
        while not self._pipe.poll(LONGEST_WAIT):
            if not self._thread.is_alive():
                return Failure("error", self._error or "the world that measures has ended")
        return self._pipe.recv()
