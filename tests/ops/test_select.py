"""algo="auto": which algorithm and config measurements lead to, also between the sizes measured."""

from __future__ import annotations

import multiprocessing
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sundog
from sundog.collectives._copy import Config
from sundog.collectives.all_gather import Problem
from sundog.collectives.all_reduce import Problem as Sum
from sundog.collectives.broadcast import Problem as Broadcast
from sundog.fused._matmul_reduce import Config as Tiles
from sundog.fused._matmul_reduce import Problem as Product
from sundog.ops import load as fields
from sundog.ops import select as store
from sundog.ops.load import find
from sundog.ops.select import Entry, choose, config_for, entries, user_file, write_entries

GPU = "some-gpu"
OTHER = {"block": 4096, "programs": 8, "num_warps": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No measurements but the test's own."""
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "package_file", lambda target: tmp_path / "package" / target)
    return tmp_path


def entry(
    algo: str, numel: int, micros: float, dtype: str = "bfloat16", size: int = 8,
    config: dict[str, Any] | None = None, of: str = "all_gather", **fields: Any,
) -> Entry:  # fmt: skip
    problem = {"numel": numel, "dtype": dtype, "size": size, **fields}
    return Entry(f"{of}.{algo}", problem, config or OTHER, micros * 1e-6, "2026-11-15", "test")


def measured(*found: Entry) -> None:
    write_entries(user_file(GPU), list(found))


def chosen(numel: int, dtype: torch.dtype = torch.bfloat16, size: int = 8) -> str:
    return choose("all_gather", Problem(numel, dtype, size), GPU, 16).algo


def test_without_measurements_it_is_the_first_by_its_own_rule() -> None:
    problem = Problem(1000, torch.bfloat16, 8)
    found = choose("all_gather", problem, GPU, 16)
    assert (found.algo, found.config) == ("push", find("all_gather.push").default(problem, 16))
    assert (
        "no measurements for some-gpu; the default (candidates: push, pull, partitioned"
        in found.why
    )


def test_without_measurements_large_ones_are_not_for_one_shot() -> None:
    def algo(numel: int, config: Any = None) -> str:
        return choose("all_reduce", Sum(numel, torch.bfloat16, 3), GPU, 16, config).algo

    assert (algo(1), algo(1 << 18), algo((1 << 18) + 1)) == ("one_shot", "one_shot", "two_shot")
    told = choose("all_reduce", Sum(1 << 20, torch.bfloat16, 3), GPU, 16).why
    assert told.startswith("all_reduce: two_shot: no measurements for some-gpu; the default")
    assert told.endswith("for this size (candidates: one_shot, two_shot, two_shot_pull)")
    only = find("all_reduce.one_shot").Config()
    assert algo(1 << 20, only) == "one_shot"


@pytest.mark.parametrize(
    ("numel", "algo"),
    [
        (0, "pull"), (1, "pull"), (1000, "pull"), (50_000, "pull"), (53_000, "pull"),
        (57_000, "push"), (60_000, "push"), (101_000, "push"), (5_000_000, "push"),
    ],
)  # fmt: skip
def test_between_and_beyond_the_sizes_measured(numel: int, algo: str) -> None:
    """pull 5 us + 0.2 us per 1000, push 10 us + 0.11 us per 1000: they cross at 55,556."""
    for thousands in (1, 101):
        measured(entry("pull", 1000 * thousands, 5 + 0.2 * thousands))
        measured(entry("push", 1000 * thousands, 10 + 0.11 * thousands))
    assert chosen(numel) == algo


def test_times_between_are_the_line_and_are_told() -> None:
    measured(entry("push", 1000, 10), entry("push", 3000, 20), entry("pull", 1000, 40))
    problem = Problem(2000, torch.bfloat16, 8)
    why = choose("all_gather", problem, GPU, 16).why
    assert why == "all_gather: push, expected on some-gpu: push 15.0 us, pull 80.0 us"


