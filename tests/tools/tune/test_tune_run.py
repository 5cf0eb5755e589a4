"""Whole tuning runs on the CPU: the op runs on the simulator, and the clock is made up."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import sundog.tools.tune.tune
from benchmarks.tuning_runs import sessions
from sundog import World, knobs
from sundog.collectives import all_gather_push
from sundog.compiled.recorded import RecordedLaunch
from sundog.dataset.reader import read
from sundog.dataset.recorder import Recorder
from sundog.dataset.triton.compile import source_of
from sundog.dataset.validate import validate
from sundog.errors import SundogError
from sundog.launch import run as launch
from sundog.ops import select
from sundog.ops.load import parse
from sundog.tools._launches import record
from sundog.tools._pool import Failure, Worker, serve
from sundog.tools.timing import Times, Variant
from sundog.tools.tune.cache import known_results
from sundog.tools.tune.compile_configs import (
    CompiledConfig,
    Compilers,
    launches_of,
    warm_cache_keys,
)
from sundog.tools.tune.evaluate import Evaluator
from sundog.tools.tune.measure import Measured, Where, _calls, _measure, _sets
from sundog.tools.tune.space import fields_text, jobs
from sundog.tools.tune.tune import TunePlace, describe_all, tune

from . import toy_op

pytestmark = pytest.mark.sim_only
OP = "tools.tune.toy_op"
SIM = Where("simulator", "sm_90", 16, {})
ON_SIM = TunePlace("sim", samples=5, final_samples=7)


def fake_clock(world: World, variants: Sequence[Variant], samples: int, calls: int) -> list[Times]:
    """Least for block=256,num_warps=2; a variant's name is its config. The last rank is slower."""
    found = []
    for variant in variants:
        config = parse(variant.name)
        for call in variant.calls:
            call()
        one = 1e-3 * (1 + abs(config["block"] - 256) / 64 + abs(config["num_warps"] - 2))
        times = [[one * (1 + 0.001 * n), 2 * one * (1 + 0.001 * n)] for n in range(samples)]
        found.append(Times(variant.name, times))
    return found


def rows(base: str) -> list[dict[str, str]]:
    with open(f"{base}.csv", newline="") as file:
        return list(csv.DictReader(file))


def check_base(base: str) -> None:
    assert validate(read(base)).damage == []


