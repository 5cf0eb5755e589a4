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


def test_the_page_begins_with_the_worst_ratio_to_others(tmp_path: Path) -> None:
    """Of each class the worst problem; a part of an op is no other, and what failed has no time."""
    known = read_result(DOCS / "measured" / "h200-all-gather-8.json.xz")
    seconds = [
        ("push", 1024, "Config()", 4.0), ("pull", 1024, "Config()", 3.0), ("cat", 1024, "", 2.0),
        ("copy", 1024, "", 2.5), ("push", 2048, "Config()", 9.0), ("cat", 2048, "", 3.0),
        ("push", 1 << 22, "Config()", 1.0), ("cat", 1 << 22, "", 2.0),
        ("our GEMM, A gathered", 1 << 22, "", 0.5), ("copy", 1 << 22, "", None),
    ]  # fmt: skip
    rows = [
        known["rows"][0]
        | {
            "variant": variant,
            "problem": f"Problem(numel={numel})",
            "config": config,
            "hbm_bytes": numel * 4,
            "times": time and {"name": variant, "samples_ns": [[1e9 * time]]},
        }
        for variant, numel, config, time in seconds
    ]
    (tmp_path / "one.json").write_text(json.dumps(known | {"rows": rows}))
    page = render(tmp_path)
    begin = page.index("| op | backend | size")
    table = [line.split(" | ") for line in page[begin : page.index("\n\n", begin)].split("\n")[2:]]
    assert page.index("## ") < begin < page.index("## ", page.index("## ") + 1)
    assert [line[2:5] for line in table] == [["to 1 MB", "2", "3.00"], ["to 64 MB", "1", "0.50"]]
    assert table[0][5] == "numel=2048: push against cat |"
