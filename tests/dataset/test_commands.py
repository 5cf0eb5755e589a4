"""`sundog data ...`: exit status 0, 1 on damage, 2 on bad usage; files where they are promised."""

from __future__ import annotations

import builtins
import io
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from telemetry import graph, info
from typer.testing import CliRunner, Result

from sundog.dataset import Recorder, read
from sundog.dataset.data_command import app


@pytest.fixture
def base(tmp_path: Path) -> str:
    path = str(tmp_path / "run.v1")
    for name in ("a", "b"):
        with Recorder(path, info(name), graph=graph(5)) as recorder:
            for block in (3, 1, 2):
                trial = recorder.start({"B": block}, decorator=f"[bold]B={block}")
                trial.end("ok", samples=[block, block + 0.5])
            recorder.start({"B": 4}).end("error", error="no")
            if name == "b":
                trial.end("ok", perf_ms=0.05, timer="synthetic")  # B=2: median 1.15
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})


@pytest.mark.parametrize("command", ["info", "validate", "join", "export", "show"])
def test_help_has_an_example_and_bad_usage_is_2(command: str, tmp_path: Path) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert "Exit status: 0" in shown.output
    assert f"Example: sundog data {command} runs/matmul" in shown.output
    assert run(command).exit_code == 2
    assert run(command, "--nonsense").exit_code == 2
    missing = run(command, str(tmp_path / "nothing"))
    assert missing.exit_code == 2
    assert "there is no" in missing.output


def test_info(base: str) -> None:
    shown = run("info", base)
    assert shown.exit_code == 0
    assert "17 rows, 1 graphs" in shown.output
    line = next(line for line in shown.output.splitlines() if info("b").run_id[:8] in line)
    cells = [cell.strip() for cell in line.split("\u2502")[1:-1]]
    assert cells[0] == "b"
    assert cells[3:8] == ["4", "4", "1", "1.1500", "[bold]B=2"]


def test_info_of_a_run_without_rows(base: str) -> None:
    """As `collect` leaves it; and a file in place of its base."""
    with Recorder(base, info("graph alone"), graph=graph(5)):
        pass
    shown = run("info", base)
    assert "graph alone" in shown.output
    wrong = run("info", f"{base}.csv")
    assert wrong.exit_code == 2
    assert f"A base is the name before .csv: {base}\n" in wrong.output


def test_validate(base: str) -> None:
    shown = run("validate", base)
    assert (shown.exit_code, "all is well" in shown.output) == (0, True)
    with open(f"{base}.csv", "a") as file:
        file.write("torn")
    shown = run("validate", base)
    assert shown.exit_code == 1
    assert f"{base}.csv:19: the last line is torn" in shown.output
    assert "17 rows, 2 runs, 1 graphs: 1 damaged" in shown.output


def test_validate_calls_other_columns_damage(base: str) -> None:
    Path(f"{base}.csv").write_text("run_id,config_id\n")
    shown = run("validate", base)
    assert shown.exit_code == 1
    assert f"{base}.csv:1: other columns" in shown.output


def test_join(base: str, tmp_path: Path) -> None:
    shown = run("join", base)
    table = pd.read_csv(io.StringIO(shown.output))
    assert (shown.exit_code, len(table)) == (0, 9)
    assert table.kernel_name.tolist() == ["a"] * 4 + ["b"] * 5
    out = tmp_path / "joined.csv"
    assert run("join", base, "--out", str(out)).exit_code == 0
    assert pd.read_csv(out).equals(table)
    assert run("join", base, "--out", str(tmp_path / "no" / "x.csv")).exit_code == 2


def test_export(base: str, tmp_path: Path) -> None:
    assert run("export", base, "--out", str(tmp_path / "x.y")).exit_code == 0
    rows = pd.read_parquet(tmp_path / "x.y.parquet")
    assert rows.perf_ms.dropna().tolist() == [3.25, 1.25, 2.25] * 2 + [0.05]
    assert rows.kernel_name.tolist() == ["a"] * 4 + ["b"] * 5
    graphs = pd.read_parquet(tmp_path / "x.y.graphs.parquet")
    assert graphs.ir_id.tolist() == [graph(5)["ir_id"]]
    assert run("export", base).exit_code == 0
    assert Path(f"{base}.parquet").exists()


def test_show(base: str, tmp_path: Path) -> None:
    session = read(base).runs.session[1]
    shown = run("show", base, "--out", str(tmp_path / "p"))
    assert shown.exit_code == 0, shown.output
    pictures = [f"p.{session}.convergence.png", f"p.{graph(5)['ir_id'][:12]}.graph.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size > 5000
    assert run("show", base, "--run", info("a").run_id[:10]).exit_code == 0
    refused = run("show", base, "--run", "zzz")
    assert (refused.exit_code, "no run or session" in refused.output) == (2, True)


def test_show_a_run_that_was_repeated_asks_which(base: str) -> None:
    with Recorder(base, info("a"), graph=graph(5)) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)
    refused = run("show", base, "--run", info("a").run_id)
    assert refused.exit_code == 2
    assert "2 sessions: name one of" in refused.output


def test_show_without_matplotlib(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    shown = run("show", base)
    assert shown.exit_code == 0
    assert "matplotlib is not installed" in shown.output
    times = [line.split()[2] for line in shown.output.splitlines() if " ms " in line]
    assert times == ["3.2500", "1.2500", "0.0500"]  # only what was better
    assert "4: op4" in shown.output
    assert not list(Path(base).parent.glob("*.png"))


def test_show_a_run_in_which_all_failed(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        recorder.start({"B": 1}).end("error", error="no")
    shown = run("show", base)
    assert shown.exit_code == 0
    assert "recorded no IR graph" in shown.output


def test_graph_with_a_loop_is_drawn(tmp_path: Path) -> None:
    from sundog.dataset.ir_graph import ir_id_of, to_networkx
    from sundog.dataset.pictures import draw_graph, layers

    record = graph(4)
    record["links"].append({"source": 3, "target": 0, "key": 0, "edge_kind": "carried"})
    record["ir_id"] = ir_id_of(record)
    loop = to_networkx(record)
    assert layers(loop) == {0: 0, 1: 1, 2: 2, 3: 3}
    draw_graph(loop, "loop", str(tmp_path / "loop.png"))
    assert (tmp_path / "loop.png").exists()


@pytest.mark.parametrize("command", ["info", "validate", "join", "export", "show"])
def test_without_pandas_a_sentence_says_what_to_install(
    command: str, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    done = run(command, base)
    assert done.exit_code == 2
    assert "needs pandas: pip install pandas pyarrow" in done.output
