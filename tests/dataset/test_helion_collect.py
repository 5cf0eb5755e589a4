"""Collecting from Helion on a CPU. Times are invented here, and every row must say so."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("helion")

import helion
import helion_kernels
import torch
from helion.autotuner import search_algorithms
from helion.autotuner.benchmark_job import BenchmarkJob
from helion.autotuner.benchmark_provider import (
    BenchmarkProvider,
    BenchmarkResult,
    LocalBenchmarkProvider,
)
from helion.autotuner.benchmark_worker import BenchmarkWorker, BenchmarkWorkerDied
from helion.autotuner.benchmarking import _positive_median
from helion.autotuner.effort_profile import get_effort_profile
from helion.runtime.kernel import BoundKernel
from helion_kernels import CASES

import sundog.dataset.helion.collector as collector
from sundog.dataset.helion import collect, describe, record_autotuning
from sundog.dataset.helion.collector import SampledJob, Samples, SamplingWorker, _comparable
from sundog.dataset.helion.device_rebuild import differences
from sundog.dataset.helion.node_values import warn_once
from sundog.dataset.reader import read
from sundog.dataset.validate import validate

FIVE = ["add", "softmax", "layer_norm", "matmul", "attention"]


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    # More finalists would be timed by Triton's own do_bench, which needs a GPU.
    monkeypatch.setenv("HELION_AUTOTUNE_FINAL_REBENCHMARK_TOP_K", "1")
    warn_once.cache_clear()


def invented_ms(config: Any) -> float:
    """A number that depends on the config alone; inf for one config in seven."""
    digest = int(hashlib.sha256(repr(config).encode()).hexdigest()[:6], 16)
    return math.inf if digest % 7 == 0 else 1 + digest / 2**24


class SyntheticProvider(LocalBenchmarkProvider):
    """Helion's own provider, with its logging and its code generation, but no measurement."""

    timer = "synthetic"

    def _compute_baseline(self) -> Any:
        return None, [], None

    def _compute_effective_tolerances(self) -> tuple[float, float]:
        return 0.0, 0.0

    def _decide_num_jobs(self) -> int:
        return 1

    def _benchmark_function(self, config: Any, fn: Any, **options: Any) -> float:
        perf = invented_ms(config)
        if math.isinf(perf):
            self.log.debug("Benchmarking failed: invented failure")
        return perf

    def benchmark_isolated(self, *args: Any, **options: Any) -> None:
        return None


class SilentProvider(BenchmarkProvider):
    """A provider of a user's own, which tells the logger nothing."""

    timer = "synthetic"
    mutated_arg_indices: Sequence[int] = ()

    def __init__(self, **context: Any) -> None:
        pass

    def benchmark(self, configs: list[Any], **options: Any) -> list[Any]:
        times = [invented_ms(c) for c in configs]
        return [
            BenchmarkResult(c, lambda *a: None, t, "ok" if math.isfinite(t) else "error", 0.25)
            for c, t in zip(configs, times, strict=True)
        ]

    def setup(self) -> None:
        pass

    def cleanup(self) -> None:
        pass


def synthetic(
    bound: Any,
    args: Any,
    algorithm: str = "RandomSearch",
    provider: Any = SyntheticProvider,
    **options: Any,
) -> Any:
    """A search without a cache, which needs a GPU's name, and with invented times."""
    cls = search_algorithms[algorithm]
    if algorithm == "RandomSearch":
        options = {"count": 12, **options}
    else:
        profile = cls.get_kwargs_from_profile(get_effort_profile("quick"), bound.settings)
        wanted = cls.__init__.__code__.co_varnames
        options = {**{k: v for k, v in profile.items() if k in wanted}, **options}
    search = cls(bound, args, **options)
    search._benchmark_provider_cls = provider
    return search


def fresh(name: str = "add") -> tuple[Any, Any]:
    """A kernel of its own, so that settings do not leak from one test to the next."""
    kernel, args = CASES[name]()
    kernel = helion.kernel(kernel.fn, static_shapes=True, autotune_log_level=0)
    kernel.settings.autotune_precompile = None
    kernel.settings.autotune_benchmark_subprocess = False
    kernel.settings.autotune_effort = "quick"
    kernel.settings.autotune_progress_bar = False
    kernel.settings.autotune_random_seed = 7
    kernel.settings.autotune_log_level = 100
    return kernel, args


