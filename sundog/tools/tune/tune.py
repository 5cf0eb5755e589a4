"""Tuning: search for the best config of an op, keep every attempt.

    import sundog

    for tuned in sundog.tune("all_gather", "numel=1048576,dtype=bfloat16", log="runs/gather"):
        print(tuned.op, tuned.config, tuned.milliseconds)

Every config that is tried is compiled, compared with the reference and timed, and is a row of the
dataset `log`, whatever the outcome. The best goes into the user's cache, which `algo="auto"` and
defaults read. `targets` only compiles, for GPUs that are not here: nothing is timed, and no time is
made up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...dataset.hardware import HARDWARE_FIELDS, versions
from ...dataset.identity import RunInfo, describe_value
from ...dataset.kernel_source import kernel_source
from ...dataset.plain import relative_path
from ...dataset.recorder import Recorder
from ...dataset.triton.compile import gpu_target
from ...errors import SundogError
from ...learn.op_model import predict
from ...ops import select
from ...target import has_gpu
from .._console import Show
from .._launches import NUM_SMS, check_target
from .._pool import Failure, Worker, serve
from . import cache
from .compile_configs import Compilers, compile_config, graph_writer, launches_of, warm_cache_keys
from .evaluate import Evaluator
from .farm import Farm
from .measure import WHERE, Timer, TunePlace, Where, serve_world, time_on_gpu
from .space import (
    SEARCHES,
    Job,
    Space,
    around_the_best,
    check_search,
    fields_text,
    first_asked,
    jobs,
    proposals,
    spaces,
)

_FINALISTS = 5
_COMPILE_S, _MEASURE_S = 180.0, 120.0  # until a config counts as hung, a world's opening included
_MOST_COMPILERS = 14
_AHEAD = 2  # configs that each compiles for the next search, to bridge its beginning

_Workers = tuple[Compilers, Sequence[Worker]]  # and the worlds that measure


@dataclass(frozen=True)
class Tuned:
    """The result for one algorithm on one target."""

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
    default_milliseconds: float | None  # measured interleaved with the best
    seconds: float  # of the whole run
    busy: float  # the part in which the GPU's process was busy
    writing: float  # the part that rows took
    unknown_to_model: bool = False  # which should have led: the pattern search ran instead

    @property
    def useful(self) -> bool:
        return self.tried > self.failed


@dataclass(frozen=True)
class _SearchOptions:
    budget: int
    search: str
    log: str
    seed: int
    resume: bool
    show: Show

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that describe a run."""
        return {"search": self.search, "budget": self.budget, "seed": self.seed}


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
    place: TunePlace | None = None,
    timer: Timer = time_on_gpu,
    farm: str = "",
    progress: Show = lambda *_: None,
) -> list[Tuned]:
    """Tune an op (each algorithm that may be chosen), or one algorithm: 'all_gather.push'.

    `problem` is 'numel=4096,dtype=bfloat16', the other fields those of the op's first case; several
    are tuned one after the other, in a world that is opened once. At most `budget` configs of each
    algorithm are tried; rows go to the dataset `log` (default: tune-OP). Needs a GPU, unless
    `targets` names GPUs to compile for: ["sm_90"]. `farm` is the address of a Ray cluster, whose
    workers compile and measure instead of this machine's processes (farm.py).
    """
    targets = [targets] if isinstance(targets, str) else targets
    log = log or default_log(op)
    problems = [problem] if isinstance(problem, str) else list(problem) or [""]
    found = [job for text in problems for job in jobs(op, text, world)]
    check_search(budget, search, log)
    for target in targets:
        check_target(target)
    if not (targets or farm or timer is not time_on_gpu):
        _check_gpu()
    options = _SearchOptions(budget, search, log, seed, resume, progress)
    pool = Farm(farm) if farm else LocalPool()
    try:
        if not targets:
            return _measure(found, place or TunePlace("virtual"), timer, options, pool)
        return [each for name in targets for each in _compile_only(found, name, options, pool)]
    finally:
        pool.close()


def default_log(op: str) -> str:
    """Return the default name of an op's dataset."""
    return f"tune-{op.rpartition('/')[2].removesuffix('.py')}"


def _check_gpu() -> None:
    """Raise if this machine's processes can't measure."""
    if torch.cuda.is_initialized():
        raise SundogError(
            "tuning forks this process, which has used CUDA already. Call it first, or from the "
            "command line."
        )
    if not has_gpu():
        raise SundogError(
            "torch finds no GPU here, so nothing can be timed. To compile every config and record "
            "what it takes: targets=['sm_90'], on a command line --compile-only --target sm_90."
        )