def test_the_best_is_found_and_kept(tmp_path: Path) -> None:
    base = str(tmp_path / "log")
    seen: list[tuple] = []
    (tuned,) = tune(
        OP, "numel=1000", world=2, budget=50, log=base, place=ON_SIM, timer=fake_clock,
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert tuned.config == toy_op.Config(256, 2)
    assert tuned.milliseconds == pytest.approx(2 * 1.003), "of the slowest rank, the median"
    assert (tuned.tried, tuned.failed, tuned.target) == (20, 0, "simulator")
    assert seen[-1][1:3] == (20, 20)
    assert seen[-1][3] == "best 2.0040 ms", "of the first five samples"
    ended = [row for row in rows(base) if row["status"] == "ok"]
    again = [row for row in ended if row["repeat"] == "1"]
    assert len(ended) == 20 + len(again)
    # The best five and the default; and the best five of those that compilers worked beside.
    assert 6 <= len(again) <= 11
    assert {row["num_samples"] for row in again} == {"7"}
    assert all(row["num_samples"] == "5" for row in ended if row["repeat"] == "0")
    assert all(row["timer"] == "synthetic" for row in ended)
    assert all(json.loads(row["metrics"])["registers"] > 0 for row in ended)
    check_base(base)
    data = read(base)
    assert data.runs.kernel_name.tolist() == [OP]
    assert all(len(row["ir_id"]) == 64 for row in ended)
    (session,) = sessions(base)
    assert session.is_whole
    assert (session.chosen, session.problem) == (tuned.config, "numel=1000")
    assert session.times[tuned.config] == session.best == pytest.approx(2.004)
    assert session.final[tuned.config] == pytest.approx(tuned.milliseconds)
    (entry,) = select.entries("simulator")
    assert entry.op == OP
    assert entry.problem == {"numel": 1000, "dtype": "float32", "size": 2, "bad": False}
    assert entry.config == {"block": 256, "num_warps": 2, "mode": "fine"}
    assert entry.seconds == pytest.approx(2.006e-3)
    assert entry.run == f"log {tuned.run_id[:16]}"
    assert entry.num_sms == knobs.num_sms.get()
    problem = toy_op.Problem(1000, toy_op.torch.float32, 2)
    assert select.config_for(OP, toy_op, problem, "simulator", entry.num_sms) == toy_op.Config(
        256, 2
    )


def test_what_misbehaves_costs_its_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sundog.tools.tune.tune, "_MEASURE_S", 6.0)
    base = str(tmp_path / "log")
    (tuned,) = tune(
        OP, "bad=true", world=2, budget=50, search="exhaustive", log=base, place=ON_SIM,
        timer=fake_clock,
    )  # fmt: skip
    assert tuned.config == toy_op.Config(256, 2)
    assert (tuned.tried, tuned.failed) == (27, 7)
    bad = {}
    for row in rows(base):
        mode = json.loads(row["config"])["mode"]
        if mode != "fine" and row["status"] != "started":
            bad[mode] = row["status"], row["error"], row["perf_ms"]
    assert set(bad) == set(toy_op.BAD)
    assert bad["crash"] == ("error", "the process ended with status 7", "")
    assert bad["hang"] == ("timeout", "no answer after 6 s: it hangs, and was ended", "")
    assert bad["wrong"][0] == "accuracy_error"
    assert "99 of 100 elements differ from the reference" in bad["wrong"][1] or (
        "100 of 100" in bad["wrong"][1]
    )
    assert bad["refused"][0] == "error"
    assert "this config is refused" in bad["refused"][1]
    assert "KeyError: 'a bug in this op'" in bad["raises"][1]
    assert "RuntimeError: CUDA error: an illegal memory access" in bad["fails"][1]
    assert "OutOfHeap" in bad["large"][1]
    check_base(base)


def test_a_run_is_resumed(tmp_path: Path) -> None:
    base = str(tmp_path / "log")
    options: dict[str, Any] = {"world": 2, "log": base, "place": ON_SIM, "timer": fake_clock}
    (first,) = tune(OP, budget=9, search="random", **options)
    with open(f"{base}.csv", "a") as file:
        file.write("torn")  # by a crash
    (again,) = tune(OP, budget=14, search="random", resume=True, **options)
    assert again.run_id == first.run_id
    assert (first.tried, again.tried) == (9, 14)
    # A sample of 14 begins like one of 9 does; what is known is not started again.
    sessions: dict[str, list[str]] = {}
    for row in rows(base):
        if row["status"] == "started":
            sessions.setdefault(row["session"], []).append(row["config"])
    assert len(next(iter(sessions.values()))) == 9
    latest = rows(base)[-1]["session"]
    searched = [r for r in rows(base) if r["session"] == latest and r["generation"] == "0"]
    assert len({row["config"] for row in searched}) == 5, "nine of fourteen are known"
    known = known_results(base, first.run_id)
    assert len(known) == 14
    assert all(known.values())
    (other,) = tune(OP, "numel=99", budget=1, resume=True, **options)
    assert other.run_id != first.run_id, "another problem is another run"
    assert set(known_results(base, other.run_id)) < set(known)


def test_algorithms_with_the_same_kernel_are_other_runs() -> None:
    """One would take the other's times for its own when it is resumed."""
    problem = "numel=96,dtype=float32,src=0"
    found = [*jobs("broadcast.push", problem, 2), *jobs("scatter.push", problem, 2)]
    one, other = (each.info for each in describe_all(found, SIM, "sim", {}))
    assert one.kernel_id == other.kernel_id
    assert one.run_id != other.run_id


