"""All timings of a Helion measurement, where Helion keeps their median only.

Helion times a configuration in a worker process and sends back the median. The job here is the
same measurement with every timing sent back: the search sees the same median, nothing runs longer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import Any

from helion.autotuner.benchmark_job import BenchmarkJob, _load_compiled_fn_for_worker
from helion.autotuner.benchmark_provider import LocalBenchmarkProvider
from helion.autotuner.benchmark_worker import BenchmarkWorker, BenchmarkWorkerDied
from helion.autotuner.benchmarking import _positive_median, do_bench, do_bench_generic
from helion.autotuner.kernel_args import load_private_kernel_args, load_trusted_kernel_args
from helion.autotuner.logger import capture_output
from helion.autotuner.precompile_future import _unload_compiled_fn

from .node_values import warn_once

__all__ = ["Samples", "recording_provider"]


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
