"""What `mkdocs build` does beyond Markdown: pages that are made from the repository itself.

    index.md, contributing.md, changelog.md     README.md and its neighbours, links rewritten
    tutorials/*.md                              tutorials/*.py, with what each of them prints
    reference/commands.md                       the help of every command, from the program
    reference/ops.md                            the table and signatures of all ops

So none of them can differ from what it describes.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import ops_page  # noqa: E402
import tutorial  # noqa: E402

_COPIES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {**_copied_pages(), **_tutorial_pages(), "reference/commands.md": _commands_page()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the table of ops."""
    return ops_page.fill(markdown)


def _copied_pages() -> dict[str, str]:
    return {page: site_links((ROOT / name).read_text()) for name, page in _COPIES.items()}


def site_links(text: str) -> str:
    """Rewrite the links of a page at the root of the repository to those of the site."""

    def rewritten(match: re.Match[str]) -> str:
        target = _COPIES.get(match[1], match[1]).removeprefix("docs/")
        return f"]({re.sub(r'[.]py$', '.md', target)}{match[2]})"

    return re.sub(r"\]\(([\w/.-]+)((?:#[\w-]+)?)\)", rewritten, text)


def _tutorial_pages() -> dict[str, str]:
    """Return each tutorial twice: as a page, and as the file that the page links to."""
    os.environ.update(SUNDOG_BACKEND="sim", OMP_NUM_THREADS="1")
    pages = {}
    for path in sorted((ROOT / "tutorials").glob("*.py")):
        name, source = f"tutorials/{path.stem}", path.read_text()
        pages[f"{name}.py"] = source
        pages[f"{name}.md"] = tutorial.render(source, f"{name}.py", tutorial.run(path))
    return pages


def _commands_page() -> str:
    import typer
    from typer.cli import get_docs_for_click

    from sundog.cli import app

    command: Any = typer.main.get_command(app)
    text = get_docs_for_click(
        obj=command, ctx=typer.Context(command), name="sundog", title="Commands"
    )
    text = re.sub(r"^(#+ `[^`]*) \[OPTIONS\].*`$", r"\1`", text, flags=re.M)
    return re.sub(r"^Example: (.*)$", r"```\n\1\n```", text, flags=re.M)
