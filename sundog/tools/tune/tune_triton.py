"""Tune a Triton kernel that is not one of our ops: its `@triton.autotune` configs, or others.

    tuned = sundog.tune_triton(matmul_kernel, grid, (a, b, c, m, n, k), budget=5)
    matmul_kernel[grid](a, b, c, m, n, k)       # launches tuned.config from now on

The model orders the configs by their launches, processes compile the first few times `budget`, and
the model orders those again by their registers, shared memory and TTGIR. The GPU measures `budget`
of them: five in that order, and then each measurement corrects the order of the rest. Each is a row
of the dataset `log`. On a GPU that the model does not know, the pattern search runs.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner, Config, Heuristics
from triton.runtime.jit import JITFunction

from ...compiled.recorded import RecordedLaunch, pointer
from ...dataset.identity import describe_run
from ...dataset.recorder import Recorder
from ...dataset.triton.ttir import extract_ttir_graph
from ...errors import SundogError
from ...learn.kernel_model import ORDERED, predict
from ...target import key_of, of
from .._pool import Failure
from .compile_configs import Built, build_all
from .space import SEARCHES, Space, check_search, points_of

_COMPILED = 4  # times the budget: configs that are compiled for the model
_SIZES = ("m", "n", "k", "batch", "heads", "seq", "dim")  # arguments that the model knows by name
_LOST = ("CUDA error", "illegal memory access", "misaligned address", "launch failure")

Timer = Callable[[Callable[[], Any]], Sequence[float]]  # from a launch to milliseconds


@dataclass(frozen=True)
class TritonTuned:
    """The best config of a kernel, and how it was found."""

    kernel: str
    config: Config | None  # None where every config failed
    milliseconds: float | None
    tried: int
    failed: int
    error: str  # of the last failure
    by_model: bool  # else by the pattern search, since the model does not know this GPU
    compiled: int
    seconds: float
    run_id: str
    times: list[tuple[Config, float | None]]  # in the order in which they were measured


def time_launch(launch: Callable[[], Any]) -> Sequence[float]:
    """Time launches one by one, each after a write that clears its inputs from L2."""
    from triton.testing import do_bench

    return do_bench(launch, warmup=2, rep=8, return_mode="all")


def tune_triton(
    kernel: Any,
    grid: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    configs: Sequence[Config] = (),
    budget: int = 20,
    search: str = "model",
    flops: float = math.nan,
    trips: Callable[[dict[str, Any]], float] | None = None,
    log: str = "",
    seed: int = 0,
    timer: Timer = time_launch,
) -> TritonTuned:
    """Measure at most `budget` configs of `kernel[grid](*args, **kwargs)`; return the best.

    `configs` are those of the kernel's `@triton.autotune` unless given. `flops` of the launch and
    `trips` of a program's innermost loop, by the config's fields, help the model but are optional.
    A kernel with `@triton.autotune` launches the best from now on, for arguments of the same key.
    """
    begin = time.monotonic()
    job = _TritonJob.of(kernel, grid, args, kwargs or {}, flops, trips)
    log = log or f"tune-{job.name}"
    space = _space(list(configs) or getattr(kernel, "configs", []))
    _check(job, space, budget, search, log, timer)
    settings = {"search": search, "budget": budget, "seed": seed, "space": len(space.configs)}
    info = describe_run(job.jit, job.args, settings=settings, backend="triton")
    with Recorder(log, info) as recorder:
        run = _Run(job, recorder, timer)
        if search == "model":
            space = run.proposed(space, budget)
        SEARCHES[search](space, run, budget, random.Random(seed))
        best = run.best
        if best is not None and isinstance(kernel, Autotuner):
            kernel.cache[_key(kernel, args, kwargs or {})] = best.config_
        return TritonTuned(
            job.name, best and best.config_, best and run.times[best], len(run.times),
            list(run.times.values()).count(None), run.error, bool(space.scores),
            len(run.compiled), time.monotonic() - begin, recorder.run_id or "",
            [(point.config_, time) for point, time in run.times.items()],
        )  # fmt: skip


def _check(job: _TritonJob, space: Space, budget: int, search: str, log: str, timer: Timer) -> None:
    check_search(budget, search, log)
    if job.device.type != "cuda" and timer is time_launch:
        raise SundogError(
            f"{job.name}: its tensors are on {job.device}, so nothing can be timed. Give tensors "
            "of a GPU."
        )


def _space(configs: Sequence[Config]) -> Space:
    """Make a point of each config, whose fields the searches compare."""
    if not configs:
        raise ValueError("there is no config to try: give configs=[triton.Config(...), ...]")
    points = points_of(configs, [config.all_kwargs() for config in configs])
    return Space(tuple(points))


def _key(kernel: Autotuner, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the key under which Triton's autotuner keeps the best config of these arguments."""
    given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    mine = {name: value for name, value in given.items() if name in kernel.arg_names}
    chosen = [mine[name] for name in kernel.keys if name in mine]
    return (*chosen, *(str(value.dtype) for value in mine.values() if hasattr(value, "dtype")))


