"""Collect the dataset from Helion: from a bound kernel, or from an ordinary tuning run.

    @helion.kernel(autotuner_fn=record_autotuning("runs/softmax"))
    def softmax(x): ...

    softmax(x)                              # tunes as always, and leaves the three files

    collect(softmax, (x,), "runs/softmax")  # no tuning: what the kernel is, and its IR

The hook sets two attributes on Helion's search object: the logger, to which Helion reports every
result, and the benchmark provider's class, to keep all timings beside their median.
Nothing is patched, and nothing here may break the tuning: what fails is one warning and a null.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch.distributed as dist
from helion.autotuner.benchmark_job import BenchmarkJob, _load_compiled_fn_for_worker
from helion.autotuner.benchmark_provider import LocalBenchmarkProvider
from helion.autotuner.benchmark_worker import BenchmarkWorker, BenchmarkWorkerDied
from helion.autotuner.benchmarking import _positive_median, do_bench, do_bench_generic
from helion.autotuner.kernel_args import load_private_kernel_args, load_trusted_kernel_args
from helion.autotuner.logger import AutotuneLogEntry, AutotuningLogger, capture_output
from helion.autotuner.precompile_future import _unload_compiled_fn
from helion.autotuner.search_space_logger import canonical_config_id
from helion.runtime.settings import default_autotuner_fn

from ..identity import RunInfo, describe_run
from ..ir_graph import IrGraphRecord
from ..recorder import Recorder, Trial
from . import CODEGEN_SETTINGS
from .device_ir import extract_ir_graph
from .node_values import warn_once

Base = str | os.PathLike[str]


def collect(kernel: Any, args: Sequence[object], base: Base) -> str | None:
    """Write what `kernel` is and its IR graph, without tuning; return the run_id, or None.

    `kernel` is a Helion kernel or a bound one. The CSV gets no row: nothing was measured.
    """
    bound = _quietly("bind the kernel", lambda: _bind(kernel, args))
    described = None if bound is None else describe(bound, args)
    if described is None:
        return None
    info, graph = described
    with Recorder(base, info, graph=graph) as recorder:
        return recorder.run_id


def _bind(kernel: Any, args: Sequence[object]) -> Any:
    return kernel if hasattr(kernel, "host_function") else kernel.bind(args)


def describe(
    bound: Any, args: Sequence[object], **settings: object
) -> tuple[RunInfo, IrGraphRecord | None] | None:
    """Return what identifies a bound kernel with these arguments, and its graph if it has one."""
    info = _quietly("describe the kernel", lambda: _run_info(bound, args, settings))
    if info is None:
        return None
    graph = _quietly("record the IR", lambda: _graph(bound, info))
    return info, graph


def _run_info(bound: Any, args: Sequence[object], more: dict[str, object]) -> RunInfo:
    kernel = bound.kernel
    names = list(kernel.signature.parameters)
    values = kernel.normalize_args(*args)
    settings = bound.settings.to_dict()
    return describe_run(
        kernel,
        dict(zip(names, values, strict=True)),
        codegen_settings={name: settings.get(name) for name in CODEGEN_SETTINGS},
        settings={**settings, **more},
        world=dist.get_world_size() if _is_distributed() else 1,
        backend=f"helion/{bound.env.backend.name}",
        kernel_name=kernel.name,
    )


def _graph(bound: Any, info: RunInfo) -> IrGraphRecord:
    return extract_ir_graph(
        bound.host_function.device_ir,
        run_id=info.run_id,
        kernel_id=info.kernel_id,
        kernel_name=info.kernel_name,
        input_shapes=info.input_shapes(),
        env=bound.env,
    )


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _quietly(what: str, work: Callable[[], Any]) -> Any:
    """`work()`; or None, and one warning."""
    try:
        return work()
    except Exception as error:
        warn_once(f"could not {what}: {type(error).__name__}: {error}")
        return None


def record_autotuning(base: Base, inner: Callable[..., Any] = default_autotuner_fn) -> Any:
    """Make an `autotuner_fn` for `@helion.kernel` that records the search of `inner` on `base`.

    A result from Helion's cache of best configurations runs no search and leaves no rows, and
    neither does choosing among `configs=[...]`, for which Helion does not ask `autotuner_fn`.
    """

    def autotuner_fn(bound_kernel: Any, args: Sequence[object], **options: object) -> Any:
        autotuner = inner(bound_kernel, args, **options)
        _quietly("attach to Helion's autotuner", lambda: _attach_all(autotuner, base))
        return autotuner

    return autotuner_fn


def _attach_all(autotuner: Any, base: Base) -> None:
    """Attach to the search inside a cache, and to those that best-of-k makes."""
    if _is_distributed() and dist.get_rank() != 0:
        return  # the ranks tune in lockstep: one of them writes
    _attach(getattr(autotuner, "autotuner", autotuner), base)
    factory = getattr(autotuner, "_autotuner_factory", None)
    if factory is not None:
        autotuner._autotuner_factory = lambda: _attach(factory(), base)


def _attach(search: Any, base: Base) -> Any:
    samples = Samples()
    search.log = log = RecordingLogger(search, base, samples)
    provider = search._benchmark_provider_cls
    search._benchmark_provider_cls = recording_provider(provider, samples, log.record_results)
    return search


class RecordingLogger(AutotuningLogger):
    """Helion's logger, which every result passes, with a recorder for the time of a search."""

    def __init__(self, search: Any, base: Base, samples: Samples) -> None:
        super().__init__(search.settings)
        self._search = search
        self._base = base
        self._samples = samples
        self._recorder: Recorder | None = None
        self._ir_id: str | None = None
        self._trials: dict[str, Trial] = {}
        self._messages: list[str] = []
        self._last_started = ""
        self._reported: set[str] = set()  # config ids with an entry in this batch

    @property
    def trace_enabled(self) -> bool:
        # Helion leaves out re-measurements and configurations that it filters unless it traces.
        return self._recorder is not None or super().trace_enabled

    @property
    def _timer(self) -> str:
        # A provider that does not measure says so: `timer = "synthetic"`.
        return str(getattr(self._search._benchmark_provider_cls, "timer", "helion"))

    def register_config(self, config: Any) -> str | None:
        found = super().register_config(config)
        if found is None and self._recorder is not None:
            return _quietly("name a config", lambda: canonical_config_id(config))
        return found

    @contextmanager
    def autotune_tracing(self, algorithm: str) -> Iterator[None]:
        """Helion is in here while it searches: the run starts and ends with it."""
        self._recorder = _quietly("start the record", lambda: self._open(algorithm))
        try:
            with super().autotune_tracing(algorithm):
                yield
        except BaseException as error:
            self._close(f"{type(error).__name__}: {error}")
            raise
        self._close(None)

    def record_trace_entry(self, entry: Any, *, event: str | None = None) -> None:
        super().record_trace_entry(entry, event=event)
        if self._recorder is not None:
            self._reported.add(entry.config_id)
            _quietly("record a row", lambda: self._row(entry, event))

    def record_results(self, results: list[Any]) -> None:
        """Record what a provider does not log: what no entry came for since the last batch."""
        for result in results:
            _quietly("record a result", functools.partial(self._result, result))
        self._reported.clear()

    def __call__(self, *msg: Any, **options: Any) -> None:
        # The reason of a failure is only in what Helion says about it.
        texts = [m for m in msg if isinstance(m, str)]
        self._messages = (self._messages + texts)[-20:]
        super().__call__(*msg, **options)

    def _result(self, result: Any) -> None:
        config_id = self.register_config(result.config)
        if self._recorder is not None and config_id not in self._reported:
            self._row(_entry(result, config_id), None)

    def _open(self, algorithm: str) -> Recorder | None:
        provider = self._search._benchmark_provider_cls
        found = describe(
            self._search.kernel,
            self._search.args,
            search_algorithm=algorithm,
            benchmark_provider=getattr(provider, "__qualname__", None),
            timer=self._timer,
        )
        if found is None:
            return None
        info, graph = found
        self._ir_id = None if graph is None else graph["ir_id"]
        return Recorder(self._base, info, graph=graph)

    def _close(self, error: str | None) -> None:
        recorder, self._recorder = self._recorder, None
        self._trials = {}
        if recorder is not None:
            recorder.close(error)

    def _row(self, entry: Any, event: str | None) -> None:
        assert self._recorder is not None
        trial = self._trials.get(entry.config_id)
        if entry.status == "started" or trial is None:
            trial = self._trials[entry.config_id] = self._start(entry)
        if entry.status == "started":
            self._messages, self._last_started = [], entry.config_id
        if entry.status != "started":
            ok = entry.status == "ok"
            trial.end(
                entry.status,
                perf_ms=entry.perf_ms if ok else None,  # a deduplicated one was not measured
                samples=self._samples.take(entry.perf_ms) if ok else (),
                compile_time_s=entry.compile_time,
                error=None if ok else self._reason(entry, trial),
                ir_id=self._ir_id,
                timer=self._timer,
                metrics={"event": event} if event else None,
            )

    def _start(self, entry: Any) -> Trial:
        assert self._recorder is not None
        kernel, settings = self._search.kernel, self._search.settings
        text = _quietly(
            "format a config", lambda: kernel.format_kernel_decorator(entry.config, settings)
        )
        return self._recorder.start(
            entry.config.config, decorator=text or "", generation=entry.generation
        )

    def _reason(self, entry: Any, trial: Trial) -> str:
        """Return the error at hand, or Helion's last message about this configuration."""
        error = sys.exc_info()[1]
        if error is not None:
            return f"{type(error).__name__}: {error}"
        names = [n for n in (trial.decorator, repr(entry.config)) if n]
        words = [m for m in self._messages if any(n in m for n in names)]
        if not words and self._last_started == entry.config_id:
            words = self._messages  # all of them since it was started
        text = words[-1] if words else f"{entry.status}: Helion gives no reason"
        return functools.reduce(lambda t, name: t.replace(name, "..."), names, text)


