"""Turn a tutorial into Markdown: its docstring and `# %%` comments are prose, the rest is code.

A block of prose starts with a line `# %%` and ends with the comment. It may be indented, inside a
function; the code of that function goes on after it.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import textwrap
from pathlib import Path

__all__ = ["render", "run"]

_PROSE = re.compile(r"^[ ]*# %%\n((?:[ ]*#.*\n)*)", re.M)
_SKIPPED = "  # fmt: skip"  # a note to the formatter, not to the reader


def render(source: str, path: str, output: str = "") -> str:
    """Return the page of a tutorial, with what it prints when it is run."""
    head, _, rest = source.removeprefix('"""').partition('"""\n')
    blocks = [head.strip()]
    for number, text in enumerate(_PROSE.split(rest)):
        blocks.append(_prose(text) if number % 2 else _code(text))
    if output:
        blocks.append(f"## Output\n\n```text\n{output.strip()}\n```")
    blocks.append(f"*The file: [`{path}`]({path.rpartition('/')[2]}).*")
    return "\n\n".join(block for block in blocks if block) + "\n"


def run(path: Path) -> str:
    """Run a tutorial in this process and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def _prose(text: str) -> str:
    lines = [re.sub(r"^[ ]*#[ ]?", "", line) for line in text.splitlines()]
    return "\n".join(lines).strip()


def _code(text: str) -> str:
    text = textwrap.dedent(text).strip("\n").replace(_SKIPPED, "")
    return f"```python\n{text}\n```" if text.strip() else ""