@dataclass(frozen=True)
class _TritonJob:
    """A kernel and its arguments, without a config."""

    kernel: Any  # with its decorators
    jit: JITFunction
    grid: Any
    args: dict[str, Any]
    flops: float
    trips: Callable[[dict[str, Any]], float] | None

    @staticmethod
    def of(
        kernel: Any, grid: Any, args: Sequence[Any], kwargs: Mapping[str, Any], flops: float,
        trips: Callable[[dict[str, Any]], float] | None,
    ) -> _TritonJob:  # fmt: skip
        jit = kernel
        while not isinstance(jit, JITFunction):
            if not hasattr(jit, "fn"):
                raise ValueError(f"{kernel!r} is not a @triton.jit kernel")
            jit = jit.fn
        names = list(inspect.signature(jit.fn).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return _TritonJob(kernel, jit, grid, given, flops, trips)

    @property
    def name(self) -> str:
        return str(self.jit.__name__)

    @functools.cached_property
    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.args.values() if isinstance(value, torch.Tensor)]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device if self.tensors else torch.device("cpu")

    @property
    def arch(self) -> str:
        return of(self.device).arch if self.device.type == "cuda" else "sm_90"

    def given(self, point: Any) -> dict[str, Any]:
        """Return all arguments and options of a launch, with what `@triton.heuristics` adds."""
        found = {**self.args, **point.config_.all_kwargs()}
        inner = self.kernel
        while not isinstance(inner, JITFunction):
            if isinstance(inner, Heuristics):
                found |= {name: make(found) for name, make in inner.values.items()}
            inner = inner.fn
        return found

    def grid_of(self, point: Any) -> tuple[int, int, int]:
        chosen = self.grid(self.given(point)) if callable(self.grid) else self.grid
        x, y, z = (*chosen, 1, 1)[:3]
        return int(x), int(y), int(z)

    def launch(self, point: Any) -> Callable[[], Any]:
        """Return what launches it, with the hooks that Triton's autotuner would call before."""
        given, config = self.given(point), point.config_
        run = self.jit[self.grid_of(point)]

        def launch() -> None:
            if isinstance(self.kernel, Autotuner):
                self.kernel.pre_hook(given)
            if config.pre_hook is not None:
                config.pre_hook(given)
            run(**given)

        return launch

    def known(self, point: Any, compiled: Built | None) -> dict[str, Any]:
        """Return what the model is asked with: see learn/features.py."""
        fields = {_plain(name): value for name, value in point.config_.all_kwargs().items()}
        sizes = {name.lower(): v for name, v in self.args.items() if type(v) is int and v > 0}
        shape = {name: sizes[name] for name in _SIZES if name in sizes}
        largest = max(self.tensors, key=lambda tensor: tensor.nbytes)
        found = {
            "kernel": "", "dtype": str(largest.dtype).removeprefix("torch."), "config": fields,
            "shape": shape if {"m", "n"} <= set(shape) else {}, "grid": self.grid_of(point),
            "bytes": float(sum(tensor.nbytes for tensor in self.tensors)), "flops": self.flops,
            "trips": float(self.trips(point.config_.all_kwargs())) if self.trips else math.nan,
        }  # fmt: skip
        return {**found, **(compiled.facts if compiled else {})}


