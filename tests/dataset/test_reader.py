"""Reading: frames, joins, graphs, and every kind of damage named with its line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from telemetry import as_version_1, graph, info

from sundog.dataset import Dataset, Recorder, read
from sundog.dataset.validate import validate


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Two runs: one with a graph for all configs, one with a graph per config and a failure."""
    path = str(tmp_path / "run.v1")
    with Recorder(path, info("a"), graph=graph(2)) as recorder:
        for block in (1, 2):
            recorder.start({"B": block}, decorator=f"B={block}").end("ok", samples=[block] * 3)
    with Recorder(path, info("b")) as recorder:
        trial = recorder.start({"B": 1}, generation=1)
        trial.end("ok", perf_ms=0.5, ir_id=[recorder.add_graph(graph(n)) for n in (3, 4)])
        trial.end("ok", perf_ms=0.7, metrics={"spills": 0})
        recorder.start({"B": 2}).end("error", error='out of "shared"\nmemory')
    return path


@pytest.fixture
def base_1(base: str) -> str:
    """The same in version 1, which has no hashes: each check is seen by itself."""
    as_version_1(base)
    return base


def lines_of(base: str, ending: str) -> list[str]:
    return Path(f"{base}.{ending}").read_text().splitlines(keepends=True)


def rewrite(base: str, ending: str, lines: list[str]) -> None:
    Path(f"{base}.{ending}").write_text("".join(lines))


def damage_of(base: str) -> list[tuple[str, int, str]]:
    return [(d.file.removeprefix(f"{base}."), d.line, d.text) for d in validate(read(base)).damage]


def test_frames(base: str) -> None:
    data = read(base)
    assert (len(data.rows), len(data.runs), len(data.graphs), data.damage) == (9, 2, 3, [])
    assert validate(data).damage == []
    assert data.rows.index.tolist() == list(range(2, 11))
    assert data.rows.perf_ms.dtype == "float64"
    assert data.rows.config_index.dtype == "Int64"
    assert data.rows.perf_ms.dropna().tolist() == [1.0, 2.0, 0.5, 0.7]
    assert data.rows.generation[6] == 1
    assert data.rows.generation.isna()[2]
    assert data.rows.error[10] == 'out of "shared"\\nmemory'
    assert data.runs.kernel_name.tolist() == ["a", "b"]
    assert data.runs.best_perf_ms.tolist() == [1.0, 0.6]
    assert data.runs.world.tolist() == [2, 2]
    assert data.runs.hardware_name.tolist() == ["gpu", "gpu"]
    assert data.runs.ended.all()


def test_graphs(base: str) -> None:
    data = read(base)
    assert data.graphs.num_nodes.tolist() == [2, 3, 4]
    assert data.record(graph(3)["ir_id"]) == {**graph(3), "run_id": info("b").run_id}
    found = data.graph(graph(3)["ir_id"])
    assert list(found.edges(data="edge_kind")) == [(0, 1, "data"), (1, 2, "data")]
    with pytest.raises(ValueError, match="no graph"):
        data.graph("0" * 64)


def test_join_is_one_row_per_measurement_with_its_run(base: str) -> None:
    joined = read(base).join()
    assert joined.status.tolist() == ["ok", "ok", "ok", "ok", "error"]
    assert joined.kernel_name.tolist() == ["a", "a", "b", "b", "b"]
    assert json.loads(joined.hardware[0]) == {"name": "gpu"}
    assert joined.best_perf_ms.tolist() == [1.0, 1.0, 0.6, 0.6, 0.6]
    assert joined.line.tolist() == [3, 5, 7, 8, 10]


def test_join_keeps_what_a_crash_left_open(base: str) -> None:
    rewrite(base, "csv", lines_of(base, "csv")[:-1])
    joined = read(base).join()
    assert joined.status.tolist() == ["ok", "ok", "ok", "ok", "started"]