def test_the_nearest_dtype_counts() -> None:
    measured(entry("push", 1000, 10, "float32"), entry("pull", 1000, 5, "float32"))
    assert chosen(1000, torch.int32) == "pull"
    measured(entry("push", 1000, 3, "int32"), entry("pull", 1000, 4, "int32"))
    assert chosen(1000, torch.int32) == "push"
    assert chosen(1000, torch.float32) == "pull"


def test_another_world_size_or_share_of_the_gpu_says_nothing() -> None:
    measured(entry("pull", 1000, 1, size=4))
    assert chosen(1000, size=8) == "push"
    assert chosen(1000, size=4) == "pull"
    problem = Problem(1000, torch.bfloat16, 2)
    measured(replace(entry("pull", 1000, 1, size=2), num_sms=66))
    assert choose("all_gather", problem, GPU, 66).algo == "pull"
    assert choose("all_gather", problem, GPU, 132).algo == "push"
    measured(replace(entry("push", 1000, 0.5, size=2), num_sms=132))
    assert choose("all_gather", problem, GPU, 66).algo == "pull"


def test_another_operators_measurement_counts_if_none_exists() -> None:
    measured(entry("two_shot", 64, 1, of="all_reduce", config={"block": 64}, op="max"))
    assert choose("all_reduce", Sum(64, torch.bfloat16, 8, "sum"), GPU, 16).algo == "two_shot"
    measured(entry("two_shot", 64, 3, of="all_reduce", config={"block": 64}, op="sum"))
    measured(entry("one_shot", 64, 2, of="all_reduce", config={"block": 64}, op="sum"))
    assert choose("all_reduce", Sum(64, torch.bfloat16, 8, "sum"), GPU, 16).algo == "one_shot"
    assert choose("all_reduce", Sum(64, torch.bfloat16, 8, "max"), GPU, 16).algo == "two_shot"
    measured(entry("two_shot", 64, 9, "float32", of="all_reduce", config={"block": 64}, op="min"))
    why = choose("all_reduce", Sum(64, torch.bfloat16, 8, "min"), GPU, 16).why
    assert "two_shot 9.0 us" not in why, "another operator is nearer than another dtype"


def test_a_larger_product_than_measured_takes_its_flops_time() -> None:
    """Twice the columns of A are twice the flops, but 1.5 times the bytes."""

    def product(k: int) -> Product:
        return Product(8192, 8192, k, torch.bfloat16, 8)

    config, problem = fields.plain(Tiles()), fields.plain(product(4096))
    one = Entry("matmul_all_reduce.two_shot", problem, config, 1e-3, "2026-11-15", "test")
    measured(one)
    why = choose("matmul_all_reduce", product(8192), GPU, 16).why
    micros = re.search(r"two_shot (\S+) us$", why)
    assert micros is not None, why
    assert 1850 < float(micros[1]) < 2000


def test_which_rank_sends_does_not_matter() -> None:
    other = OTHER | {"programs": 3}
    measured(entry("push", 1000, 1, of="broadcast", src=0))
    measured(entry("push", 900, 1, of="broadcast", src=7, config=other))
    problem = Broadcast(1000, torch.bfloat16, 8, 7)
    assert config_for("broadcast.push", find("broadcast"), problem, GPU, 16) == Config(**OTHER)


def test_what_sums_in_another_order_is_never_chosen() -> None:
    for algo in ("ring", "atomic"):
        measured(entry(algo, 64, 0.001, "float32", 2, {"block": 64}, of="all_reduce", op="sum"))
    assert choose("all_reduce", Sum(64, torch.float32, 2), GPU, 16).algo == "one_shot"


def test_configs_exact_nearest_and_by_rule() -> None:
    module = find("all_gather.push")

    def config(numel: int, size: int = 8) -> Config:
        problem = Problem(numel, torch.bfloat16, size)
        return config_for("all_gather.push", module, problem, GPU, 16)

    small, large = OTHER | {"programs": 2}, OTHER | {"programs": 30}
    measured(entry("push", 1000, 1, config=small), entry("push", 64_000, 1, config=large))
    assert config(1000) == Config(**small)
    assert config(64_000) == Config(**large)
    assert config(2000) == Config(**small)
    assert config(20_000) == Config(**large)
    assert config(1000, 4) == module.default(Problem(1000, torch.bfloat16, 4), 16)


