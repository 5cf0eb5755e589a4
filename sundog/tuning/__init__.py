"""Tuning: search for the best config of an op, keep every attempt.

    import sundog

    for tuned in sundog.tune("all_gather", "numel=1048576,dtype=bfloat16", log="runs/gather"):
        print(tuned.op, tuned.config, tuned.milliseconds)

Every config that is tried is compiled, compared with the reference and timed, and is a row of the
dataset `log`, whatever comes of it. The best goes into the user's cache, which `algo="auto"` and
defaults read. `targets` compiles only, for GPUs that are not here: nothing is timed, and no time is
made up.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from .. import choice
from ..dataset.base import check_base
from ..dataset.compile import gpu_target
from ..dataset.identity import RunInfo, describe_value
from ..dataset.machine import HARDWARE_FIELDS, versions
from ..dataset.source import kernel_source
from ..dataset.writer import Recorder
from ..errors import SundogError
from ..isa import NUM_SMS
from ..target import has_gpu
from . import cache
from .compile import between_graphs, compile_config, launches_of
from .evaluate import Evaluator
from .measure import WHERE, Place, Timer, Where, serve_world, time_on_gpu
from .search import SEARCHES, around_the_best
from .space import Job, Space, fields_text, jobs, spaces
from .workers import Failure, Worker, serve

__all__ = ["Place", "Progress", "Tuned", "tune"]

_FINALISTS = 5
_COMPILE_S, _MEASURE_S = 180.0, 120.0  # after which a config hangs; opening a world included
_MOST_COMPILERS = 14

Progress = Callable[[str, int, int, str], None]  # job, done, of how many, best so far


@dataclass(frozen=True)
class Tuned:
    """What came of one algorithm on one target."""

    op: str
    problem: Any
    target: str
    run_id: str
    tried: int
    failed: int  # of those, in this session
    error: str  # of the last of these
    config: Any  # the best; None where nothing was timed
    milliseconds: float | None
    default: Any
    default_milliseconds: float | None  # measured in turns with the best
    seconds: float  # of the whole run
    busy: float  # part of it in which the GPU's process had something to do
    writing: float  # part of it that rows took

    @property
    def useful(self) -> bool:
        return self.tried > self.failed


@dataclass(frozen=True)
class _Options:
    budget: int
    search: str
    log: str
    seed: int
    resume: bool
    progress: Progress


def tune(
    op: str,
    problem: str | Sequence[str] = "",
    *,
    world: int = 8,
    budget: int = 200,
    search: str = "pattern",
    log: str = "",
    seed: int = 0,
    resume: bool = False,
    targets: Sequence[str] = (),
    place: Place | None = None,
    timer: Timer = time_on_gpu,
    progress: Progress = lambda *_: None,
) -> list[Tuned]:
    """Tune an op (each algorithm that may be chosen), or one algorithm: 'all_gather.push'.

    Several problems are tuned one after the other, in a world that is opened once.
    """
    log = log or f"tune-{op.rpartition('/')[2]}"
    problems = [problem] if isinstance(problem, str) else list(problem) or [""]
    found = [job for text in problems for job in jobs(op, text, world)]
    _check(budget, search, log, targets, timer)
    options = _Options(budget, search, log, seed, resume, progress)
    if not targets:
        return _measure(found, place or Place("virtual"), timer, options)
    return [each for target in targets for each in _compile_only(found, target, options)]


def _check(budget: int, search: str, log: str, targets: Sequence[str], timer: Timer) -> None:
    if budget < 1:
        raise ValueError(f"budget {budget}: at least one config must be tried")
    if search not in SEARCHES:
        raise ValueError(f"search {search!r}: expected one of {', '.join(SEARCHES)}")
    for target in targets:
        gpu_target(target)  # a ValueError if there is none of that name
    wrong = check_base(log)
    if wrong:
        raise ValueError(f"--log {log}: {wrong}")
    if targets or timer is not time_on_gpu:
        return
    if torch.cuda.is_initialized():
        raise SundogError(
            "tuning forks this process, which has used CUDA already. Call it first, or from the "
            "command line."
        )
    if not has_gpu():
        raise SundogError(
            "torch finds no GPU here, so nothing can be timed. --compile-only --target "
            "sm_90,gfx942 compiles every config and records what it takes."
        )


def _compile_only(found: list[Job], target: str, options: _Options) -> list[Tuned]:
    gpu = gpu_target(target)
    done = []
    for number, space in spaces(found, NUM_SMS, gpu.warp_size).items():
        job = found[number]
        hardware = dict.fromkeys(HARDWARE_FIELDS) | {"kind": gpu.backend, "name": target}
        info = _describe(job, space, f"compile {target}", hardware, options)
        compilers = _compilers(job, target, options.log, info.run_id, os.cpu_count() or 1)
        here = choice.Place(target, NUM_SMS)
        done.append(_search(job, space, info, (compilers, None), here, "", options))
    return done


def _measure(found: list[Job], place: Place, timer: Timer, options: _Options) -> list[Tuned]:
    """All algorithms, one after the other, in one world."""
    _fix_keys(found)
    measurer = Worker(serve_world(found, place, timer), _MEASURE_S)
    name = "graph replay" if timer is time_on_gpu else "synthetic"
    done = []
    try:
        where = _where(measurer)
        cache.check(where.target)
        for number, space in spaces(found, where.num_sms, where.warp_size).items():
            job = found[number]
            backend = f"{place.backend} {place.link}".strip()
            info = _describe(job, space, backend, where.hardware, options)
            count = max((os.cpu_count() or 2) - 1, 1)
            compilers = _compilers(job, where.arch, options.log, info.run_id, count)
            workers = compilers, measurer
            here = choice.Place(where.target, where.num_sms)
            done.append(_search(job, space, info, workers, here, name, options, number))
    finally:
        measurer.close()
    return done


def _search(
    job: Job, space: Space, info: RunInfo, workers: tuple[list[Worker], Worker | None],
    place: choice.Place, timer: str, options: _Options, number: int = 0,
) -> Tuned:  # fmt: skip
    compilers, measurer = workers
    busy_before = measurer.busy_s if measurer else 0.0
    known = cache.known_results(options.log, info.run_id) if options.resume else {}
    total = min(options.budget, len(space.configs))
    begin = time.monotonic()
    with Recorder(options.log, info) as recorder:

        def step() -> None:
            best = f"{evaluator.best[1]:.4f} ms" if evaluator.best else ""
            options.progress(f"{job} on {place.target}", len(evaluator.times), total, best)

        evaluator = Evaluator(recorder, compilers, measurer, known, timer, step, number)
        if options.search == "pattern":
            evaluator.ahead = functools.partial(around_the_best, space)
        whole = False
        try:
            rng = random.Random(options.seed)
            SEARCHES[options.search](space, evaluator, options.budget, rng)
            evaluator.measure_again(_FINALISTS, space.configs[0])
            whole = True
        finally:  # Ctrl-C too: what was measured counts
            with between_graphs(options.log):
                for worker in compilers:
                    worker.close()
            config, milliseconds = evaluator.best or (None, None)
            if milliseconds is not None:
                run = f"{os.path.basename(options.log)} {info.run_id[:16]}"
                cache.keep(job, config, milliseconds, place, run, whole)
        seconds = time.monotonic() - begin
        busy = measurer.busy_s - busy_before if measurer else 0.0
        first = space.configs[0]
        return Tuned(
            job.op, job.problem, place.target, info.run_id, len(evaluator.times), evaluator.failed,
            evaluator.last_error, config, milliseconds, first, evaluator.times.get(first), seconds,
            busy / seconds, evaluator.writing_s / seconds,
        )  # fmt: skip


def _compilers(job: Job, target: str, log: str, run_id: str, count: int) -> list[Worker]:
    body = serve(compile_config(job, target, log, run_id))
    return [Worker(body, _COMPILE_S) for _ in range(min(count, _MOST_COMPILERS))]


def _where(measurer: Worker) -> Where:
    """Opens the world, which takes a while; what it runs on."""
    measurer.submit(WHERE)
    reply: Where | Failure = measurer.wait()
    if isinstance(reply, Failure):
        raise SundogError(f"the world that measures could not be opened: {reply.error}")
    return reply


def _fix_keys(found: list[Job]) -> None:
    """Give every kernel its key in Triton's cache, before the processes part.

    The key depends on what has one already: a callee's globals count only if it was asked for its
    own before (Triton 3.6 and 3.7, `DependenciesFinder`). The world that measures has kernels which
    compilers have not, and found nothing of what these had compiled: 0.3 s and more for each.
    """
    for job in {each.module: each for each in found}.values():
        with suppress(ValueError):  # a problem that it refuses
            for launch in launches_of(job, job.module.default(job.problem, NUM_SMS)):
                launch.kernel.cache_key  # noqa: B018


def _describe(
    job: Job, space: Space, backend: str, hardware: dict[str, Any], options: _Options
) -> RunInfo:
    """The run: all kernels that the op launches, and the problem as their arguments."""
    kernels = dict.fromkeys(each.kernel for each in launches_of(job, space.configs[0]))
    source: list[dict[str, Any]] = []
    for kernel in kernels:
        source += [item for item in _source(kernel) if item not in source]
    fields = {name: getattr(job.problem, name) for name in job.problem.__dataclass_fields__}
    return RunInfo(
        kernel_name=job.op,
        kernel_source=source,
        codegen_settings={},
        arguments=[{"name": name, **describe_value(value)} for name, value in fields.items()],
        settings={"search": options.search, "budget": options.budget, "seed": options.seed,
                  "space": len(space.configs), "default": fields_text(space.configs[0])},
        world=job.size,
        backend=backend,
        hardware=hardware,
        versions=versions(),
    )  # fmt: skip


_source = functools.cache(kernel_source)  # the same for all problems, and takes 0.2 s