def tune(base: Any, name: str = "add", inner: Any = synthetic, **settings: Any) -> Any:
    kernel, args = fresh(name)
    for key, value in settings.items():
        setattr(kernel.settings, key, value)
    kernel.settings.autotuner_fn = record_autotuning(base, inner)
    return kernel.bind(args).autotune(args)


def checked(base: Any) -> Any:
    data = read(base)
    report = validate(data)
    assert report.damage == []
    return data


# ---- a tuning run leaves the three files


@pytest.mark.parametrize("algorithm", ["RandomSearch", "LFBOTreeSearch", "PatternSearch"])
def test_an_ordinary_tuning_run_leaves_three_files_that_join(
    tmp_path: Path, algorithm: str
) -> None:
    base = tmp_path / "run.v1"
    best = tune(base, inner=functools.partial(synthetic, algorithm=algorithm))
    assert sorted(p.name for p in tmp_path.glob("run*")) == [
        "run.v1.csv",
        "run.v1.ir.jsonl",
        "run.v1.meta.jsonl",
    ]
    data = checked(base)
    (run,) = data.runs.to_dict("records")
    assert run["settings"]["search_algorithm"] == algorithm
    assert run["kernel_name"] == "add"
    ended = data.rows[data.rows.status != "started"]
    assert len(data.rows) == 2 * len(ended) >= 20
    assert {"ok"} <= set(ended.status) <= {"ok", "error"}  # some configs fail, if they are drawn
    assert set(ended.ir_id) == {run["ir_id"]}
    times = {row.config: row.perf_ms for row in ended.itertuples() if row.status == "ok"}
    chosen = json.dumps(best.config, sort_keys=True, separators=(",", ":"))
    assert times[chosen] == min(times.values()) == pytest.approx(run["best_perf_ms"], abs=1e-6)
    for config, perf in times.items():
        assert perf == pytest.approx(invented_ms(helion.Config(**json.loads(config))), abs=1e-6)


def test_invented_times_are_marked(tmp_path: Path) -> None:
    tune(tmp_path / "b")
    data = checked(tmp_path / "b")
    ended = data.rows[data.rows.status != "started"]
    assert set(ended.timer) == {"synthetic"}
    assert data.runs.settings[0]["timer"] == "synthetic"
    assert data.runs.settings[0]["benchmark_provider"] == "SyntheticProvider"


def test_failures_are_rows_with_a_reason(tmp_path: Path) -> None:
    tune(tmp_path / "b", inner=functools.partial(synthetic, count=30))
    rows = checked(tmp_path / "b").rows
    failed = rows[rows.status == "error"]
    assert set(failed.error) == {"Benchmarking failed: invented failure"}
    assert failed.perf_ms.isna().all()
    assert rows[rows.status == "ok"].error.fillna("").eq("").all()


def test_a_config_that_does_not_compile_is_a_row_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = BoundKernel.compile_config

    def compile_config(self: Any, config: Any = None, **options: Any) -> Any:
        if config is not None and config.num_warps == 4:
            raise RuntimeError(f"no code for {self.format_kernel_decorator(config, self.settings)}")
        return real(self, config, **options)

    monkeypatch.setattr(BoundKernel, "compile_config", compile_config)
    tune(tmp_path / "b", inner=functools.partial(synthetic, count=30))
    rows = checked(tmp_path / "b").rows
    ended = rows[rows.status != "started"]
    four = ended[[json.loads(c)["num_warps"] == 4 for c in ended.config]]
    assert len(four) > 0
    assert set(four.status) == {"error"}
    for row in four.itertuples():
        assert row.error == f"RuntimeError: no code for {row.decorator}"


def test_filtered_configs_are_rows(tmp_path: Path) -> None:
    tune(
        tmp_path / "b",
        inner=functools.partial(synthetic, count=30),
        autotune_config_filter=lambda c: None if c.num_warps > 8 else c,
    )
    ended = checked(tmp_path / "b").rows.query("status != 'started'")
    for row in ended.itertuples():
        assert (row.status == "filtered") == (json.loads(row.config)["num_warps"] > 8)
    assert (ended.status == "filtered").any()