def test_select_by_prefix_and_refusal(base: str) -> None:
    data = read(base)
    run_id, session = data.runs.run_id[1], data.runs.session[1]
    for name in (run_id, run_id[:12], session, session[:12]):
        assert len(data.select(name)) == 5
    with pytest.raises(ValueError, match="no run or session 'zzz'"):
        data.select("zzz")
    with pytest.raises(ValueError, match="2 sessions: name one of"):
        data.select("")


def test_no_such_base(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no"):
        read(tmp_path / "nothing")


def test_parts_of_a_base(base: str) -> None:
    Path(f"{base}.csv").unlink()
    data = read(base)
    assert (len(data.rows), len(data.runs), len(data.graphs)) == (0, 2, 3)
    report = validate(data)
    assert report.damage == []
    assert "csv:1: not there; the end records count 9 rows" in str(report.notes[-1])
    assert len(data.join()) == 0


def test_rows_without_metadata(tmp_path: Path) -> None:
    with Recorder(tmp_path / "b") as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)
    data = read(tmp_path / "b")
    report = validate(data)
    assert report.damage == []
    assert any("without metadata" in note.text for note in report.notes)
    assert data.join().perf_ms.tolist() == [1.0]


def test_other_columns_are_refused(base: str) -> None:
    lines = lines_of(base, "csv")
    rewrite(base, "csv", [lines[0].replace("perf_ms", "speed")] + lines[1:])
    with pytest.raises(ValueError, match=r"csv:1: other columns"):
        read(base)
    rewrite(base, "csv", ["run_id,speed"])  # no newline: not ours with a torn header either
    with pytest.raises(ValueError, match=r"csv:1: other columns .*'run_id,speed'"):
        read(base)


def test_a_run_without_a_graph_is_noted(base: str) -> None:
    assert validate(read(base)).notes == []
    with Recorder(base, info("c")) as recorder:
        recorder.start({}).end("ok", perf_ms=1.0)
    ((note,), session) = validate(read(base)).notes, recorder.session
    assert (note.line, note.text) == (5, f"c, session {session}: no IR graph was recorded")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("\n", "0 cells instead of 24"),
        ("a,b\n", "2 cells instead of 24"),
        ('a,"b\n', "not a CSV row"),
        ("{row},x\n", "25 cells instead of 24"),
        ("{notnumber}\n", "timestamp_s is not a number: 'soon'"),
        ("{toobig}\n", "config_index is not a number"),
        ("a\rb\n", "control characters"),
        ("a\0b\n", "control characters"),
    ],
)
def test_damaged_rows_are_named_and_the_rest_is_read(base: str, line: str, text: str) -> None:
    lines = lines_of(base, "csv")
    cells = lines[2].rstrip("\n").split(",")
    text_of = {
        "{row}": lines[2].rstrip("\n"),
        "{notnumber}": ",".join([*cells[:3], "soon", *cells[4:]]),
        "{toobig}": ",".join([*cells[:4], "9" * 30, *cells[5:]]),
    }
    for name, value in text_of.items():
        line = line.replace(name, value)
    with open(f"{base}.csv", "w", newline="") as file:
        file.write("".join(lines[:3] + [line] + lines[3:]))
    data = read(base)
    (damage,) = data.damage
    assert (damage.line, damage.file) == (4, f"{base}.csv")
    assert text in damage.text
    assert len(data.rows) == 9
    assert data.rows.index.tolist() == [2, 3, *range(5, 12)]


def test_bytes_that_are_no_text(base: str) -> None:
    path = Path(f"{base}.csv")
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    data = read(base)
    assert [(d.line, d.text) for d in data.damage] == [(11, "not UTF-8")]
    assert len(data.rows) == 9


