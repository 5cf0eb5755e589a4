"""The prose check finds its phrases in text, comments and messages; files in scope have none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("prose", ROOT / "scripts" / "prose.py")
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)


def test_nothing_in_scope_has_a_banned_phrase():
    found = [line for path in prose.files(prose.IN_SCOPE) for line in prose.matches(path)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("# configs by lot\n", "by lot"),
        ('"""Behind this one on the stream."""\n', "Behind"),
        ('raise ValueError(f"{n} is told")\n', "told"),
        ("x = 1\n\n\n# copy the own tile\n", "the own"),
        ("# It is timed. Of many the fastest counts.\n", "Of many"),
    ],
)
def test_a_phrase_is_found_with_its_line(text, phrase, tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(text)
    (line,) = prose.matches(tmp_path / "a.py")
    number = text[: text.index(phrase)].count("\n") + 1
    assert line.startswith(f"a.py:{number}: {phrase!r}: write ")


def test_docstrings_of_the_package_begin_with_a_verb():
    found = [line for path in prose.files(("sundog",)) for line in prose.openings(path)]
    assert found == []


def test_a_docstring_without_a_verb_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(
        'def wrong():\n    """Whether it is."""\n\n\n'
        'def right():\n    """Return whether it is."""\n\n\n'
        '@property\ndef size():\n    """The number of ranks."""\n'
    )
    (line,) = prose.openings(tmp_path / "a.py")
    assert line == "a.py:1: the docstring of wrong begins with 'Whether': write a verb"


def test_names_and_links_are_not_prose(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text("behind = told = 1  # peers behind a real link\n")
    assert list(prose.matches(tmp_path / "a.py")) == []
