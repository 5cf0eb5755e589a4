"""The probe's verdicts: on ops of which we know what is wrong, on ours, on a user's function."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import sundog
from sundog.cli import app
from sundog.ops.op import OPS
from sundog.tools.probe import probe_command
from sundog.tools.probe.probe import Cell, ProbeRow, probe_subject
from sundog.tools.probe.probe_command import all_names, rows, subjects

from . import wrong_ops
from .wrong_ops import LABELS, SUBJECTS

REPLAYS = 6
WRONG = f"{wrong_ops.__name__}:SUBJECTS"


@pytest.fixture(autouse=True)
def _processes(backend: str) -> None:
    if backend == "symm":
        pytest.skip("the probe starts processes of its own, and here a rank is one already")


@pytest.mark.parametrize("name", LABELS)
def test_verdict_is_the_label(name, backend):
    verdict, column, text = LABELS[name]
    if backend != "sim" and (text == "race" or name == "in_haste"):
        pytest.skip("without the checker it takes luck to see it")
    row = probe_subject(SUBJECTS[name], 2, backend, REPLAYS)
    assert row.verdict == verdict, row
    if verdict == "CAPTURABLE":
        assert len(row.cells) == 6
        return
    assert row.worst[0] == column, row
    if backend == "sim":
        assert text in row.worst[1].detail, row
    if verdict == "NOT CAPTURABLE" and (backend == "sim" or name != "stream_not_joined"):
        assert "tests/tools/probe/wrong_ops.py:" in row.worst[1].where
        assert backend != "sim" or text in row.worst[1].reason


def _inputs(world: sundog.World, seed: int) -> torch.Tensor:
    torch.manual_seed(seed * 1000 + world.rank)
    return torch.randint(-99, 99, (5,)).float().to(world.device)


def _gathered(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(xs)


def _probe(fn: Any, backend: str, **options: Any) -> ProbeRow:
    given = {"make_inputs": _inputs, "reference": _gathered, "replays": 3, **options}
    return sundog.probe(fn, backend=backend, **given)


def test_a_users_function(backend):
    def gather(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        return world.all_gather(x)

    def gather_and_look(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        out = world.all_gather(x)
        return out * 1 if out.sum().item() else out

    assert _probe(gather, backend, world=3).verdict == "CAPTURABLE"
    row = _probe(gather_and_look, backend)
    assert row.verdict == "NOT CAPTURABLE", row
    assert "if out.sum().item()" in row.worst[1].where


def test_a_function_without_a_result_is_judged_by_its_inputs(backend):
    def double(world: sundog.World, x: torch.Tensor) -> None:
        x.mul_(2)

    def twice(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
        return 2 * xs[rank]

    def thrice(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
        return 3 * xs[rank]

    assert _probe(double, backend, reference=twice, world=1).verdict == "CAPTURABLE"
    row = _probe(double, backend, reference=thrice, world=1)
    assert (row.verdict, row.worst[1].replay) == ("WRONG", 0)
    assert "also without a graph" in str(row)


def test_a_tolerance_is_relative_to_the_largest_element(backend):
    def nearly(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * x.abs().max()

    def same(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[rank]

    options = {"reference": same, "world": 1}
    assert _probe(nearly, backend, tolerance=2e-3, **options).verdict == "CAPTURABLE"
    assert _probe(nearly, backend, tolerance=5e-4, **options).verdict == "WRONG"


def test_an_infinite_element_makes_no_error_small(backend):
    def inputs(world: sundog.World, seed: int) -> torch.Tensor:
        return torch.tensor([float("inf"), seed, -seed], device=world.device)

    def same(rank: int, xs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return xs[rank], xs[rank][:0]

    options = {"make_inputs": inputs, "reference": same, "world": 1, "tolerance": 1e-3}
    right = _probe(lambda world, x: (x * 1, x[:0] * 1), backend, **options)
    assert right.verdict == "CAPTURABLE"
    wrong = _probe(lambda world, x: (x + 1, x[:0] * 1), backend, **options)
    assert wrong.verdict == "WRONG"


def test_inputs_that_could_hide_an_old_result_are_refused(backend):
    def constant(world: sundog.World, seed: int) -> torch.Tensor:
        return torch.ones(5, device=world.device)

    def gather(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        return world.all_gather(x)

    row = _probe(gather, backend, make_inputs=constant)
    assert row.verdict == "ERROR"
    assert "inputs that depend on the seed" in str(row)


def test_what_one_case_shows_counts_for_the_subject():
    right, wrong = Cell("CAPTURABLE"), Cell("WRONG", "differs", 3)
    for first, second, detail in ((right, wrong, "m=3: differs"), (wrong, right, "differs")):
        row = ProbeRow("op", cells={"same": right, "data": first})
        row.add(ProbeRow("op", cells={"same": right, "data": second, "late": right}), "m=3")
        assert (row.verdict, row.worst[0], row.worst[1].detail) == ("WRONG", "data", detail)
        assert list(row.cells) == ["same", "data", "late"]


def test_what_a_function_raises(backend):
    def never(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("never")

    def in_graphs(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        if world.is_capturing:
            raise KeyError("not in graphs")
        return x

    row = _probe(never, backend, world=1)
    assert row.verdict == "ERROR"
    assert "test_probe.py:" in str(row)
    row = _probe(in_graphs, backend, reference=lambda rank, xs: xs[rank], world=1)
    assert (row.verdict, row.worst[1].reason) == ("NOT CAPTURABLE", "it raised KeyError")
    assert "not in graphs" in str(row)


@pytest.mark.sim_only
def test_outputs_are_poison_before_every_replay():
    out, found = torch.empty(5), torch.zeros(5)

    def look(world: sundog.World, x: torch.Tensor) -> torch.Tensor:
        found.copy_(out)
        return out.copy_(x)

    row = _probe(look, "sim", reference=lambda rank, xs: xs[rank], world=1)
    assert row.verdict == "CAPTURABLE"
    assert found.isnan().all()


@pytest.mark.parametrize("name", ["right", "reads_item", "staged_outside"])
def test_ranks_in_processes_agree(name):
    subject = replace(SUBJECTS[name], columns=("replays",))
    assert probe_subject(subject, 2, "shm", 2).verdict == LABELS[name][0]


# the command

FILE = """
import os, torch