@given(junk=st.lists(st.binary(max_size=30), max_size=4), data=st.data())
@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_junk_between_rows_costs_no_row(
    base: str, tmp_path_factory: pytest.TempPathFactory, junk: list[bytes], data: st.DataObject
) -> None:
    copy = str(tmp_path_factory.mktemp("junk") / "b")
    lines = Path(f"{base}.csv").read_bytes().splitlines(keepends=True)
    for piece in junk:
        lines.insert(data.draw(st.integers(1, len(lines))), piece + b"\n")
    Path(f"{copy}.csv").write_bytes(b"".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sundog.dataset.rows._BLOCK", data.draw(st.integers(1, 2000)))
        found = read(copy)
    whole = read(base).rows.reset_index(drop=True)
    assert found.rows.reset_index(drop=True).equals(whole)
    assert len(found.damage) == sum(piece.count(b"\n") + 1 for piece in junk)


def test_a_row_longer_than_any_block(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    with Recorder(base) as recorder:
        trial = recorder.start({"B": 1})
        trial.end("error", error="x" * (17 << 20))
        trial.end("error", error="x" * 200_000)  # longer than csv takes by itself
    data = read(base)
    assert data.damage == []
    assert data.rows.error.str.len().tolist() == [0, 17 << 20, 200_000]
    with open(f"{base}.csv", "a") as file:
        file.write("torn,by a crash\n")  # so every line is looked at on its own
    data = read(base)
    assert [damage.line for damage in data.damage] == [5]
    assert data.rows.error.str.len().tolist() == [0, 17 << 20, 200_000]


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    """As Python has them: with lone surrogates, which pandas and Parquet refuse."""
    base, name = str(tmp_path / "b"), os.fsdecode(b"caf\xe9.py")
    found = graph()
    found["graph"]["kernel_name"] = name  # no part of its id
    with Recorder(base, info(name), graph=found) as recorder:
        recorder.start({"of": name}, decorator=name).end("error", error=name)
        recorder.close(name)
    data = read(base)
    assert validate(data).damage == []
    shown = r"caf\udce9.py"
    assert data.runs[["kernel_name", "error"]].iloc[0].tolist() == [shown] * 2
    assert data.graphs.kernel_name.tolist() == [shown]
    data.join().to_parquet(tmp_path / "b.parquet")


def test_versions_are_gated(base_1: str) -> None:
    metas, graphs = lines_of(base_1, "meta.jsonl"), lines_of(base_1, "ir.jsonl")
    newer = metas[0].replace('"schema_version":1', '"schema_version":3')
    without = json.loads(graphs[0])
    del without["schema_version"]
    rewrite(base_1, "meta.jsonl", [newer] + metas[1:])
    rewrite(base_1, "ir.jsonl", [json.dumps(without) + "\n", "[1]\n", "{torn\n"] + graphs[1:])
    data = read(base_1)
    found = [(d.file.removeprefix(f"{base_1}."), d.line) for d in data.damage]
    texts = [d.text for d in data.damage]
    assert found == [("meta.jsonl", 1), ("meta.jsonl", 2)] + [("ir.jsonl", i) for i in (1, 2, 3)]
    assert "schema_version 3 is newer than 2: read it with a newer sundog" in texts[0]
    assert "ends but did not start" in texts[1]
    assert "schema_version '0' is not one" in texts[2]
    assert "not a record but list" in texts[3]
    assert "not a JSON record" in texts[4]
    assert data.runs.kernel_name.tolist() == ["b"]
    assert len(data.graphs) == 2


def edit(base: str, ending: str, line: int, old: str, new: str) -> None:
    lines = lines_of(base, ending)
    assert old in lines[line - 1], lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    rewrite(base, ending, lines)


@pytest.mark.parametrize(
    ("ending", "line", "old", "new", "text"),
    [
        ("csv", 3, ",ok,", ",great,", "status 'great' is not one of"),
        ("csv", 3, '"{""B"":1}"', '"{""B"":9}"', "is not the hash of run_id and config"),
        ("csv", 3, '"{""B"":1}"', "Config(B=1)", "config is not JSON"),
        ("csv", 3, "1.000000,,B=1", ",,B=1", "status ok without perf_ms"),
        ("csv", 3, info("a").kernel_id, "0" * 64, "kernel_id 000000000000 is not its run's"),
        ("csv", 8, '"{""spills"":0}"', "spills=0", "metrics is not JSON: 'spills=0'"),
        ("csv", 10, '"out of ""shared""\\nmemory"', "", "status error without a reason"),
        ("meta.jsonl", 1, '"kernel_name":"a"', '"kernel_name":"z"', None),
        ("meta.jsonl", 1, '"world":2', '"world":3', "is not the hash of what the record says"),
        (
            "meta.jsonl",
            1,
            '"kernel_source":',
            '"kernel_source":7,"":',
            "kernel_source is int, not list",
        ),
        ("meta.jsonl", 1, '"event":"start"', '"event":"begin"', "a 'begin' record without"),
        ("meta.jsonl", 2, '"best":', '"worst":', "a 'end' record without best"),
        ("ir.jsonl", 2, '"links":', '"link":', "an IR record without graph, nodes or links"),
        ("ir.jsonl", 2, '"ir_id":', '"id":', "ir_id None is missing"),
        ("ir.jsonl", 2, '"id":1', '"id":0', "two nodes have one id"),
        ("ir.jsonl", 2, '"op1"', '"op9"', "is not the hash of the graph"),
        ("ir.jsonl", 2, '"target":1}', '"target":7}', "1 links end at no node"),
    ],
)
def test_what_does_not_fit_is_named(
    base_1: str, ending: str, line: int, old: str, new: str, text: str | None
) -> None:
    edit(base_1, ending, line, old, new)
    found = damage_of(base_1)
    if text is None:  # a name is not identity
        assert found == []
    else:
        assert any((e, n) == (ending, line) and text in t for e, n, t in found), found


def test_orphans_in_every_direction(base_1: str) -> None:
    csv, meta, ir = (lines_of(base_1, e) for e in ("csv", "meta.jsonl", "ir.jsonl"))
    rewrite(base_1, "meta.jsonl", meta[:2])  # run b is gone
    found = damage_of(base_1)
    assert [(e, n) for e, n, _ in found] == [("csv", 6)]
    assert "no run" in found[0][2]
    rewrite(base_1, "csv", csv[:6])  # and its rows: nobody names its graphs
    found = damage_of(base_1)
    assert [(e, n) for e, n, _ in found] == [("csv", 6), ("ir.jsonl", 2), ("ir.jsonl", 3)]
    assert "belongs to no run" in found[1][2]
    rewrite(base_1, "csv", csv)
    rewrite(base_1, "meta.jsonl", meta)
    rewrite(base_1, "ir.jsonl", ir[1:2])
    found = damage_of(base_1)
    assert [(e, n) for e, n, _ in found] == [("csv", 7), ("meta.jsonl", 1)]
    assert all("no graph" in text for _, _, text in found)


def test_repeated_rows_and_sessions_are_damage(base_1: str) -> None:
    csv, meta, ir = (lines_of(base_1, e) for e in ("csv", "meta.jsonl", "ir.jsonl"))
    rewrite(base_1, "csv", csv + [csv[1], csv[2]])
    rewrite(base_1, "meta.jsonl", meta + [meta[0]])
    rewrite(base_1, "ir.jsonl", ir + [ir[0]])
    found = damage_of(base_1)
    assert [(e, n) for e, n, _ in found] == [
        ("csv", 11),
        ("csv", 11),
        ("csv", 12),
        ("meta.jsonl", 5),
        ("ir.jsonl", 4),
    ]
    assert any("rows were moved" in text for _, _, text in found[:2])
    assert "started on line 1 already" in found[3][2]
    assert "is missing or repeated" in found[4][2]


def test_an_end_without_its_start_is_damage(base_1: str) -> None:
    csv = lines_of(base_1, "csv")
    rewrite(base_1, "csv", [csv[0], *csv[2:]])
    assert damage_of(base_1) == [("csv", 2, "ends a configuration that never started")]


def test_a_copy_under_another_name_reads_the_same(base: str, tmp_path: Path) -> None:
    for ending in ("csv", "meta.jsonl", "ir.jsonl"):
        shutil.copy(f"{base}.{ending}", tmp_path / f"copy.{ending}")
    one, two = read(base), read(tmp_path / "copy")
    assert isinstance(one, Dataset)
    assert one.rows.equals(two.rows)
    assert one.graphs.equals(two.graphs)


def test_progress_reaches_the_end(base: str) -> None:
    calls: list[tuple[int, int]] = []
    read(base, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
