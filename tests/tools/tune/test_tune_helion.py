"""Tuning a Helion kernel with the model: Helion's own search machinery, with invented times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("helion")
import helion
import helion.language as hl
import torch
from helion import exc
from helion.autotuner.benchmark_provider import BenchmarkProvider, BenchmarkResult
from helion.runtime.kernel import BoundKernel

import sundog
from sundog.dataset.helion import record_autotuning
from sundog.dataset.reader import read
from sundog.dataset.validate import validate
from sundog.learn import kernel_model
from sundog.tools._pool import Failure
from sundog.tools.tune import tune_helion as tuning


@helion.kernel(static_shapes=True, autotune_log_level=100)
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = x[tile] + y[tile]
    return out


class Provider(BenchmarkProvider):
    """Likes few warps; fails where `fails` says so."""

    timer = "synthetic"
    mutated_arg_indices: Sequence[int] = ()
    asked: list[list[Any]]
    fails: bool = False

    def __init__(self, **context: Any) -> None: ...

    def setup(self) -> None: ...

    def cleanup(self) -> None: ...

    def benchmark(self, configs: list[Any], **options: Any) -> list[Any]:
        self.asked.append(configs)
        time, status = (math.inf, "error") if self.fails else (None, "ok")
        return [
            BenchmarkResult(c, lambda *a: None, time or 1e-3 * c["num_warps"], status, 0.1)
            for c in configs
        ]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Provider]:
    """A machine whose GPU the model knows, with a clock of its own."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    made = type("Made", (Provider,), {"asked": []})
    monkeypatch.setattr(tuning, "key_of", lambda device: "nvidia-h200")
    monkeypatch.setattr(helion.runtime, "get_num_sm", lambda device, **options: 132)
    first = tuning.ModelSearch.__init__

    def with_provider(search: Any, *args: Any) -> None:
        first(search, *args)
        search._benchmark_provider_cls = made

    monkeypatch.setattr(tuning.ModelSearch, "__init__", with_provider)
    return made


def tuned(base: Path | None, budget: int) -> Any:
    inner = sundog.tune_helion(budget)
    kernel = helion.kernel(add.fn, static_shapes=True, autotune_log_level=100)
    kernel.settings.autotune_progress_bar = False
    kernel.settings.autotune_random_seed = 7
    kernel.settings.autotuner_fn = record_autotuning(base, inner) if base else inner
    args = (torch.ones(1000, 300), torch.ones(1000, 300))
    return kernel.bind(args).autotune(args)


def test_the_model_proposes_and_each_measurement_is_a_row(
    provider: type[Provider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those first that the model likes; the best of them is the result."""
    scored: list[list[Any]] = []
    shipped = kernel_model.predict

    def predict(known: list[Any], target: str) -> list[float] | None:
        scored.append(known)
        return shipped(known, target)

    monkeypatch.setattr(tuning, "predict", predict)
    best = tuned(tmp_path / "add", 2)
    (asked,) = provider.asked
    assert len(asked) == 2
    assert best["num_warps"] == min(config["num_warps"] for config in asked)
    _, drawn, compiled = scored
    assert 1 < len(compiled) <= 4 * 2 < len(drawn) <= 8 * 2
    assert all(each["registers"] > 0 and "tt.store" in each["ttgir_text"] for each in compiled)
    assert len({each["grid"] for each in drawn}) > 1, "the grid is the launch's"
    assert all(each["bytes"] == 3 * 4 * 1000 * 300 for each in drawn)
    scores = shipped(compiled, "nvidia-h200")
    assert scores is not None
    liked = compiled[scores.index(min(scores))]["config"]
    assert liked["num_warps"] == asked[0]["num_warps"]
    data = read(tmp_path / "add")
    assert validate(data).damage == []
    assert (data.rows.status == "ok").sum() == 2


def test_where_every_config_fails_helion_says_so(
    provider: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None compiles ahead, and none runs: two were tried all the same."""
    failure = Failure("error", "no compiler")
    monkeypatch.setattr(tuning, "build_all", lambda launches, arch: [failure] * len(launches))
    provider.fails = True
    with pytest.raises(exc.NoConfigFound):
        tuned(None, 2)
    assert [len(configs) for configs in provider.asked] == [2]


@pytest.mark.parametrize("budget", [3, pytest.param(5, marks=pytest.mark.long), 7])
def test_five_by_the_order_then_one_at_a_time(
    provider: type[Provider], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    spaces: list[Any] = []
    search = tuning.by_model
    monkeypatch.setattr(
        tuning, "by_model", lambda space, *rest: (spaces.append(space), search(space, *rest))
    )
    tuned(None, budget)
    (space,) = spaces
    count = min(budget, 5)
    assert [len(configs) for configs in provider.asked] == [count] + [1] * (budget - count)
    assert provider.asked[0] == [point.config_ for point in space.configs[:count]]
    assert list(space.scores) == sorted(space.scores)


def test_where_no_code_runs_the_reason_is_kept(
    provider: type[Provider], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(search: Any, config: Any, **options: Any) -> Any:
        raise RuntimeError("no code for it")

    monkeypatch.setattr(BoundKernel, "compile_config", broken)
    with pytest.raises(exc.NoConfigFound) as caught:
        tuned(None, 2)
    assert str(caught.value.__cause__) == "no code for it"
    assert provider.asked == []


def test_on_another_gpu_helions_own_search_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "key_of", lambda device: "nvidia-b200")
    monkeypatch.setattr(
        tuning, "default_autotuner_fn", lambda kernel, args, **options: "Helion's own"
    )
    x = torch.ones(8)
    assert sundog.tune_helion()(add.bind((x, x)), (x, x)) == "Helion's own"
    with pytest.raises(ValueError, match="at least two"):
        sundog.tune_helion(1)
