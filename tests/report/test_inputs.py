"""What `sundog report` reads and refuses: one sentence, exit status 2, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.report import page, sections
from sundog.report.page import read_report, write_report
from sundog.report.sections import Section, section

from .made import HOSTILE, check_content

SPAN = {
    "ph": "X", "name": "fetch", "pid": 0, "tid": 1, "ts": 2.0, "dur": 3.0,
    "args": {"what": 0, "value": 0, "peer": 1, "ended_by": -1},
}  # fmt: skip


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for what `make assets` builds: these tests need no Node."""
    folder = tmp_path / "assets"
    folder.mkdir()
    for name in ("report.js", "report.css", "licences.txt"):
        (folder / name).write_text("")
    monkeypatch.setattr(page, "ASSETS", folder)


def report(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"kind": "check", "findings": [', "It ends too early"),
        ("not at all", "is not JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ("\udcff", "is not text"),
        ("[]", "is JSON, but not of check"),
        ('{"kind": "faults"}', "is JSON, but not of check"),
        ('{"kind": "check", "schema_version": 99}', "has schema version 99, and this sundog knows"),
        ('{"kind": "check", "findings": {}}', "has no list 'findings'"),
        ('{"traceEvents": []}', "is an empty trace"),
        ('{"traceEvents": [{"ph": "X", "name": "a"}]}', "that sundog did not write"),
        (json.dumps({"traceEvents": [SPAN | {"ts": "now"}]}), "that sundog did not write"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    given, out = tmp_path / "given.json", tmp_path / "report.html"
    given.write_bytes(text.encode(errors="surrogateescape"))
    out.write_text("what was there before")
    code, said = report("-o", str(out), str(given))
    assert (code, sentence in said) == (2, True), said
    assert out.read_text() == "what was there before"
    assert [path.name for path in tmp_path.glob("*.part")] == []


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name at least one file"),
        (["missing.json"], "missing.json does not exist"),
        (["."], ". is not a file"),
        (["none.csv"], "there is no none.csv"),
        (["--compare", "one.html"], "--compare takes two reports, old.html new.html; 1 given"),
        (["--compare", "LICENSE", "LICENSE"], "LICENSE is not a report"),
    ],
)
def test_bad_words_are_one_sentence(tmp_path: Path, words: list[str], sentence: str) -> None:
    out = tmp_path / "report.html"
    code, said = report("-o", str(out), *words)
    assert (code, sentence in said) == (2, True), said
    assert not out.exists()


@pytest.mark.usefixtures("bundle")
def test_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)  # takes no room on the disk
    code, said = report("-o", str(tmp_path / "report.html"), str(large))
    assert (code, "large.json has 1,073,741,824 bytes or more" in said) == (2, True), said


@pytest.mark.usefixtures("bundle")
def test_a_packed_file_is_bounded_by_what_it_unpacks_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lzma

    monkeypatch.setattr(sections, "MOST_BYTES", 1000)
    small, bomb = tmp_path / "small.json.xz", tmp_path / "bomb.json.xz"
    small.write_bytes(lzma.compress(json.dumps({"traceEvents": [SPAN]}).encode()))
    bomb.write_bytes(lzma.compress(b" " * 100_000))
    assert report("-o", str(tmp_path / "report.html"), str(small))[0] == 0
    code, said = report("-o", str(tmp_path / "report.html"), str(bomb))
    assert (code, "1,001 bytes or more" in said) == (2, True), said


def test_without_the_bundle_the_command_that_makes_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "ASSETS", tmp_path)
    given = tmp_path / "found.json"
    given.write_text(json.dumps(check_content()))
    code, said = report("-o", str(tmp_path / "report.html"), str(given))
    assert (code, "run `make assets`" in said) == (2, True), said
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("bundle")
def test_what_is_embedded_comes_back_and_ends_no_element(tmp_path: Path) -> None:
    content = check_content(HOSTILE)
    path = tmp_path / "report.html"
    write_report(str(path), [section(content, HOSTILE)])
    text = path.read_text()
    assert HOSTILE not in text
    assert text.count("</script>") == 3  # licences, data, script: the page's own
    assert read_report(str(path))["sections"][0]["data"] == content


@pytest.mark.usefixtures("bundle")
def test_large_data_is_packed_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(str(path), [Section("trace", "t", {"spans": list(range(400_000))})])
    assert path.stat().st_size < 1_200_000
    assert read_report(str(path))["sections"][0]["data"]["spans"][-1] == 399_999


@pytest.mark.usefixtures("bundle")
def test_a_page_of_a_newer_sundog_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new.html"
    monkeypatch.setattr(page, "PAGE_VERSION", 2)
    write_report(str(path), [])
    monkeypatch.setattr(page, "PAGE_VERSION", 1)
    code, said = report("-o", str(tmp_path / "out.html"), str(path))
    assert (code, "which is newer than this one" in said) == (2, True), said


def test_the_policy_names_the_script_and_nothing_else(bundle: None, tmp_path: Path) -> None:
    write_report(str(tmp_path / "report.html"), [])
    text = (tmp_path / "report.html").read_text()
    assert (
        "default-src 'none'; script-src 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
        in text
    )


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (check_content(), "check"),
        ({"traceEvents": [SPAN]}, "trace"),
        ({"kind": "op", "op": "all_gather", "rows": [], "machine": {}}, "bench"),
        ({"kind": "probe", "rows": [], "machine": {}}, "probe"),
        ([{"registers": 1, "target": "sm_90", "marks": []}], "isa"),
        ([{"machine": "a", "problem": "b", "best": "c", "times": {}}], "predict"),
    ],
)
def test_every_output_is_recognised(content: Any, kind: str) -> None:
    assert section(content, "f.json").kind == kind


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["check", "tests.report.kernels:clean", "--world", "2", "--schedules", "1"], ["check"]),
        (["trace", "all_gather", "--world", "2", "--backend", "sim", "--out", "t.json"], ["trace"]),
        (["predict", "all_reduce", "--machine", "h200x8", "--axis", "numel=1024"], ["predict"]),
    ],
)
def test_commands_write_the_page_of_their_result(
    tmp_path: Path, words: list[str], kinds: list[str]
) -> None:
    out = str(tmp_path / "page.html")
    words = [str(tmp_path / word) if word == "t.json" else word for word in words]
    result = CliRunner().invoke(app, [*words, "--html", out])
    assert result.exit_code == 0, result.output
    assert [each["kind"] for each in read_report(out)["sections"]] == kinds


def test_a_command_refuses_early_if_the_page_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "ASSETS", tmp_path)
    for words in (
        ["isa", "all_gather"],
        ["probe", "all_gather"],
        ["bench", "all_gather"],
        ["tune", "all_gather"],
    ):
        result = CliRunner().invoke(app, [*words, "--html", str(tmp_path / "page.html")])
        assert (result.exit_code, "make assets" in " ".join(result.output.split())) == (2, True)