@dataclass(frozen=True)
class Described:
    """A job that its algorithm accepts."""

    number: int  # among all
    job: Job
    space: Space
    info: RunInfo


def describe_all(
    found: list[Job], where: Where, backend: str, settings: dict[str, Any]
) -> list[Described]:
    """Describe every job before the compilers, which need the descriptions, are forked."""
    described = []
    for number, space in spaces(found, where.num_sms, where.arch).items():
        job = found[number]
        if settings.get("search") == "model":
            scores = predict(job.op, job.problem, space.configs, where.target)
            space = dataclasses.replace(space, scores=tuple(scores or ()))
        info = _describe(job, space, backend, where.hardware, settings)
        described.append(Described(number, job, space, info))
    return described


def _describe(
    job: Job, space: Space, backend: str, hardware: dict[str, Any], settings: dict[str, Any]
) -> RunInfo:
    """Describe the run: all kernels that the op launches; algorithm and problem as arguments."""
    kernels = dict.fromkeys(each.kernel for each in launches_of(job, space.configs[0]))
    source: list[dict[str, Any]] = []
    for kernel in kernels:
        source += [item for item in _source(kernel) if item not in source]
    # A broadcast and a scatter launch the same kernel on equal problems: their files differ.
    fields = {"algorithm": relative_path(str(job.module.__file__))}
    fields |= {name: getattr(job.problem, name) for name in job.problem.__dataclass_fields__}
    return RunInfo(
        kernel_name=relative_path(job.op),
        kernel_source=source,
        codegen_settings={},
        arguments=[{"name": name, **describe_value(value)} for name, value in fields.items()],
        settings={**settings, "space": len(space.configs),
                  "default": fields_text(space.configs[0])},
        world=job.size,
        backend=backend,
        hardware=hardware,
        versions=versions(),
    )  # fmt: skip


_source = functools.cache(kernel_source)  # the same for all problems; takes 0.2 s


def _compile_only(
    found: list[Job], target: str, options: _SearchOptions, pool: LocalPool | Farm
) -> list[Tuned]:
    gpu = gpu_target(target)
    hardware = dict.fromkeys(HARDWARE_FIELDS) | {"kind": gpu.backend, "name": target}
    where = Where(target, target, NUM_SMS, hardware)
    described = describe_all(found, where, f"compile {target}", options.settings)
    compilers = pool.compilers(_numbered(described), target, options.log, _COMPILE_S, 0)
    try:
        return _search_all(described, (compilers, []), select.Place(target, NUM_SMS), "", options)
    finally:
        compilers.close(options.log)


def _measure(
    found: list[Job], place: TunePlace, timer: Timer, options: _SearchOptions,
    pool: LocalPool | Farm,
) -> list[Tuned]:  # fmt: skip
    """Measure all algorithms, one after the other, in a world on each GPU; kind by kind."""
    warm_cache_keys(found)
    on_gpu = timer is time_on_gpu
    kinds = pool.measurers(found, place, timer, _MEASURE_S, on_gpu)
    name = "graph replay" if on_gpu else "synthetic"
    return [
        tuned for each in kinds for tuned in _measure_on(each, found, place, name, options, pool)
    ]


def _measure_on(
    measurers: Sequence[Worker], found: list[Job], place: TunePlace, timer: str,
    options: _SearchOptions, pool: LocalPool | Farm,
) -> list[Tuned]:  # fmt: skip
    compilers = Compilers([])
    try:
        where = _where(measurers)
        cache.check(where.target)
        backend = f"{place.backend} {place.link}".strip()
        described = describe_all(found, where, backend, options.settings)
        numbered = _numbered(described)
        reserved = len(measurers)  # a core for each
        compilers = pool.compilers(numbered, where.arch, options.log, _COMPILE_S, reserved)
        here = select.Place(where.target, where.num_sms)
        return _search_all(described, (compilers, measurers), here, timer, options)
    finally:
        compilers.close(options.log)
        for measurer in measurers:
            measurer.close()


