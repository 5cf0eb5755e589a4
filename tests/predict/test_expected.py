"""`auto` where nothing was measured: which machine it takes, what it chooses, what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sundog.collectives.all_gather import Problem as GatherProblem
from sundog.collectives.all_reduce import Problem
from sundog.hardware.description import plain, read
from sundog.ops import select
from sundog.ops.select import choose
from sundog.predict.expected import calibrated_path, hardware_for


@pytest.fixture(autouse=True)
def _nothing_of_this_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("target", "size", "num_sms", "backend", "name"),
    [
        ("nvidia-h200", 8, 16, "virtual", "h200-shared"),
        ("nvidia-h200", 2, 66, "symm", "h200-shared"),
        ("nvidia-h200", 2, 131, "virtual", "h200-pcie"),
        ("nvidia-h200", 8, 132, "symm", "h200x8"),
        ("nvidia-h200", 16, 132, "symm", "h200x8-2nodes"),
        ("nvidia-h100-80gb-hbm3", 4, 132, "symm", "h100x8"),
        ("amd-instinct-mi300x", 8, 304, "symm", "mi300x8"),
        ("nvidia-h200", 32, 132, "symm", None),
        ("nvidia-h100-80gb-hbm3", 8, 16, "virtual", None),
        ("nvidia-b200", 8, 148, "symm", None),
        ("the simulator", 8, 16, "sim", None),
    ],
)
def test_the_machine_that_ranks_run_on(
    target: str, size: int, num_sms: int, backend: str, name: str | None
) -> None:
    found = hardware_for(target, size, num_sms, backend)
    assert (found and found.name) == name


def test_flags_between_processes_take_longer() -> None:
    """Only where they share a GPU: figures of links were fitted to processes."""
    threads, processes = (hardware_for("nvidia-h200", 4, 33, each) for each in ("virtual", "symm"))
    assert threads is not None
    assert processes is not None
    more = processes.gpu.flag_s - threads.gpu.flag_s
    assert more == pytest.approx(threads.gpu.process_s)
    assert more > 0
    assert processes == threads.between_processes() == processes.between_processes()
    assert hardware_for("nvidia-h200", 8, 132, "symm") == read("h200x8")


def test_small_and_large_on_eight_gpus() -> None:
    """Nothing was measured on 8 H200 joined by NVLink."""
    small, large = (
        choose("all_reduce", Problem(numel, torch.bfloat16, 8), "nvidia-h200", 132, backend="symm")
        for numel in (1024, 1 << 24)
    )
    assert (small.algo, large.algo) == ("low_latency", "two_shot")


def test_it_says_times_source_and_bound() -> None:
    told = choose("all_gather", GatherProblem(1 << 24, torch.bfloat16, 8), "nvidia-h200", 132).why
    start = "no measurements for nvidia-h200 with 132 SMs a rank; the model of h200x8 expects: "
    assert start in told
    assert told.count(" us (link)") == 4, told


def test_a_measurement_comes_first() -> None:
    told = choose("all_gather", GatherProblem(131072, torch.bfloat16, 8), "nvidia-h200", 16).why
    assert "expected on nvidia-h200" in told
    assert "model" not in told


def test_a_calibrated_machine_is_used_from_then_on() -> None:
    slow = read("h200x8").changed({"link.rate": 1e9, "link.pair_rate": 1e9})
    path = calibrated_path("nvidia-b200", "switch")
    path.parent.mkdir()
    path.write_text(json.dumps({**plain(slow), "name": "mine"}))
    problem = Problem(1 << 24, torch.bfloat16, 8)
    told = choose("all_reduce", problem, "nvidia-b200", 132, backend="symm").why
    assert "the model of mine expects: two_shot 5" in told


def test_a_broken_description_is_named() -> None:
    path = calibrated_path("nvidia-b200", "switch")
    path.parent.mkdir()
    path.write_text('{"name": "mine"}')
    with pytest.raises(ValueError, match=r"nvidia-b200-switch\.json: title is missing"):
        hardware_for("nvidia-b200", 8, 132)


def test_an_op_without_a_model_goes_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "expected_times", lambda *rest: {})
    told = choose("all_gather", GatherProblem(64, torch.bfloat16, 8), "nvidia-h200", 132).why
    assert "the default" in told