def test_gap_9_remeasurements_are_rows(tmp_path: Path) -> None:
    again: list[int] = []

    def bench(fns: Any, repeat: int, desc: str | None = None) -> list[float]:
        again.append(len(fns))
        return [0.5 + i / 100 for i in range(len(fns))]

    tune(
        tmp_path / "b",
        inner=functools.partial(synthetic, algorithm="PatternSearch"),
        autotune_benchmark_fn=bench,
        autotune_rebenchmark_threshold=1.5,
    )
    rows = checked(tmp_path / "b").rows
    repeated = rows[rows.repeat > 0]
    assert sum(again) == len(repeated) > 0
    assert repeated.perf_ms.between(0.5, 1).all()
    first = rows[(rows.repeat == 0) & (rows.status == "ok")]
    assert set(repeated.sample_id) <= set(first.sample_id)
    assert {json.loads(m)["event"] for m in repeated.metrics} == {"rebenchmark"}


def test_a_provider_that_does_not_log_is_recorded_too(tmp_path: Path) -> None:
    inner = functools.partial(synthetic, provider=SilentProvider)
    tune(tmp_path / "b", inner=inner)
    ended = checked(tmp_path / "b").rows.query("status != 'started'")
    assert len(ended) == 12
    assert set(ended.compile_time_s) == {0.25}
    assert set(ended.timer) == {"synthetic"}


def test_two_runs_share_a_base_and_their_graph(tmp_path: Path) -> None:
    for _ in range(2):
        tune(tmp_path / "b")
    tune(tmp_path / "b", name="softmax")
    data = checked(tmp_path / "b")
    assert len(data.runs) == 3
    assert data.runs.run_id.nunique() == 2
    assert len(data.graphs) == 2


# ---- nothing breaks, nothing changes


def test_the_hook_does_not_change_what_helion_finds(tmp_path: Path) -> None:
    plain, args = fresh()
    plain.settings.autotuner_fn = functools.partial(synthetic, algorithm="PatternSearch")
    expected = plain.bind(args).autotune(args)
    found = tune(tmp_path / "b", inner=functools.partial(synthetic, algorithm="PatternSearch"))
    assert found == expected


def test_helion_s_own_log_is_written_as_before(tmp_path: Path) -> None:
    tune(tmp_path / "ours", autotune_log=str(tmp_path / "theirs"))
    theirs = (tmp_path / "theirs.csv").read_text().splitlines()
    assert len(theirs) == 1 + len(read(tmp_path / "ours").rows)


_BROKEN = {
    "extract_ir_graph": "extract_ir_graph",
    "describe_run": "describe_run",
    "Recorder": "Recorder",
    "canonical_config_id": "canonical_config_id",
    "recording_provider": "recording_provider",
    "AutotuneLogEntry": "_entry",
}


@pytest.mark.parametrize("what", _BROKEN)
def test_whatever_fails_in_the_collection_the_tuning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(collector, _BROKEN[what], fail)
    provider = SilentProvider if what == "AutotuneLogEntry" else SyntheticProvider
    with pytest.warns(RuntimeWarning, match="broken on purpose") as caught:
        best = tune(tmp_path / "b", inner=functools.partial(synthetic, provider=provider))
    assert math.isfinite(invented_ms(best))
    assert len([w for w in caught if "broken on purpose" in str(w.message)]) == 1
    if what == "extract_ir_graph":
        data = checked(tmp_path / "b")
        assert data.runs.ir_id.isna().all()
        assert not (tmp_path / "b.ir.jsonl").exists()
        assert len(data.rows) == 24


def test_a_row_that_fails_is_left_out_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = collector.RecordingLogger._reason

    def reason(self: Any, entry: Any, trial: Any) -> str:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(collector.RecordingLogger, "_reason", reason)
    with pytest.warns(RuntimeWarning, match="could not record a row"):
        tune(tmp_path / "b", inner=functools.partial(synthetic, count=30))
    assert real is not reason
    assert set(read(tmp_path / "b").rows.status) == {"started", "ok"}


def test_an_unwritable_base_does_not_break_tuning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    best = tune(tmp_path / "file" / "b")
    assert math.isfinite(invented_ms(best))