def _search_all(
    described: list[Described], workers: _Workers, place: select.Place, timer: str,
    options: _SearchOptions,
) -> list[Tuned]:  # fmt: skip
    """Search all of them, one after the other."""
    done = []
    for each, following in itertools.zip_longest(described, described[1:]):
        after = []
        if following is not None:
            given = options.search, following.space, options.budget, options.seed
            some = first_asked(*given)[: _AHEAD * len(workers[0].workers)]
            after = [(following.number, config) for config in some]
        done.append(_search(each, after, workers, place, timer, options))
    return done


def _search(
    each: Described, after: list[tuple[int, Any]], workers: _Workers, place: select.Place,
    timer: str, options: _SearchOptions,
) -> Tuned:  # fmt: skip
    job, space, info = each.job, each.space, each.info
    compilers, measurers = workers
    busy_before = sum(each.busy_s for each in measurers)
    known = cache.known_results(options.log, info.run_id) if options.resume else {}
    total = min(options.budget, len(space.configs))
    begin = time.monotonic()
    with Recorder(options.log, info) as recorder:

        def step() -> None:
            best = f"best {evaluator.best[1]:.4f} ms" if evaluator.best else "no time yet"
            text = best + compilers.progress if evaluator.best or compilers.place else ""
            if compilers.place and measurers:
                busy = sum(each.task is not None for each in measurers)
                text += f", {busy} of {len(measurers)} measurers busy"
            options.show(f"{job} on {place.target}", len(evaluator.times), total, text)

        evaluator = Evaluator(recorder, compilers, measurers, known, timer, step, each.number)
        evaluator.after = after
        if options.search == "pattern":
            evaluator.ahead = functools.partial(around_the_best, space)
        elif options.search == "model" and space.scores:
            evaluator.ahead = functools.partial(proposals, space, count=len(compilers.workers))
        whole = False
        try:
            rng = random.Random(options.seed)
            SEARCHES[options.search](space, evaluator, options.budget, rng)
            evaluator.measure_again(_FINALISTS, space.configs[0])
            whole = True
        finally:  # also after Ctrl-C, since what was measured counts
            config, milliseconds = evaluator.best or (None, None)
            if milliseconds is not None:
                run = f"{os.path.basename(options.log)} {info.run_id[:16]}"
                cache.keep(job, config, milliseconds, place, run, whole)
        seconds = time.monotonic() - begin
        busy = sum(each.busy_s for each in measurers) - busy_before
        first = space.configs[0]
        return Tuned(
            job.op, job.problem, place.target, info.run_id, len(evaluator.times), evaluator.failed,
            evaluator.last_error, config, milliseconds, first, evaluator.times.get(first), seconds,
            busy / seconds / max(len(measurers), 1), evaluator.writing_s / seconds,
            options.search == "model" and not space.scores,
        )  # fmt: skip


def _numbered(described: list[Described]) -> dict[int, tuple[Job, str]]:
    return {each.number: (each.job, each.info.run_id) for each in described}


class LocalPool:
    """This machine's processes. `Farm` has the same methods."""

    def compilers(
        self, jobs: dict[int, tuple[Job, str]], target: str, log: str, seconds: float, reserved: int
    ) -> Compilers:
        body = serve(compile_config(jobs, target, graph_writer(log)))
        number = min(max((os.cpu_count() or 1) - reserved, 1), _MOST_COMPILERS)
        return Compilers([Worker(body, seconds) for _ in range(number)])

    def measurers(
        self, jobs: Sequence[Job], place: TunePlace, timer: Timer, seconds: float, on_gpu: bool
    ) -> Iterator[list[Worker]]:
        yield [Worker(serve_world(jobs, place, timer), seconds)]

    def close(self) -> None:
        """Do nothing, since its processes were ended one by one."""


def _where(measurers: Sequence[Worker]) -> Where:
    """Open the worlds, which takes a while. Return what they run on."""
    for measurer in measurers:
        measurer.submit(WHERE)
    replies: list[Where | Failure] = [measurer.wait() for measurer in measurers]
    for reply in replies:
        if isinstance(reply, Failure):
            raise SundogError(f"a world that measures could not be opened: {reply.error}")
        if _kind(reply) != _kind(replies[0]):
            raise SundogError(
                f"two GPUs of one kind differ: {_kind(replies[0])} and {_kind(reply)}. Their times "
                "would be one run's: give Ray's nodes the accelerator types that they have."
            )
    return replies[0]  # type: ignore[return-value]  # each was looked at


def _kind(where: Any) -> str:
    return f"{where.target}, {where.arch}, {where.num_sms} SMs of a rank"
