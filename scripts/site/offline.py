"""Check that a built site loads nothing from elsewhere: no font, script, style or picture.

python scripts/site/offline.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["outside"]

_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
_CSS = re.compile(r"(?:@import\s+|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)")


class _Loads(HTMLParser):
    """Collects what a page loads; a link that a reader may click is not among it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        address = named.get(_LOADS.get(tag, "")) or ""
        if re.match(r"(?:https?:)?//", address) and named.get("rel") != "canonical":
            self.found.append(f"<{tag}> loads {address}")
        self.found += [f"style loads {each}" for each in _CSS.findall(named.get("style") or "")]


def outside(folder: Path) -> Iterator[str]:
    """Yield a sentence for everything that a page or a style sheet loads from another host."""
    for path in sorted(folder.rglob("*.html")):
        page = _Loads()
        text = path.read_text()
        page.feed(text)
        styles = [f"style loads {each}" for each in _CSS.findall(text)]
        yield from (f"{path.relative_to(folder)}: {each}" for each in page.found + styles)
    for path in sorted(folder.rglob("*.css")):
        yield from (
            f"{path.relative_to(folder)}: {each}" for each in _CSS.findall(path.read_text())
        )


if __name__ == "__main__":
    lines = list(outside(Path(sys.argv[1])))
    print("\n".join(lines) or f"{sys.argv[1]}: loads nothing from elsewhere")
    sys.exit(1 if lines else 0)
