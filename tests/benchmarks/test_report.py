"""docs/measured.md is what the files in docs/measured say, and nothing else."""

from __future__ import annotations

import json
import lzma
import re
import shutil
from pathlib import Path

from benchmarks.report import render
from benchmarks.result_files import pack, read_result, result_paths

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_from_the_files() -> None:
    made = render(DOCS / "measured")
    assert (DOCS / "measured.md").read_text() == made, "run: python -m benchmarks report"


def test_a_changed_sample_changes_the_page(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "measured", tmp_path / "measured")
    path = tmp_path / "measured" / "h200-bound.json.xz"
    content = read_result(path)
    for ranks in content["rows"][0]["times"][0]["samples_ns"]:
        ranks[:] = [t * 2 for t in ranks]
    path.write_bytes(lzma.compress(json.dumps(content).encode()))
    assert render(tmp_path / "measured") != render(DOCS / "measured")


def test_large_results_are_compressed_and_read_alike(tmp_path: Path) -> None:
    small, large = {"kind": "none", "x": [1.5]}, {"kind": "none", "x": list(range(9999))}
    for name, content in (("b", small), ("a", large)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    (line,) = pack(tmp_path)
    assert "a.json.xz" in line
    assert pack(tmp_path) == [], "nothing is left to compress"
    assert [path.name for path in result_paths(tmp_path)] == ["a.json.xz", "b.json"]
    assert [read_result(path) for path in result_paths(tmp_path)] == [large, small]


def test_no_result_in_the_repository_is_large() -> None:
    sizes = {path.name: path.stat().st_size for path in result_paths(DOCS / "measured")}
    assert max(sizes.values()) < 100_000, sizes


def test_a_wrong_result_is_shown_as_wrong(tmp_path: Path) -> None:
    content = read_result(DOCS / "measured" / "h200-all-gather-4.json.xz")
    content["rows"] = content["rows"][:1]
    content["rows"][0] |= {"times": None, "wrong": "7 elements differ from the reference"}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert "wrong: 7 elements differ" in render(tmp_path)


def test_failed_tests_are_counted_and_explained(tmp_path: Path) -> None:
    content = read_result(DOCS / "measured" / "h200-checks.json.xz")
    test = {"test": "a", "outcome": "failed", "seconds": 1.0, "text": ""}
    content["parts"] = [{"name": "p", "backend": "symm", "seconds": 1.0, "tests": [test]}]
    content["note"] = "It failed because of the moon."
    (tmp_path / "a.json").write_text(json.dumps(content))
    page = render(tmp_path)
    assert "| p | symm | 0 | 1 | 0 | 0 | 0 | 1.0 |" in page
    assert "of the moon" in page


def test_every_file_says_where_it_comes_from() -> None:
    for path in result_paths(DOCS / "measured"):
        content = read_result(path)
        for name in ("gpu", "torch", "triton", "commit", "date", "command"):
            assert content["machine"][name], f"{path.name} lacks {name}"
        assert not re.search(r"/(root|home|work|opt|usr|tmp)/", json.dumps(content)), path.name
