"""`sundog tune` as a process: compiling only, interrupted, killed, resumed; and bad input."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sundog.cli import app
from sundog.errors import SundogError
from sundog.target import has_gpu
from sundog.tools._console import progress
from sundog.tools.tune.tune import default_log, tune

pytestmark = pytest.mark.sim_only
OP = "tools.tune.toy_op"
WORDS = ["--world", "2", "--compile-only", "--target", "sm_90", "--search", "exhaustive"]
WORDS += ["--log", "log"]


@pytest.mark.parametrize("op", ["row_sum", "row_sum.py", "my/ops/row_sum.py"])
def test_the_dataset_is_named_after_the_op(op: str) -> None:
    assert default_log(op) == "tune-row_sum"


def statuses(path: Path) -> list[str]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [row["status"] for row in csv.DictReader(file)]


def _hear_interrupts() -> None:
    """Undo what a shell does to a job in the background: it would ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_by(number: signal.Signals, path: Path, *more: str) -> tuple[int, str]:
    """Start a run, and end it by a signal once it has compiled two more configs."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "sundog", "tune", OP, *WORDS, *more]
    pipe = subprocess.PIPE
    before = statuses(path).count("compiled")
    process = subprocess.Popen(
        command, env=environment, stderr=pipe, stdout=pipe, text=True, start_new_session=True,
        preexec_fn=_hear_interrupts,
    )  # fmt: skip
    while statuses(path).count("compiled") < before + 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to its workers too
    else:
        process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:  # no worker outlives it
            return process.returncode, errors
        time.sleep(0.05)
    raise AssertionError("its workers still run")


@pytest.mark.long
def test_interrupted_then_killed_then_resumed(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    code, errors = end_by(signal.SIGINT, path)
    assert code == 130
    assert "the same command with --resume goes on" in errors
    assert "Traceback" not in errors
    assert 2 <= statuses(path).count("compiled") < 18
    code, _ = end_by(signal.SIGKILL, path, "--resume")
    assert code == -signal.SIGKILL
    assert 4 <= statuses(path).count("compiled") < 20
    done = CliRunner().invoke(app, ["tune", OP, *WORDS, "--resume"])
    assert done.exit_code == 0, done.output
    assert statuses(path).count("compiled") == 20, "each config once, in three sessions"
    validated = CliRunner().invoke(app, ["data", "validate", "log"])
    assert validated.exit_code == 0, validated.output
    assert "3 runs" in validated.output


def test_the_bar_shows_the_best_so_far_for_any_problem() -> None:
    text = io.StringIO()
    console = Console(width=80, file=text, force_terminal=True, color_system=None)
    with progress(console) as show:
        show(
            f"all_gather_matmul.hbm_buffer {'m=4096,' * 20} on nvidia-h200",
            36,
            136,
            "best 2.8291 ms",
        )
    last = [line for line in text.getvalue().splitlines() if "all_gather_matmul" in line][-1]
    assert " 36/136 " in last
    assert "best 2.8291 ms" in last


@pytest.mark.parametrize("op", ["all_gather.push"])
def test_compile_only(tmp_path: Path, op: str) -> None:
    words = ["--problem", "numel=4096,dtype=bfloat16", "--world", "2", "--compile-only"]
    words += ["--target", "sm_90,gfx942", "--budget", "2", "--search", "random", "--log", "log"]
    done = CliRunner().invoke(app, ["tune", op, *words])
    assert done.exit_code == 0, done.output
    with open("log.csv", newline="") as file:
        ended = [row for row in csv.DictReader(file) if row["status"] != "started"]
    assert [row["status"] for row in ended] == ["compiled"] * 4
    for row in ended:
        assert row["perf_ms"] == row["p50_ms"] == row["num_samples"] == ""
        metrics = json.loads(row["metrics"])
        (kernel,) = metrics["kernels"]
        assert kernel["registers"] > 10
        assert kernel["stores"]["16"] >= 1
        assert 0 <= metrics["spills"] <= 16  # ptxas keeps 8 or 12 bytes on the stack now and then
    assert {json.loads(row["metrics"])["target"] for row in ended} == {"sm_90", "gfx942"}
    assert len({row["run_id"] for row in ended}) == 2
    assert CliRunner().invoke(app, ["data", "validate", "log"]).exit_code == 0
    assert not (tmp_path / "cache").exists(), "nothing was timed, so nothing is best"
    still_open = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    assert not [path for path in still_open if path.startswith(str(tmp_path))]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.of_that_name"], "is not known"),
        ([], "missing OP, for example: sundog tune all_gather"),
        ([OP, "--problem", "rows=3"], "Problem has no 'rows': numel, dtype, size"),
        ([OP, "--problem", "numel=few"], "numel=few: expected a whole number"),
        ([OP, "--problem", "numel=-1"], "numel=-1 is negative"),
        ([OP, "--problem", "size=3"], "size=3: the world has 8 ranks"),
        ([OP, "--problem", "numel=0", "--compile-only"], "there is nothing to double"),
        ([OP, "--search", "clever"], "expected one of pattern, model, random, exhaustive"),
        ([OP, "--budget", "0"], "at least one config"),
        ([OP, "--world", "0"], "at least one rank"),
        ([OP, "--compile-only", "--target", "h200"], "unknown architecture 'h200'"),
        ([OP, "--compile-only", "--log", "no/such\0name"], "log no/such"),
        (["--promote"], "nothing was tuned here"),
    ],
)
def test_bad_input_is_a_sentence(words: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["tune", *words])
    assert done.exit_code == 2
    assert told in " ".join(done.output.split())
    assert len(done.output.splitlines()) <= 4
    assert not list(Path().glob("*.csv"))


def test_a_base_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("other,columns\n")
    done = CliRunner().invoke(app, ["tune", OP, *WORDS])
    assert done.exit_code == 2
    assert "has other columns" in " ".join(done.output.split())


@pytest.mark.skipif(has_gpu(), reason="about machines without a GPU")
def test_without_a_gpu_nothing_is_timed() -> None:
    done = CliRunner().invoke(app, ["tune", OP])
    assert done.exit_code == 2
    assert "--compile-only --target sm_90" in " ".join(done.output.split())
    with pytest.raises(SundogError, match=r"record what it takes: targets=\['sm_90'\]"):
        tune(OP)
    with pytest.raises(ValueError, match=r"^world 0: a world has at least one rank"):
        tune(OP, world=0)
    with pytest.raises(ValueError, match=r"^log /proc/nowhere/log: "):
        tune(OP, log="/proc/nowhere/log")


def test_an_op_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    words = ["tune", OP, "--world", "2", "--compile-only", "--target", "sm_90", "--budget", "5"]
    words += ["--log", str(tmp_path / "log"), "--search"]
    sentence = "the model does not know this op on this GPU: the pattern search ran instead"
    for search in ("model", "random"):
        done = CliRunner().invoke(app, [*words, search])
        assert done.exit_code == 0, done.output
        assert "5 tried, 0 failed" in done.output
        assert (sentence in done.output) == (search == "model")