def make_inputs(world, seed):
    torch.manual_seed(seed * 1000 + world.rank)
    return torch.randint(-99, 99, (5,)).float()

def reference(rank, xs):
    return 2 * xs[rank]

def double(world, x):
    return x * 2

def item(world, x):
    return x * 2 if x.sum().item() else x + x

def dies(world, x):
    os._exit(7)
"""


@pytest.mark.sim_only
def test_the_command(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    names = [f"mine.py:{name}" for name in ("dies", "item", "double")]
    result = runner.invoke(app, ["probe", *names, "--replays", "2", "--json", "found.json"])
    assert result.exit_code == 1
    content = json.loads((tmp_path / "found.json").read_text())
    assert (content["kind"], content["replays"]) == ("probe", 2)
    found = {row["name"]: row for row in content["rows"]}
    assert [found[n]["verdict"] for n in names] == ["ERROR", "NOT CAPTURABLE", "CAPTURABLE"]
    assert "status 7" in found[names[0]]["columns"]["replays"]["detail"]
    assert found[names[1]]["columns"]["replays"]["where"].startswith("mine.py:15: ")
    assert "item during capture (mine.py:15" in result.output
    assert runner.invoke(app, ["probe", "mine.py:double", "--replays", "2"]).exit_code == 0


@pytest.mark.sim_only
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nonsense"], "op 'nonsense' is not known"),
        (["math:floor"], "with make_inputs(world, seed)"),
        (["nonsense.module:fn"], "no module named nonsense"),
        (["all_gather", "--world", "0"], "--world must be at least 1"),
        (["all_gather", "--backend", "cpu"], "--backend cpu: expected one of sim, shm,"),
        (["all_gather", "--json", "tests"], "tests cannot be written"),
    ],
)
def test_what_cannot_be_probed(arguments, text):
    result = CliRunner().invoke(app, ["probe", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


@pytest.mark.sim_only
def test_what_was_probed_before_ctrl_c_is_kept(tmp_path, monkeypatch):
    run_all = probe_command.run_all

    def until_one(workers, names):
        yield next(run_all(workers, names))
        raise KeyboardInterrupt

    monkeypatch.setattr(probe_command, "run_all", until_one)
    words = ["probe", "device_barrier", "host barrier", "--backend", "sim", "--replays", "2"]
    done = CliRunner().invoke(app, [*words, "--json", str(tmp_path / "rows.json")])
    assert done.exit_code == 130
    assert "interrupted: 1 of 2 were not probed" in done.output
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1


def test_every_op_and_barrier_has_a_row():
    names = all_names()
    assert set(OPS) < set(names)
    assert {"device_barrier", "host barrier", "send_recv"} < set(names)
    assert rows(WRONG) == [f"{WRONG}.{name}" for name in LABELS]
    assert next(subjects(f"{WRONG}.baked_value", 2)).expected == "STALE"
    cases = list(subjects("all_gather.push", 2))
    assert [case.columns for case in cases] == [(), *[("replays",)] * (len(cases) - 1)]


@pytest.mark.sim_only
@pytest.mark.parametrize("name", [n for n in all_names("symm") if n.startswith("torch.")])
def test_torchs_own_ops_are_examples(name):
    """What they do needs the GPU; that they can be named, and what is expected, does not."""
    (subject,) = subjects(name, 2)
    assert subject.expected == ("NOT CAPTURABLE" if name == "torch.gloo" else "CAPTURABLE")