def _entry(result: Any, config_id: str | None) -> Any:
    """Turn a BenchmarkResult into the log entry that Helion's own provider makes of it."""
    perf = result.perf if math.isfinite(result.perf) else None
    return AutotuneLogEntry(
        generation=None,
        status=result.status,
        perf_ms=perf,
        compile_time=result.compile_time,
        config_id=config_id or "",
        config=result.config,
    )


# All timings of a measurement. Helion times a configuration in a worker process and sends back the
# median. The job here is the same measurement with every timing sent back: the search sees the same
# median, and nothing runs longer.


class Samples:
    """Timings that wait for their row, found by their median: the number that Helion reports."""

    def __init__(self) -> None:
        self._waiting: defaultdict[float, deque[list[float]]] = defaultdict(deque)

    def put(self, times: list[float]) -> float:
        middle = float(median(times))
        self._waiting[middle].append(times)
        return middle

    def take(self, middle: float | None) -> list[float]:
        waiting = self._waiting.get(middle) if middle is not None else None
        return waiting.popleft() if waiting else []


@dataclasses.dataclass
class SampledJob(BenchmarkJob):
    """Helion's job with return_mode="all"; runs in Helion's worker process."""

    def __call__(self) -> Any:
        with capture_output():
            fn = _load_compiled_fn_for_worker(self.fn_spec)
            try:
                if self.args_slot is None:
                    args = load_trusted_kernel_args(self.args_path)
                else:
                    args = load_private_kernel_args(self.args_path, self.args_slot)
                bench: Any = do_bench_generic if self.use_wall_clock else do_bench
                times = bench(
                    functools.partial(fn, *args),
                    return_mode="all",
                    warmup=self.warmup,
                    rep=self.rep,
                    fixed_repetitions=self.fixed_repetitions,
                    probe_long_kernel=self.probe_long_kernel,
                )
                return _comparable(times)
            finally:
                _unload_compiled_fn(fn)