def _plain(name: str) -> str:
    """Return the dataset's name of a field: BLOCK_M for BLOCK_SIZE_M."""
    return name.replace("_SIZE", "") if name.isupper() else name


class _Run:
    """The evaluator of one search: compile, launch, time, and write a row."""

    def __init__(self, job: _TritonJob, recorder: Recorder, timer: Timer) -> None:
        self.times: dict[Any, float | None] = {}
        self.compiled: dict[Any, Built | Failure] = {}
        self.error = ""
        self._job = job
        self._recorder = recorder
        self._timer = timer

    @property
    def best(self) -> Any:
        timed = {point: time for point, time in self.times.items() if time is not None}
        return min(timed, key=lambda point: timed[point]) if timed else None

    def proposed(self, space: Space, budget: int) -> Space:
        """Return configs that the model prefers, compiled, the best first; or all, unordered."""
        points = _ranked(self._job, {point: None for point in space.configs})
        if points is None:
            return space
        self._compile(list(points)[: _COMPILED * budget])
        built = {p: c for p, c in self.compiled.items() if isinstance(c, Built)}
        scores = _ranked(self._job, built) or {}
        return Space(tuple(scores), tuple(scores.values()), ORDERED) if scores else space

    def __call__(self, points: list[Any], generation: int) -> list[float | None]:
        self._compile(points)
        for point in points:
            if point not in self.times:
                self.times[point] = self._measure(point, generation)
        return [self.times[point] for point in points]

    def _compile(self, points: list[Any]) -> None:
        """Fill Triton's cache in processes side by side, where the launch finds its binary."""
        new = [point for point in dict.fromkeys(points) if point not in self.compiled]
        if not new:
            return
        launches = [_recorded(self._job, point) for point in new]
        self.compiled.update(zip(new, build_all(launches, self._job.arch), strict=True))

    def _measure(self, point: Any, generation: int) -> float | None:
        config, built = point.config_, self.compiled[point]
        trial = self._recorder.start(
            config.all_kwargs(), decorator=str(config), generation=generation
        )
        if isinstance(built, Failure):
            self.error = built.error
            trial.end(built.status, error=built.error)
            return None
        graph = extract_ttir_graph(built.ttgir, kernel_name=self._job.name)
        facts: dict[str, Any] = {"compile_time_s": built.seconds, "metrics": built.metrics}
        facts |= {"ir_id": self._recorder.add_graph(graph)}
        try:
            samples = list(self._timer(self._job.launch(point)))
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            trial.end("error", error=self.error, **facts)
            if any(word in str(error) for word in _LOST):
                raise SundogError(
                    f"{config} ended the GPU's context: {self.error}. Rows before it are kept."
                ) from error
            return None
        trial.end("ok", samples=samples, timer="do_bench", **facts)
        return statistics.median(samples)


def _ranked(job: _TritonJob, built: Mapping[Any, Built | None]) -> dict[Any, float] | None:
    """Return the model's scores, the best first; None if it does not know this GPU."""
    known = [job.known(point, compiled) for point, compiled in built.items()]
    scores = predict(known, key_of(job.device)) if known else None
    if scores is None:
        return None
    pairs = zip(built, scores, strict=True)
    return dict(sorted(pairs, key=lambda pair: pair[1]))


def _recorded(job: _TritonJob, point: Any) -> RecordedLaunch:
    given = {name: pointer(value, 0) for name, value in job.given(point).items()}
    return RecordedLaunch(job.jit, (), given, {})
