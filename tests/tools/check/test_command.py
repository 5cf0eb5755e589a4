"""`sundog check`: exit statuses, one sentence for bad input, JSON, mutants."""

from __future__ import annotations

import json
import time

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.ops import load as ops
from sundog.tools._pool import in_order
from sundog.tools._subject import function_of
from sundog.tools.check.schedules import Report, check, check_once

RACY = "tests.tools.check.kernels:racy"


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_clean_is_0_and_findings_are_1():
    assert call("tests.tools.check.kernels:clean", "--world", "2", "--schedules", "2")[0] == 0
    code, text = call(RACY, "--world", "2", "--schedules", "2")
    assert code == 1
    assert "no CTA barrier before the release" in text
    assert "--schedule random:0" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "op 'nowhere' is not known"),
        (["all_gathr"], "'all_gathr' is not known: did you mean 'all_gather'?"),
        (["nowhere:main"], "no module named nowhere"),
        (["tests.tools.check.kernels:nothing"], "has no function nothing"),
        (["missing.py"], "no such file"),
        (["json"], "json is not an op: it lacks Problem"),
        (["examples.ring"], "did you mean its function, examples.ring:main?"),
        ([RACY, "--world", "0"], "at least 1"),
        ([RACY, "--sms", "-1"], "--sms not negative"),
        ([RACY, "--json", "tests"], "tests cannot be written: Is a directory"),
        ([RACY, "--json", "/proc/nowhere/f"], "/proc/nowhere/f cannot be written"),
        ([RACY, "--schedule", "whatever"], "expected random:SEED or pct:SEED:DEPTH"),
        ([], "name an op, a module or a file"),
        (["--corpus", "tests/tools/check"], "PAIRS"),
    ],
)
def test_bad_input_is_one_sentence_and_2(arguments: list[str], sentence: str):
    code, text = call(*arguments)
    assert code == 2
    assert sentence in " ".join(text.split())
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1 / 0", "mine.py:1: ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import nowhere", "mine.py:1: ModuleNotFoundError: No module named 'nowhere'"),
        ("import sys; sys.exit('ended')", "mine.py:1: SystemExit: ended"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path, monkeypatch, text: str, sentence: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    assert call("mine.py") == (2, f"sundog check: mine.py cannot be imported: {sentence}\n")


def test_an_op_in_a_file():
    """Its classes and kernels are those of one module, however often it is named."""
    path = "tests/tools/tune/toy_op.py"
    assert ops.find(path).Problem is ops.find(f"./{path}").Problem
    assert call(path, "--world", "2", "--schedules", "1")[0] == 0


def test_ctrl_c_keeps_what_was_found(tmp_path, monkeypatch):
    left = iter([check_once, check_once])

    def until_ctrl_c(*given: object, **named: object) -> Report:
        for run in left:
            print("rank's word")
            return run(*given, **named)
        raise KeyboardInterrupt

    def here(answer, count: int):
        return ((number, answer(number)) for number in range(count))

    monkeypatch.setattr("sundog.tools.check.check_command.check_once", until_ctrl_c)
    monkeypatch.setattr("sundog.tools._pool.each_forked", here)
    path = tmp_path / "found.json"
    code, text = call(RACY, "--world", "2", "--schedules", "5", "--json", str(path))
    assert code == 130
    assert "interrupted: 2 of 5 schedules tried" in text
    assert "no CTA barrier before the release" in text
    assert json.loads(path.read_text())["findings"]
    assert text.count("rank's word") == 1, "of the first schedule"


@pytest.mark.parametrize("cpus", [1, 3])
def test_schedules_are_told_in_order_on_any_number_of_cpus(monkeypatch, cpus: int):
    """Also where the number of schedules is not a multiple of what runs at once."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    report = check(function_of(RACY, 3), 3, schedules=21)
    assert report.findings
    assert str(report) in call(RACY, "--world", "3", "--schedules", "21")[1]


def test_answers_of_processes_come_in_order():
    def slow_at_first(number: int) -> int:
        time.sleep(0.1 * (3 - number))
        return number

    assert list(in_order(slow_at_first, 4)) == [0, 1, 2, 3]


def test_a_schedule_whose_process_dies_costs_only_itself(tmp_path):
    """What a rank does to its process is its own finding; the other schedules go on."""
    path = tmp_path / "dies.py"
    path.write_text(
        "import os\nstarted = os.getpid()\n\n"
        "def main(world):\n    if os.getpid() != started:\n        os._exit(3)\n"
    )
    code, text = call(f"{path}:main", "--world", "2", "--schedules", "4")
    assert code == 1
    assert "4 schedules" in text
    assert "the process ended with status 3" in text


def test_kernel_that_cannot_be_interpreted_is_2_and_named():
    code, text = call("tests.tools.check.kernels:only_gpu", "--world", "1", "--schedules", "1")
    assert code == 2
    assert "inline PTX, line 1: activemask.b32 $0" in " ".join(text.split())


def test_replay_of_one_schedule():
    code, text = call(RACY, "--world", "2", "--schedule", "pct:3:2")
    assert code == 1
    assert " in 1 schedule\n" in text


def test_json_has_findings_and_mutants(tmp_path):
    path = tmp_path / "found.json"
    call(RACY, "--world", "2", "--schedules", "2", "--json", str(path))
    found = json.loads(path.read_text())
    assert found["schedules"] == 2
    assert found["findings"][0]["rule"] == "no CTA barrier before the release"


def test_finding_is_written_although_printing_fails(tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    monkeypatch.setattr("sundog.tools.check.schedules.Report.__str__", lambda self: 1 / 0)
    CliRunner().invoke(
        app, ["check", RACY, "--world", "2", "--schedules", "1", "--json", str(path)]
    )
    assert json.loads(path.read_text())["findings"]


def test_op_without_mutants_fails():
    code, text = call(
        "tests.tools.check.kernels:no_synchronisation",
        "--world",
        "1",
        "--schedules",
        "1",
        "--mutate",
    )
    assert code == 1
    assert "no mutants" in text


def test_help_has_an_example():
    assert "Example: sundog check" in " ".join(call("--help")[1].split())
