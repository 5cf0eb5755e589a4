"""Turn a tutorial into Markdown: its docstring and `# %%` comments are prose, the rest is code.

A block of prose starts with a line `# %%` and ends with the comment. It may be indented, inside a
function; the code of that function goes on after it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

__all__ = ["render", "title"]

_PROSE = re.compile(r"^[ ]*# %%\n((?:[ ]*#.*\n)*)", re.M)
_SKIPPED = "  # fmt: skip"  # a note to the formatter, not to the reader


def title(source: str) -> str:
    """Return the first heading of a tutorial."""
    return source.removeprefix('"""# ').partition("\n")[0]


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
    """Run a tutorial on the simulator and return what it prints."""
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{path} failed:\n{done.stderr}")
    return done.stdout


def _prose(text: str) -> str:
    lines = [re.sub(r"^[ ]*#[ ]?", "", line) for line in text.splitlines()]
    return "\n".join(lines).strip()


def _code(text: str) -> str:
    text = textwrap.dedent(text).strip("\n").replace(_SKIPPED, "")
    return f"```python\n{text}\n```" if text.strip() else ""