def test_a_search_that_dies_leaves_its_rows_and_the_error(tmp_path: Path) -> None:
    class Dying(SyntheticProvider):
        def _benchmark_function(self, config: Any, fn: Any, **options: Any) -> float:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 5:
                raise KeyboardInterrupt
            return 1.0

    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "b", inner=functools.partial(synthetic, provider=Dying))
    data = checked(tmp_path / "b")
    assert Counter(data.rows.status) == {"started": 5, "ok": 4}
    assert "KeyboardInterrupt" in data.runs.error[0]


def test_caches_and_best_of_k_are_recorded(tmp_path: Path) -> None:
    kernel, args = fresh()
    bound = kernel.bind(args)
    cache = SimpleNamespace(
        autotuner=synthetic(bound, args), _autotuner_factory=lambda: synthetic(bound, args)
    )
    record_autotuning(tmp_path / "b", lambda *a, **k: cache)(bound, args)
    cache.autotuner.autotune()
    cache._autotuner_factory().autotune()
    data = checked(tmp_path / "b")
    assert (len(data.runs), data.runs.run_id.nunique(), len(data.rows)) == (2, 1, 48)


# ---- identity


def test_gap_7_runs_with_another_ir_have_another_id() -> None:
    x, y = torch.zeros(64, 32, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)
    kernel = helion_kernels.matmul

    def ids(*args: Any) -> tuple[str, str]:
        found = describe(kernel.bind(args), args)
        assert found is not None
        info, graph = found
        assert graph is not None
        return info.run_id, graph["ir_id"]

    plain = ids(x, y)
    assert ids(x, y) == plain
    variants = [
        plain,
        ids(x, torch.zeros(64, 32, dtype=torch.float16).t()),
        ids(x, y, lambda acc: torch.relu(acc)),
        ids(x, y, lambda acc: torch.relu(acc) * 2),
    ]
    assert len({run_id for run_id, _ in variants}) == len(variants)
    assert len({ir_id for _, ir_id in variants}) == len(variants)


def test_gap_7_settings_that_change_the_code_change_the_id() -> None:
    ids = set()
    for settings in ({}, {"fast_math": True}, {"index_dtype": torch.int64}):
        _, args = CASES["add"]()
        kernel = helion.kernel(helion_kernels.add.fn, static_shapes=True, **settings)
        found = describe(kernel.bind(args), args)
        assert found is not None
        ids.add(found[0].run_id)
    assert len(ids) == 3


# ---- collect


def test_collect_keeps_what_a_kernel_is_and_its_ir(tmp_path: Path) -> None:
    base = tmp_path / "kernels"
    bounds = {}
    for name in FIVE:
        kernel, args = CASES[name]()
        bounds[name] = kernel.bind(args)
        run_id = collect(kernel, args, base)
        assert run_id == collect(bounds[name], args, base) != ""
    data = checked(base)
    assert list(data.runs.kernel_name) == [name for name in FIVE for _ in range(2)]
    assert len(data.rows) == 0
    assert len(data.graphs) == 5
    for run in data.runs.itertuples():
        bound = bounds[run.kernel_name]
        record = data.record(run.ir_id)
        assert differences(bound.host_function.device_ir, record, env=bound.env) == []
    eps = next(a for a in data.runs.arguments[4] if a["name"] == "eps")
    assert (eps["kind"], eps["value"]) == ("value", 1e-5)


def test_collect_says_what_it_cannot_bind(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="could not bind the kernel"):
        assert collect(helion_kernels.add, ("not a tensor",), tmp_path / "b") is None
    assert not list(tmp_path.glob("b*"))


def test_collect_without_an_ir_writes_no_ir_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELION_INTERPRET", "1")
    kernel = helion.kernel(helion_kernels.add.fn)
    bound = kernel.bind((torch.zeros(4, 4), torch.zeros(4, 4)))
    assert bound.host_function is None
    with pytest.warns(RuntimeWarning, match="could not record the IR"):
        assert collect(bound, (torch.zeros(4, 4), torch.zeros(4, 4)), tmp_path / "b")
    assert not (tmp_path / "b.ir.jsonl").exists()
    assert (tmp_path / "b.meta.jsonl").exists()


