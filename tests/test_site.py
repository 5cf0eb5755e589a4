"""Our parts of the documentation site: tutorials, links, and nothing loaded from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "scripts" / "site"))

import offline  # noqa: E402
import tutorial  # noqa: E402

SOURCE = '''"""# 1. A title

Words.
"""

import os

# %%
# ## A heading
#
#     indented

def f():
    x = 1  # a comment of the code

    # %%
    # Prose inside a function.

    return g(
        x,
    )  # fmt: skip
'''


def test_a_tutorial_becomes_prose_and_code_in_order():
    page = tutorial.render(SOURCE, "tutorials/01_a.py", "it says\n")
    assert page == (
        "# 1. A title\n\nWords.\n\n"
        "```python\nimport os\n```\n\n"
        "## A heading\n\n    indented\n\n"
        "```python\ndef f():\n    x = 1  # a comment of the code\n```\n\n"
        "Prose inside a function.\n\n"
        "```python\nreturn g(\n    x,\n)\n```\n\n"
        "## Output\n\n```text\nit says\n```\n\n"
        "*The file: [`tutorials/01_a.py`](01_a.py).*\n"
    )


@pytest.mark.parametrize(
    ("html", "sentences"),
    [
        ('<script src="https://x.org/a.js"></script>', ["<script> loads https://x.org/a.js"]),
        ('<link rel="stylesheet" href="//x.org/a.css">', ["<link> loads //x.org/a.css"]),
        ('<img src="http://x.org/a.png">', ["<img> loads http://x.org/a.png"]),
        ("<style>@import 'https://x.org/a.css';</style>", ["style loads https://x.org/a.css"]),
        ('<a href="https://x.org">a link</a><img src="a.png">', []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(html, sentences, tmp_path):
    (tmp_path / "a.html").write_text(html)
    assert list(offline.outside(tmp_path)) == [f"a.html: {each}" for each in sentences]


def test_the_picture_of_the_readme_is_self_contained():
    text = (ROOT / "docs" / "trace_of_four_ranks.svg").read_text()
    assert text.count("http") == 1  # the name of the SVG namespace
    assert text.count("waits for rank") > 2
    assert text.count("marker-end") == 8  # four ranks, two signals each