def test_a_record_has_no_path_of_this_machine() -> None:
    job = jobs(str(toy_op.__file__), "", 2)
    (found,) = describe_all(job, SIM, "sim", {})
    assert found.info.kernel_name == "tools/tune/toy_op.py"
    assert str(Path(__file__).parent) not in str(found.info)


def test_a_measurement_without_a_world_ends_the_run(tmp_path: Path) -> None:
    """As if the GPU had gone: five configs in a row end the process; what was measured stays."""
    base = str(tmp_path / "log")

    def gone(world: World, variants: Sequence[Variant], samples: int, calls: int) -> list[Times]:
        os._exit(9)

    with pytest.raises(SundogError, match=r"last 5 configs all ended the process.*still there"):
        tune(OP, budget=20, log=base, world=2, place=ON_SIM, timer=gone)
    assert sum(row["status"] == "error" for row in rows(base)) == 5
    check_base(base)
    assert select.entries("simulator") == ()
    (tuned,) = tune(OP, budget=20, log=base, world=2, place=ON_SIM, timer=fake_clock, resume=True)
    assert (tuned.tried, tuned.failed) == (20, 0), "those five are tried again"
    assert all(known_results(base, tuned.run_id).values())


def test_idle_compilers_work_ahead(tmp_path: Path) -> None:
    """What is likely next is compiled beside a measurement; then it is not compiled again."""

    def compiled(task: tuple[int, Any]) -> CompiledConfig | Failure:
        job, config = task
        with (tmp_path / "compiled").open("a") as file:
            file.write(f"{job} {config.block}\n")
        bad = Failure("error", "does not compile")
        return bad if config.block == 512 else CompiledConfig(0.1, {}, [])

    def measured(task: Any) -> list[Measured]:
        while (tmp_path / "compiled").read_text().count("\n") < 4:
            time.sleep(0.01)
        return [Measured([float(config.block)]) for config in task[1]]

    first, likely, bad = toy_op.Config(32), toy_op.Config(64), toy_op.Config(512)
    workers = Worker(serve(compiled), 10), Worker(serve(measured), 10)
    with Recorder(tmp_path / "log", None) as recorder:
        compilers = Compilers([workers[0]])
        evaluator = Evaluator(recorder, compilers, [workers[1]], {}, "synthetic")
        evaluator.ahead = lambda times: [likely, bad]
        evaluator.after = [(1, first)]  # the same config of another job
        assert evaluator([first], 0) == [32.0]
        assert [row["decorator"] for row in rows(str(tmp_path / "log"))] == [fields_text(first)] * 2
        assert evaluator([bad, likely], 1) == [None, 64.0]
    assert (tmp_path / "compiled").read_text().splitlines() == ["0 32", "0 64", "0 512", "1 32"]
    for worker in workers:
        worker.close()


def test_several_measurers_work_at_once(tmp_path: Path) -> None:
    def measured(task: Any) -> list[Measured]:
        (tmp_path / f"{os.getpid()} {task[1][0].block}").touch()
        while len({path.name.split()[0] for path in tmp_path.glob("* *")}) < 2:
            time.sleep(0.01)  # until the other one has a config, too
        return [Measured([float(config.block)]) for config in task[1]]

    configs = [toy_op.Config(block) for block in (32, 64, 128, 256, 512)]
    workers = [Worker(serve(measured), 10) for _ in range(2)]
    with Recorder(tmp_path / "log", None) as recorder:
        evaluator = Evaluator(recorder, Compilers([]), workers, {}, "synthetic")
        assert evaluator(configs, 0) == [32.0, 64.0, 128.0, 256.0, 512.0]
    measured_in = [path.name.split() for path in tmp_path.glob("* *")]
    assert len({pid for pid, _ in measured_in}) == 2
    assert len(measured_in) == len(configs)
    for worker in workers:
        worker.close()