def _comparable(times: Any) -> Any:
    """Return the timings if their median is the number that Helion reports; else that number."""
    if not isinstance(times, (list, tuple)):
        return times  # Helion's wall-clock timer knows no "all" and gives the median
    if median(times) <= 0:  # a cache flush was subtracted; Helion has a rule for this
        return float(_positive_median(list(times)))
    return [float(t) for t in times]


class SamplingWorker(BenchmarkWorker):
    """Runs a timing job as a SampledJob; everything else, and everything that fails, as Helion."""

    def __init__(self, samples: Samples) -> None:
        super().__init__(device=None)
        self._samples = samples
        self._works: bool | None = None

    def run(self, job: Any, timeout: float) -> Any:
        if type(job) is not BenchmarkJob or self._works is False:
            return super().run(job, timeout)
        fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job)}
        try:
            times = super().run(SampledJob(**fields), timeout)
        except (BenchmarkWorkerDied, ImportError) as error:
            if self._works:
                raise
            # The worker may not find sundog: then Helion's own job must do.
            result = super().run(job, timeout)
            self._works = False
            warn_once(f"only medians of Helion's timings are recorded: {error}")
            return result
        self._works = True
        return self._samples.put(times) if isinstance(times, list) else times


def recording_provider(
    provider_cls: Any, samples: Samples, on_results: Callable[[list[Any]], None]
) -> Any:
    """Make a subclass that keeps all timings of Helion's own provider, and reports any other's.

    Helion's provider reports to the logger as it goes; one of the user's may not, so its results
    are handed to `on_results` when a batch is done.
    """
    if not isinstance(provider_cls, type):
        return provider_cls
    base: Any = provider_cls

    class Sampling(base):
        def _run_subprocess_benchmark_job(self, fn: Any, **options: Any) -> Any:
            if self._benchmark_worker is None:
                self._benchmark_worker: Any = SamplingWorker(samples)
            return super()._run_subprocess_benchmark_job(fn, **options)

    class Telling(base):
        def benchmark(self, configs: list[Any], **options: Any) -> Any:
            results = super().benchmark(configs, **options)
            on_results(results)
            return results

    made: type = Sampling if issubclass(base, LocalBenchmarkProvider) else Telling
    made.__name__ = made.__qualname__ = base.__name__
    return made
