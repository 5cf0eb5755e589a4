"""Tuning a plain Triton kernel: compiled for sm_90 here, with a stand-in for the GPU's clock."""

from __future__ import annotations

import ast
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.dataset import read
from sundog.errors import SundogError
from sundog.learn import kernel_model
from sundog.tools.tune import tune_triton as tuning
from sundog.tools.tune.tune_triton import TritonTuned, tune_triton

CONFIGS = [
    triton.Config({"BLOCK_SIZE": block}, num_warps=warps, num_stages=1)
    for block in (128, 256, 512, 1024)
    for warps in (1, 2, 4)
]


@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def double_kernel(x, out, n, BLOCK_SIZE: tl.constexpr):
    at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(out + at, 2 * tl.load(x + at, at < n, other=0.0), at < n)


X = torch.zeros(4096)
ARGS = (X, X.clone(), 4096)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["BLOCK_SIZE"]),)


class Clock:
    """Takes the launch apart instead of launching: larger blocks are faster, warps cost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        monkeypatch.setattr(tuning._TritonJob, "launch", lambda job, point: point)

    def __call__(self, point: Any) -> list[float]:
        self.asked.append(point)
        if point.BLOCK_SIZE == 128:
            raise RuntimeError("out of something")
        return [1 / point.BLOCK_SIZE + 0.001 * point.num_warps] * 5


def tuned(tmp_path: Path, clock: Clock, **options: Any) -> TritonTuned:
    log = str(tmp_path / "double")
    return tune_triton(double_kernel, grid, ARGS, log=log, timer=clock, **options)


def test_an_unknown_gpu_is_searched_by_the_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    found = tuned(tmp_path, clock, budget=12)
    assert not found.by_model
    assert (found.tried, found.failed, len(clock.asked)) == (12, 3, 12)
    assert "out of something" in found.error
    assert found.config.kwargs == {"BLOCK_SIZE": 1024}
    assert found.config.num_warps == 1
    assert double_kernel.cache[4096, "torch.float32", "torch.float32"] is found.config
    data = read(str(tmp_path / "double"))
    ended = data.rows[data.rows.status != "started"]
    assert sorted(ended.status) == ["error"] * 3 + ["ok"] * 9
    best = ended[ended.status == "ok"].sort_values("perf_ms").iloc[0]
    assert '"BLOCK_SIZE":1024' in best.config
    assert "registers" in best.metrics
    assert data.graph(best.ir_id).number_of_nodes() > 5
    assert data.damage == []


def test_the_model_proposes_and_five_measurements_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the model likes what the clock likes, once it sees compiled configs."""
    asked: list[list[dict[str, Any]]] = []

    def model(known: list[dict[str, Any]], target: str) -> list[float]:
        asked.append(known)
        return [-each["config"]["BLOCK"] + each["config"]["num_warps"] for each in known]

    monkeypatch.setattr(tuning, "predict", model)
    monkeypatch.setattr(tuning, "_COMPILED", 2)
    clock = Clock(monkeypatch)
    found = tuned(tmp_path, clock, budget=4)
    assert found.by_model
    assert (found.tried, found.compiled) == (4, 8)
    assert found.config.kwargs == {"BLOCK_SIZE": 1024}
    assert [point.BLOCK_SIZE for point in clock.asked[:2]] == [1024, 1024]
    before, after = asked
    assert len(before) == len(CONFIGS)
    assert "registers" not in before[0]
    assert len(after) == 8
    assert after[0]["registers"] > 0
    assert "tt.load" in after[0]["ttgir_text"]
    assert before[0]["grid"] == (32, 1, 1)
    assert before[0]["bytes"] == 2 * X.nbytes
    assert math.isnan(before[0]["trips"])


def test_the_sixth_config_is_the_first_that_measurements_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model likes small blocks, the clock large ones and few warps."""
    monkeypatch.setattr(
        tuning,
        "predict",
        lambda known, target: [
            1e-4 * (each["config"]["BLOCK"] + each["config"]["num_warps"]) for each in known
        ],
    )
    found = tuned(tmp_path, Clock(monkeypatch), budget=6)
    order = sorted(CONFIGS, key=lambda c: c.kwargs["BLOCK_SIZE"] + c.num_warps)
    assert [config for config, _ in found.times][:5] == order[:5]
    assert found.times[5][0] != order[5]
    assert len(found.times) == 6


def test_the_shipped_model_scores_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    job = tuning._TritonJob.of(double_kernel, grid, ARGS, {}, math.nan, None)
    points = tuning._space(CONFIGS).configs
    monkeypatch.setattr(tuning, "key_of", lambda device: "nvidia-h200")
    ranked = tuning._ranked(job, dict.fromkeys(points))
    assert ranked is not None
    assert set(ranked) == set(points)
    assert list(ranked.values()) == sorted(ranked.values())
    assert len(set(ranked.values())) > 3
    monkeypatch.setattr(tuning, "key_of", lambda device: "amd-mi300x")
    assert tuning._ranked(job, dict.fromkeys(points)) is None


def test_the_shipped_model_says_what_it_was_trained_on() -> None:
    from benchmarks.learn.train import data_hash
    from sundog.dataset import load

    model = kernel_model.Networks.load(kernel_model.MODEL)
    assert model.about["data"] == data_hash(load("h200")), "run benchmarks.learn train again"
    assert model.about["version"] == 1
    shipped = kernel_model.MODEL.parent.glob("*.npz")
    assert sum(path.stat().st_size for path in shipped) <= 2_000_000


def test_the_shipped_model_needs_numpy_alone() -> None:
    """Beside Python itself, its modules import numpy and each other."""
    found: set[str] = set()
    for path in kernel_model.MODEL.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).partition(".")[0])
    assert found - set(sys.stdlib_module_names) == {"numpy"}


def test_a_kernel_without_autotune_needs_configs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"give configs="):
        tune_triton(double_kernel.fn, grid, ARGS, log=str(tmp_path / "x"))


def test_tensors_of_a_cpu_are_not_timed(tmp_path: Path) -> None:
    with pytest.raises(SundogError, match="on cpu, so nothing can be timed"):
        sundog.tune_triton(double_kernel, grid, ARGS, log=str(tmp_path / "x"))


def test_heuristics_count(tmp_path: Path) -> None:
    wrapped = triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK_SIZE"] == 0})
    job = tuning._TritonJob.of(wrapped(double_kernel.fn), grid, ARGS, {}, math.nan, None)
    assert job.given(tuning._space(CONFIGS).configs[0])["EVEN"] is True