def test_the_best_measured_beside_compilers_are_finalists(
    tmp_path: Path,
) -> None:
    """Which made them slower: one that did not come to the best few for that gets its chance."""

    begun, go_on = tmp_path / "begun", tmp_path / "go_on"

    def wait_for(path: Path) -> None:
        while not path.exists():
            time.sleep(0.01)

    def compiled(task: tuple[int, Any]) -> CompiledConfig:
        if task[1] == ahead:
            begun.touch()
            wait_for(go_on)
        return CompiledConfig(0.1, {}, [])

    def measured(task: Any) -> list[Measured]:
        if task[1] == [beside]:
            wait_for(begun)
            return [Measured([3.0])]
        return [Measured([1.0 if config == beside else 2.0]) for config in task[1]]

    beside, ahead, quiet, default = (toy_op.Config(block) for block in (32, 64, 128, 256))
    workers = [Worker(serve(compiled), 10) for _ in range(2)], Worker(serve(measured), 10)
    with Recorder(tmp_path / "log", None) as recorder:
        evaluator = Evaluator(recorder, Compilers(workers[0]), [workers[1]], {}, "synthetic")
        evaluator.ahead = lambda times: [ahead]
        assert evaluator([beside], 0) == [3.0]
        go_on.touch()
        for config in (ahead, quiet, default):
            assert evaluator([config], 1) == [2.0]
        evaluator.measure_again(1, default)
        assert evaluator.best == (beside, 1.0)
    for worker in (*workers[0], workers[1]):
        worker.close()


@pytest.mark.parametrize(("first_ms", "chosen"), [(0.022, 32), (0.030, 64)])
def test_those_about_as_fast_as_the_best_are_finalists(
    tmp_path: Path, first_ms: float, chosen: int
) -> None:
    """A first look is wrong by microseconds: one that read 3.5 too many may be the best."""

    def measured(task: Any) -> list[Measured]:
        if len(task[1]) == 1:
            return [Measured([first_ms if task[1] == [unlucky] else 0.0185])]
        return [Measured([0.018 if config == unlucky else 0.019]) for config in task[1]]

    unlucky, *others = (toy_op.Config(block) for block in (32, 64, 128, 256))
    world = Worker(serve(measured), 10)
    with Recorder(tmp_path / "log", None) as recorder:
        evaluator = Evaluator(recorder, Compilers([]), [world], {}, "synthetic")
        evaluator([unlucky, *others], 0)
        evaluator.measure_again(2, others[0])
        assert evaluator.best is not None
        assert evaluator.best[0].block == chosen
    world.close()


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_wrong_when_measured_again_is_no_best(tmp_path: Path, ended: bool) -> None:
    """But if all that is known is that the process ended, the first look decides."""

    def measured(task: Any) -> list[Measured]:
        if len(task[1]) == 1:
            return [Measured([float(task[1][0].block)])]
        if ended:
            os._exit(3)
        return [Measured(failure=Failure("accuracy_error", "differs"))] * len(task[1])

    configs = [toy_op.Config(block) for block in (32, 64, 128)]
    world = Worker(serve(measured), 10)
    with Recorder(tmp_path / "log", None) as recorder:
        evaluator = Evaluator(recorder, Compilers([]), [world], {}, "synthetic")
        evaluator(configs, 0)
        evaluator.measure_again(2, configs[0])
        assert evaluator.best == ((configs[0], 32.0) if ended else (configs[2], 128.0))
        assert evaluator.failed == (0 if ended else 2)
    world.close()


