"""NCCL's baselines, with gloo in its place; its channels; and the suite of published rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import sundog
from sundog.cli import app
from sundog.ops.load import changed, find
from sundog.ops.op import OPS, Cost
from sundog.tools import nccl, presets
from sundog.tools._options import BenchOptions
from sundog.tools._subject import expected, room
from sundog.tools.baselines import BASELINES
from sundog.tools.bench import bench_command
from sundog.tools.bench.run import Row

pytestmark = pytest.mark.sim_only

TESTED = {
    op: next(n for n in named if "gloo" in n)
    for op, named in BASELINES.items()
    if any("gloo" in n for n in named)
}


def test_every_collective_and_product_has_both() -> None:
    without = {"all_reduce_rms_norm", "moe_dispatch", "moe_combine"}  # NCCL has no such op
    without |= {"quantized_all_gather", "quantized_all_reduce"}
    without |= {op.partition(".")[0] for op in OPS if op.startswith("scaled_")}
    known = {key.partition(".")[0] for key in OPS} - without
    assert set(TESTED) >= known
    for op, name in TESTED.items():
        assert name.replace("gloo", "nccl") in BASELINES[op]


def test_results_with_gloo_in_the_place_of_nccl(tmp_path: Path) -> None:
    """All of them in one world of two processes: starting one is what takes time."""

    def main(world: sundog.World) -> list[str]:
        meeting = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", meeting, rank=world.rank, world_size=world.size)
        wrong = []
        for op, name in TESTED.items():
            module = find(op)
            for problem in (changed(each, {"dtype": torch.float32}) for each in module.cases(2)):
                baseline = BASELINES[op][name]
                if not baseline.usable(world, problem):
                    continue
                given = module.inputs(world, problem, 3)
                wanted = expected(world, module, problem, given)
                out = room(world, module, problem, given)
                world.barrier()
                baseline.make(world, problem, given, out)()
                if not torch.equal(out.cpu().view(-1), wanted.view(-1)):
                    wrong.append(f"{op}: {problem}")
                wrong += [] if not baseline.graph else [f"{op}: no graph captures gloo"]
                break
            else:
                wrong.append(f"{op}: {name} takes no case")
        dist.destroy_process_group()
        return wrong

    assert sundog.run(main, 2, "shm") == [[], []]


def test_channels_are_options_of_a_group_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    kind = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", kind, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given))
    nccl._group.cache_clear()
    for backend, channels in (("nccl", 8), ("nccl", 8), ("nccl", 0), ("gloo", 8)):
        nccl._group(backend, channels)
    nccl._group.cache_clear()
    assert [each["backend"] for each in made] == ["nccl", "nccl", "gloo"], "once each"
    config = made[0]["pg_options"].config
    assert (config.min_ctas, config.max_ctas) == (8, 8)
    assert "pg_options" not in made[1]
    assert "pg_options" not in made[2]


def test_an_axis_of_channels_adds_rows_of_nccl_only() -> None:
    assert nccl.channel_axis(["numel=1", "channels=4,16"]) == (["numel=1"], [4, 16])
    with pytest.raises(ValueError, match="channels=0,x"):
        nccl.channel_axis(["channels=0,x"])
    names = set(nccl.with_channels(BASELINES["all_reduce"], [4, 16]))
    assert names - set(BASELINES["all_reduce"]) == {"nccl, 4 channels", "nccl, 16 channels"}


def test_the_published_rows() -> None:
    """Totals of the public table: a rank has a part of them, but of an all-reduce all."""
    parts = {part.op: part for part in presets.suite("published", 8)}
    assert parts["all_reduce"].axes[0].startswith("numel=256,512,")
    assert parts["all_reduce"].axes[0].endswith(",268435456")
    assert parts["all_gather"].axes == (
        "numel=" + ",".join(str(32 << n) for n in range(21)),
        "dtype=float16",
    )
    assert parts["all_gather_matmul"].preset == "llama3-70b-tp8"
    assert set(parts) < set(BASELINES)
    with pytest.raises(ValueError, match="there are: published"):
        presets.suite("unknown", 8)


def test_a_suite_is_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BenchOptions] = []

    def bench(options: BenchOptions) -> tuple[list[Row], Any]:
        asked.append(options)
        wrong = "7 elements" if options.op == "all_reduce" else ""
        row = Row("push", "Problem()", "Config()", Cost(1, 1, 1, 1), 1e-6, wrong=wrong)
        return [row], SimpleNamespace(as_json=dict)

    monkeypatch.setattr(bench_command, "bench", bench)
    path = tmp_path / "suite.json"
    words = ["bench", "suite", "published", "--world", "4", "--axis", "channels=8"]
    done = CliRunner().invoke(app, [*words, "--json", str(path)])
    assert done.exit_code == 1, "a part was wrong"
    assert [each.op for each in asked] == [part.op for part in presets.suite("published", 4)]
    assert all("channels=8" in each.axes for each in asked)
    content = json.loads(path.read_text())
    assert [part["op"] for part in content["parts"]] == [each.op for each in asked]
    done = CliRunner().invoke(app, [*words, "--plot", "a.png"])
    assert done.exit_code == 2
    assert "--plot: a suite has several ops" in done.output.replace("\n", " ")
    done = CliRunner().invoke(app, ["bench", "all_gather", "published"])
    assert "only after `bench suite`" in done.output.replace("\n", " ")