def test_a_config_that_does_not_fit_is_passed_over() -> None:
    """Not valid for this problem, or with fields of another version: the next one, or the rule."""
    module = find("all_gather.partitioned")
    problem = Problem(1000, torch.bfloat16, 8)
    measured(entry("partitioned", 1000, 1, config=OTHER | {"programs": 12}))
    measured(entry("partitioned", 1001, 1, config={"tile": 5}))
    measured(entry("partitioned", 1002, 1, colour="red"))
    assert config_for("all_gather.partitioned", module, problem, GPU, 16) == module.default(
        problem, 16
    )
    measured(entry("partitioned", 9000, 1, config=OTHER | {"programs": 16}))
    found = config_for("all_gather.partitioned", module, problem, GPU, 16)
    assert found == Config(**(OTHER | {"programs": 16}))


def test_a_given_config_leaves_those_that_take_it() -> None:
    measured(entry("partitioned", 1000, 1), entry("pull", 1000, 5), entry("push", 1000, 9))
    problem = Problem(1000, torch.bfloat16, 8)
    assert choose("all_gather", problem, GPU, 16).algo == "partitioned"
    three = Config(programs=12)
    found = choose("all_gather", problem, GPU, 16, three)  # 12 programs, 8 peers
    assert (found.algo, found.config) == ("pull", three)
    with pytest.raises(ValueError, match=r"no algorithm takes .* push: programs 0: at least one"):
        choose("all_gather", problem, GPU, 16, Config(programs=0))


def test_the_users_entries_win_and_new_ones_are_read() -> None:
    write_entries(store.package_file(GPU), [entry("push", 1000, 7), entry("pull", 1000, 5)])
    assert chosen(1000) == "pull"
    measured(entry("pull", 1000, 9))
    assert chosen(1000) == "push"
    measured(entry("pull", 1000, 2))
    assert chosen(1000) == "pull"
    assert sorted(e.seconds for e in entries(GPU)) == [2e-6, 7e-6]


def test_a_file_is_worked_through_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(*[entry("push", 1 << power, power) for power in range(20)])
    seen: list[Entry] = []
    key_of = store.key_of
    monkeypatch.setattr(store, "key_of", lambda each: seen.append(each) or key_of(each))
    for numel in range(1, 20):  # each is a new plan of a serving loop
        chosen(numel)
    assert len(seen) == 20


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"op": "all_gather.push"}]', '{"op": 1}'])
def test_a_file_that_is_none_is_named(text: str) -> None:
    path = user_file(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some-gpu.json: not a list of measurements .* remove it"):
        chosen(1000)


@pytest.mark.sim_only
def test_a_folder_that_may_not_be_looked_into_has_no_entries(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody who may not")
    tmp_path.chmod(0o700)

    def look() -> None:
        os.setuid(65534)
        assert store.read_entries(tmp_path / "sub" / "nvidia-h200.json") == ()

    child = multiprocessing.get_context("fork").Process(target=look)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_a_call_goes_by_what_was_measured(capfd: pytest.CaptureFixture[str]) -> None:
    small = {"block": 256, "programs": 2, "num_warps": 1}
    found = [entry("push", 100, 9, "int16", 2), entry("pull", 100, 3, "int16", 2, small)]
    write_entries(user_file("the simulator"), found)

    def main(world: sundog.World) -> None:
        x = torch.arange(120, dtype=torch.int16)
        assert world.all_gather(x, explain=True).tolist() == [*range(120)] * 2
        (made,) = (call for call in world._plans if call.op == "all_gather")
        assert made.plan.config == Config(**small)

    sundog.run(main, 2, "sim")
    assert (
        "all_gather: pull, expected on the simulator: pull 6.6 us, 3.0 of it copies, push"
        in capfd.readouterr().out
    )
