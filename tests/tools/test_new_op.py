"""`sundog new op`: what it writes passes every command as it is; what it cannot write, it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import sundog
from sundog.cli import app

COMMANDS = {
    "check": ["--world", "3", "--schedules", "2", "--mutate"],
    "probe": ["--replays", "4"],
    "isa": ["--target", "sm_90"],
    "trace": ["--world", "3", "--out", "trace.json"],
    "tune": ["--compile-only", "--target", "sm_90", "--budget", "2", "--log", "tuned"],
}


def sundog_command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


@pytest.mark.long
@pytest.mark.sim_only
@pytest.mark.compat
def test_every_command_passes_on_a_new_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    code, text = sundog_command("new", "op", "row_sum")
    assert code == 0, text
    for command in COMMANDS:
        assert f"sundog {command} row_sum.py" in text
    for command, options in COMMANDS.items():
        code, text = sundog_command(command, "row_sum.py", *options)
        assert code == 0, f"{command}: {text}"
    assert (tmp_path / "tuned.csv").read_text().count(",compiled,") == 2
    assert "row_sum" in (tmp_path / "tuned.meta.jsonl").read_text()
    assert (tmp_path / "trace.json").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["row-sum"], "'row-sum' cannot be the name of a module"),
        (["class"], "'class' cannot be the name of a module"),
        (["1st"], "'1st' cannot be the name of a module"),
        (["__main__"], "'__main__' cannot be the name of a module"),
        (["numpy"], "numpy.py would hide the module numpy from scripts"),
        (["torch"], "choose another name, for example my_torch"),
        (["signal"], "signal.py would hide the module signal"),
        (["sys"], "sys.py would hide the module sys"),
        (["sundog"], "sundog.py would hide the module sundog"),
        (["all_reduce"], "all_reduce.py would hide the module all_reduce"),
        (["row_sum", "--dir", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_a_name_that_cannot_be_is_refused(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, text = sundog_command("new", "op", *words)
    assert code == 2
    assert sentence in text
    assert not list(tmp_path.iterdir())


def test_a_file_is_never_overwritten(tmp_path: Path):
    (tmp_path / "row_sum.py").write_text("mine\n")
    code, text = sundog_command("new", "op", "row_sum", "--dir", str(tmp_path))
    assert code == 2
    assert "row_sum.py exists" in text
    assert (tmp_path / "row_sum.py").read_text() == "mine\n"


def test_a_folder_that_cannot_be_written_is_named():
    code, text = sundog_command("new", "op", "row_sum", "--dir", "/proc")
    assert (code, text.count("Errno")) == (2, 0)
    assert "/proc cannot be written to: " in text


def test_version():
    assert sundog_command("--version") == (0, f"sundog {sundog.__version__}\n")
