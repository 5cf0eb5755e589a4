"""Compile configs for a target without a GPU, for their resources and their IR.

An op is planned on a simulated world and its launches are recorded (tools/_launches.py). On a
machine with a GPU this fills Triton's cache while others are measured, so that a measurement loads
what it finds. The graph of the IR also goes into the dataset here: in the process that tunes, it
would take 12 ms for each config of a fused op.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ... import gpu_limits
from ...compiled.kernels import Kernel, inspect_launch, resources
from ...compiled.recorded import RecordedLaunch, compile_launch
from ...dataset.files import AppendFile
from ...dataset.graph_file import EncodedGraph, IrFile
from ...dataset.ir_graph import IrGraphRecord
from ...dataset.schema import file_names
from ...dataset.triton.compile import source_of
from ...dataset.triton.ttir import extract_ttir_graph
from ...errors import SundogError
from ...learn.features import occupancy
from ...world.world import World
from .._launches import NUM_SMS, record
from .._pool import Failure, Worker, run_all, serve
from .._subject import room
from .space import Job

_warn = functools.cache(logging.getLogger(__name__).warning)  # each once, not for every config

_LEAST_HEAP = 64 << 20
_COMPILE_S = 180.0
_MOST_COMPILERS = 14
_FIGURES = (
    "name", "registers", "spills", "shared", "loads", "stores", "atomics", "barriers",
    "tensor_cores", "tma",
)  # fmt: skip


_FILLS = ("random_", "normal_", "uniform_", "copy_")
_RANDOM = ("randint", "rand", "randn")


@dataclass(frozen=True)
class CompiledConfig:
    """What was compiled for a config."""

    seconds: float
    metrics: dict[str, Any]
    ir_ids: list[str]


@dataclass(frozen=True)
class Compilers:
    """The processes that compile for all jobs of a run. Their tasks are (job's number, config)."""

    workers: list[Worker]
    place: str = ""  # "" for this machine
    processes: int = 0  # there; each may have several of the workers
    done: dict[tuple[int, Any], CompiledConfig | Failure] = field(default_factory=dict)

    @property
    def at(self) -> list[Any]:
        return [worker.task for worker in self.workers if worker.task is not None]

    @property
    def progress(self) -> str:
        """A text on remote workers and their work."""
        words = f", {len(self.at)} configs at {self.processes} compilers on {self.place}"
        return words if self.place else ""

    @property
    def idle(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.task is None]

    def close(self, base: str) -> None:
        with _between_graphs(base):
            for worker in self.workers:
                worker.close()


def graph_writer(base: str) -> Callable[[IrGraphRecord | EncodedGraph], str | None]:
    """Return a function that adds a graph to the dataset, in any process, and returns its id."""
    file = IrFile(file_names(base)[2])
    with suppress(OSError):  # a compiler will report it
        file.look()  # 14 compilers, one after the other, would take 2 s for 100 MB
    file.file.close()  # each opens its own
    return functools.partial(_write, file)


def compile_config(
    jobs: dict[int, tuple[Job, str]], target: str, write: Callable[[Any], str | None]
) -> Callable[[tuple[int, Any]], CompiledConfig]:
    """Compile a config's kernels, in the order of their launches. `_pool.serve` calls it.

    `jobs`: and their run ids. Configs often differ in the grid alone, and problems in what is no
    constant of a kernel, so what was compiled is kept by what it was made of.
    """
    made: dict[str, tuple[Kernel, str | None]] = {}

    def compile_one(task: tuple[int, Any]) -> CompiledConfig:
        (job, run_id), config = jobs[task[0]], task[1]
        seconds = 0.0
        found = []
        with gpu_limits.aim(target):
            launches = launches_of(job, config)
        for launch in launches:
            source, options = source_of(launch.kernel, launch.args, launch.kwargs, arch=target)
            key = f"{job.op} {source.hash()} {sorted(options.items(), key=str)}"
            if key not in made:
                begin = time.perf_counter()
                compiled = compile_launch(launch, target)
                seconds += time.perf_counter() - begin
                graph = {**extract_ttir_graph(compiled), "run_id": run_id}
                kernel = inspect_launch(job.op, launch, target)
                if unfit := [mark.text for mark in kernel.marks if mark.rule == "shared"]:
                    raise SundogError(f"{kernel.name}: {unfit[0]}")
                made[key] = kernel, write(graph)
            found.append(made[key])
        ids = dict.fromkeys(ir_id for _, ir_id in found if ir_id)
        return CompiledConfig(seconds, _metrics(target, [kernel for kernel, _ in found]), list(ids))

    return compile_one


def _write(file: IrFile, graph: IrGraphRecord | EncodedGraph) -> str | None:
    try:
        return file.add_encoded(graph) if isinstance(graph, EncodedGraph) else file.add(graph)
    except OSError as error:
        _warn("%s: %s; rows go on without the IR graph", file.file.path, error.strerror)
        return None


@contextmanager
def _between_graphs(base: str) -> Iterator[None]:
    """Hold off writers inside the block, since compilers may be ended between two graphs."""
    file = AppendFile(file_names(base)[2])
    with ExitStack() as stack:
        stack.callback(file.close)
        with suppress(OSError):  # without graphs there is nothing to wait for
            stack.enter_context(file.locked())
        yield


def launches_of(job: Job, config: Any) -> list[RecordedLaunch]:
    """Record what one call of the op launches on rank 0.

    Inputs come before the plan, as in the world that measures: their order on the heap, relative to
    the plan's buffers, is an argument of some kernels, and part of their keys.
    """

    def run(world: World) -> None:
        with _NoValues():
            made = job.module.inputs(world, job.problem, 0)
        given = [torch.empty(t.shape, dtype=t.dtype) if _is_expanded(t) else t for t in made]
        out = room(world, job.module, job.problem, tuple(given))
        job.module.plan(world, job.problem, config)(*given, out)

    heap = _LEAST_HEAP + 4 * job.module.cost(job.problem).hbm_bytes
    return record(run, job.size, heap)


def warm_cache_keys(found: list[Job]) -> None:
    """Compute every kernel's key in Triton's cache, before the processes part.

    A key depends on which kernels already have one: a callee's globals count only if its own key
    was computed before (Triton 3.6 and 3.7, `DependenciesFinder`). The world that measures has
    kernels that the compilers have not. Without this it found nothing that they had compiled: 0.3 s
    and more for each.
    """
    for job in {each.module: each for each in found}.values():
        with suppress(ValueError):  # a problem that it refuses
            for launch in launches_of(job, job.module.default(job.problem, NUM_SMS)):
                launch.kernel.cache_key  # noqa: B018


class _NoValues(TorchFunctionMode):
    """Tensors as an op's `inputs` makes them, without the numbers, which took up to 4 s a config.

    Nothing is launched here, so they are not read. A random tensor is one zero, expanded.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        if name in _FILLS:
            return args[0]
        if name in _RANDOM:
            like = func(*args, **{**named, "device": "meta", "generator": None})
            return torch.zeros((), dtype=like.dtype).expand(like.shape)
        if name == "to" and _is_expanded(args[0]):
            one = args[0][(0,) * args[0].dim()]
            return one.to(*args[1:], **named).expand(args[0].shape)
        return func(*args, **named)


def _is_expanded(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and not any(tensor.stride())


def _metrics(target: str, kernels: list[Kernel]) -> dict[str, Any]:
    each = [{k: v for k, v in dataclasses.asdict(one).items() if k in _FIGURES} for one in kernels]
    return {
        "target": target,
        "registers": max((one.registers for one in kernels), default=0),
        "spills": sum(one.spills for one in kernels),
        "shared": max((one.shared for one in kernels), default=0),
        "marks": [f"{one.name}: {mark.rule}" for one in kernels for mark in one.marks],
        "kernels": each,
    }


# launches of other kernels


@dataclass(frozen=True)
class Built:
    """A config that was compiled."""

    seconds: float
    registers: int
    spills: int
    shared: int
    warps: int
    ttgir: str

    @property
    def facts(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"registers": self.registers, "spills": self.spills}
        held = occupancy(self.registers, self.shared, self.warps)
        return {**figures, "shared": self.shared, "occupancy": held, "ttgir_text": self.ttgir}

    @property
    def metrics(self) -> dict[str, Any]:
        return {"registers": self.registers, "spills": self.spills, "shared": self.shared}


def build_all(launches: Sequence[RecordedLaunch], arch: str) -> list[Built | Failure]:
    """Compile launches in processes side by side."""
    for launch in launches:
        launch.kernel.cache_key  # noqa: B018  the same in all processes: see warm_cache_keys
    body = serve(lambda number: _build(launches[number], arch))
    count = min(max((os.cpu_count() or 2) - 1, 1), _MOST_COMPILERS, len(launches))
    workers = [Worker(body, _COMPILE_S) for _ in range(count)]
    replies = dict(run_all(workers, range(len(launches))))
    return [replies[number] for number in range(len(launches))]


def _build(launch: RecordedLaunch, arch: str) -> Built:
    """Compile in a worker."""
    begin = time.perf_counter()
    made = compile_launch(launch, arch)
    seconds = time.perf_counter() - begin
    registers, spills = resources(made, arch)
    metadata = made.metadata
    held = metadata.shared, metadata.num_warps
    return Built(seconds, registers, spills, *held, made.asm["ttgir"])