def test_a_finalist_that_fails_costs_no_other() -> None:
    """On one rank or on all of them: for all ranks it has failed, and in the same way."""
    (job,) = jobs(OP, "", 2)
    modes = "late", "large", "refused", "wrong", "fine"

    def all_of_them(world: World) -> list[Measured]:
        configs = [toy_op.Config(mode=mode) for mode in modes]
        return _measure(world, job, configs, _sets(world, job), ON_SIM, fake_clock)

    first, second = launch(all_of_them, 2, "sim")
    assert first == second
    *failed, fine = first
    assert len(fine.samples_ms) == ON_SIM.final_samples
    assert fine.failure is None
    told = [each.failure for each in failed if each.failure is not None]
    assert [each.status for each in told] == ["timeout", "error", "error", "accuracy_error"]
    words = "a wait ran out", "OutOfHeap", "this config is refused", "rank 0: 99 of 100"
    assert all(text in each.error for text, each in zip(words, told, strict=True)), told


def test_finalists_too_large_for_the_heap_take_turns() -> None:
    (job,) = jobs(OP, "", 2)
    timed = []

    def clock(world: World, variants: Sequence[Variant], *given: int) -> list[Times]:
        timed.append(len(variants))
        return fake_clock(world, variants, *given)

    def all_of_them(world: World) -> list[Measured]:
        configs = [toy_op.Config(block, mode="hungry") for block in (32, 64, 128, 256, 512)]
        configs.append(toy_op.Config(mode="large"))
        return _measure(world, job, configs, _sets(world, job), ON_SIM, clock)

    *fine, large = launch(all_of_them, 2, "sim", heap_size=8 << 20)[0]
    assert [len(each.samples_ms) for each in fine] == [ON_SIM.final_samples] * 5
    assert sorted(timed) == [1, 1, 2, 2, 2, 2], "on both ranks"
    assert large.failure is not None
    assert "OutOfHeap" in large.failure.error


def test_kernels_have_their_keys_before_the_processes_part() -> None:
    """A key depends on what was asked for its own before: in two processes it would be two."""
    (job,) = jobs("all_gather.push", "numel=4096,dtype=bfloat16", 2)
    kernel: Any = all_gather_push._push_kernel
    kernel.hash = None
    warm_cache_keys([job])
    assert kernel.hash is not None


@pytest.mark.parametrize("op", ["all_gather_matmul.hbm_buffer", "all_reduce.two_shot"])
def test_a_compiler_makes_the_kernel_that_is_measured(op: str) -> None:
    """Otherwise it is compiled once more, while the GPU waits: 1.5 s a config."""
    (job,) = jobs(op, "", 2)
    config = job.module.default(job.problem, 16)

    def measured(world: World) -> None:
        first = _sets(world, job)[0]
        job.module.plan(world, job.problem, config)(*first.given, first.out)

    there = record(measured, 2, 64 << 20, num_sms=16)
    assert _sources(launches_of(job, config)) == _sources(there)


def _sources(launches: list[RecordedLaunch]) -> list[str]:
    found = [source_of(each.kernel, each.args, each.kwargs, arch="sm_90") for each in launches]
    return [f"{source.hash()} {sorted(options.items(), key=str)}" for source, options in found]


def test_a_slow_config_makes_few_calls() -> None:
    (job,) = jobs("all_gather.push", "numel=4096,dtype=bfloat16", 8)
    found = [_calls(job, ON_SIM, slowest) for slowest in (0.0, 1e-3, 3e-3, 0.5)]
    assert found == [20, 10, 3, 1]
    (large,) = jobs("all_gather.push", "numel=16777216,dtype=bfloat16", 8)
    assert _calls(large, ON_SIM, 0.0) == 1


def test_behind_a_link_passive_ranks_are_not_compared(tmp_path: Path) -> None:
    place = TunePlace("sim", "pcie", samples=2)
    (tuned,) = tune(
        "all_gather.pull", "numel=64,dtype=int32", world=2, budget=1, log=str(tmp_path / "log"),
        place=place, timer=lambda world, variants, samples, calls: [
            Times(variant.name, [[1e-3, 5e-3]] * samples) for variant in variants
        ],
    )  # fmt: skip
    assert (tuned.tried, tuned.failed, tuned.error) == (1, 0, "")
    assert tuned.milliseconds == pytest.approx(1.0), "of rank 0"