# ---- all timings of a measurement


def test_samples_find_their_row_by_the_median() -> None:
    samples = Samples()
    assert samples.put([3.0, 1.0, 2.0]) == 2.0
    samples.put([2.0])
    assert [samples.take(t) for t in (None, 1.0, 2.0, 2.0, 2.0)] == [[], [], [3, 1, 2], [2], []]


def test_timings_that_helion_would_correct_stay_helion_s() -> None:
    assert _comparable([0.2, 0.1, 0.3]) == [0.2, 0.1, 0.3]
    assert _comparable([-0.1, -0.2, 0.3]) == _positive_median([-0.1, -0.2, 0.3])
    assert _comparable(0.7) == 0.7


def _job() -> BenchmarkJob:
    return BenchmarkJob(fn_spec=None, args_path="", use_wall_clock=True)  # type: ignore[arg-type]


def test_a_worker_that_cannot_sample_measures_as_helion_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[type] = []

    def run(self: Any, job: Any, timeout: float) -> float:
        jobs.append(type(job))
        if type(job) is SampledJob:
            raise BenchmarkWorkerDied("no module named sundog")
        return 1.5

    monkeypatch.setattr(BenchmarkWorker, "run", run)
    worker = SamplingWorker(Samples())
    with pytest.warns(RuntimeWarning, match="only medians"):
        assert worker.run(_job(), 1.0) == 1.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert worker.run(_job(), 1.0) == 1.5
    assert jobs == [SampledJob, BenchmarkJob, BenchmarkJob]


def test_a_worker_that_dies_later_is_a_failure_as_in_helion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [[2.0, 1.0, 4.0], BenchmarkWorkerDied("crashed kernel")]

    def run(self: Any, job: Any, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(BenchmarkWorker, "run", run)
    samples = Samples()
    worker = SamplingWorker(samples)
    assert worker.run(_job(), 1.0) == 2.0
    assert samples.take(2.0) == [2.0, 1.0, 4.0]
    with pytest.raises(BenchmarkWorkerDied):
        worker.run(_job(), 1.0)


class MeasuringProvider(LocalBenchmarkProvider):
    """Helion's own provider, job and worker process; only the reference output is left out."""

    timer = "synthetic"  # a CPU's wall-clock time of an interpreter: no figure of the kernel

    def _compute_baseline(self) -> Any:
        return None, [], None

    def _compute_effective_tolerances(self) -> tuple[float, float]:
        return 0.0, 0.0

    def _subprocess_benchmark_uses_wall_clock(self) -> bool:
        return True


def _measure(base: Path) -> Any:
    kernel, args = fresh()
    kernel.settings.autotune_benchmark_subprocess = True
    kernel.settings.autotune_accuracy_check = False
    kernel.settings.autotune_benchmark_timeout = 200  # a worker imports helion: slow on a busy CPU
    small = tuple(torch.ones(16, 16) for _ in args)
    inner = functools.partial(synthetic, provider=MeasuringProvider, count=2)
    kernel.settings.autotuner_fn = record_autotuning(base, inner)
    kernel.bind(small).autotune(small)
    return checked(base).rows.query("status == 'ok'")


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_job_runs_in_helion_s_worker_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # inherited by the worker
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # "only medians": it must not come to that
        ok = _measure(tmp_path / "b")
    assert len(ok) >= 1
    assert (ok.perf_ms > 0).all()
    assert ok.num_samples.isna().all()  # the wall-clock timer has the median only


def test_gap_9_all_timings_of_a_measurement_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bench(fn: Any, return_mode: str, **options: Any) -> list[float]:
        assert return_mode == "all"
        return [5.0, 1.0, 3.0, 2.0, 4.0]

    # The job in this process, with a timer like the one on GPUs.
    monkeypatch.setattr(BenchmarkWorker, "run", lambda self, job, timeout: job())
    monkeypatch.setattr("sundog.dataset.helion.collector.do_bench_generic", bench)
    ok = _measure(tmp_path / "b")
    assert len(ok) == 2
    for row in ok.itertuples():
        assert row.num_samples == 5
        assert (row.min_ms, row.p50_ms, row.max_ms, row.perf_ms) == (1, 3, 5, 3)
