"""docs/measured.md is what the JSON files beside it say, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from benchmarks.measured import render

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_from_the_files() -> None:
    made = render(DOCS / "measured")
    assert (DOCS / "measured.md").read_text() == made, "run: python -m benchmarks.measured"


def test_a_changed_sample_changes_the_page(tmp_path: Path) -> None:
    shutil.copytree(DOCS / "measured", tmp_path / "measured")
    path = tmp_path / "measured" / "h200-bound.json"
    content = json.loads(path.read_text())
    for ranks in content["rows"][0]["times"][0]["samples_ns"]:
        ranks[:] = [t * 2 for t in ranks]
    path.write_text(json.dumps(content))
    assert render(tmp_path / "measured") != render(DOCS / "measured")


def test_a_wrong_result_is_shown_as_wrong(tmp_path: Path) -> None:
    content = json.loads((DOCS / "measured" / "h200-all-gather-4.json").read_text())
    content["rows"] = content["rows"][:1]
    content["rows"][0] |= {"times": None, "wrong": "7 elements differ from the reference"}
    (tmp_path / "a.json").write_text(json.dumps(content))
    assert "wrong: 7 elements differ" in render(tmp_path)


def test_failed_tests_are_counted_and_explained(tmp_path: Path) -> None:
    content = json.loads((DOCS / "measured" / "h200-checks.json").read_text())
    test = {"test": "a", "outcome": "failed", "seconds": 1.0, "text": ""}
    content["parts"] = [{"name": "p", "backend": "symm", "seconds": 1.0, "tests": [test]}]
    content["note"] = "It failed because of the moon."
    (tmp_path / "a.json").write_text(json.dumps(content))
    page = render(tmp_path)
    assert "| p | symm | 0 | 1 | 0 | 0 | 0 | 1.0 |" in page
    assert "of the moon" in page


def test_every_file_says_where_it_comes_from() -> None:
    for path in (DOCS / "measured").glob("*.json"):
        content = json.loads(path.read_text())
        for name in ("gpu", "torch", "triton", "commit", "date", "command"):
            assert content["machine"][name], f"{path.name} lacks {name}"
        assert not re.search(r"/(root|home|work|opt|usr|tmp)/", path.read_text()), path.name
