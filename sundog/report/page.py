"""The page: one HTML file with its script, its style and its data inside.

The data is JSON in a script element that no browser runs, and `<` is escaped in it. The policy
allows one script, the bundle, by its hash, and forbids loading and sending anything.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import __version__
from .sections import Section, read_text, section

PAGE_VERSION = 1  # of the data in a page
ASSETS = Path(__file__).parent / "assets"
_FILES = ("report.js", "report.css", "licences.txt")
_PACKED_ABOVE = 1 << 20  # characters of JSON

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>sundog report</title>
<style>{style}</style>
</head>
<body>
<noscript>This report draws itself with the script inside it: allow scripts here.</noscript>
<main id="page"></main>
<script id="licences" type="text/plain">{licences}</script>
<script id="data" type="application/json" data-packed="{packed}">{data}</script>
<script>{script}</script>
</body>
</html>
"""
_DATA = re.compile(r'<script id="data" type="application/json" data-packed="(\w+)">(.*?)</script>')


def check_assets() -> None:
    """Raise a ValueError that names the command if the page's script was not built."""
    missing = [name for name in _FILES if not (ASSETS / name).is_file()]
    if missing:
        raise ValueError(
            f"the page of the report is not built ({', '.join(missing)} missing): run `make "
            "assets` in the checkout, which needs npm, or install sundog from its wheel"
        )


def write_page(path: str, content: Any, name: str) -> None:
    """Write the page of a command's JSON, for --html."""
    if path:
        write_report(path, [section(content, name)])


def write_report(path: str, sections: Sequence[Section]) -> None:
    """Write the page of these sections."""
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    about = {"format": "sundog.report", "version": PAGE_VERSION, "sundog": __version__}
    _write(path, about | {"made": made, "sections": [asdict(section) for section in sections]})


def write_comparison(path: str, old: str, new: str) -> None:
    """Write a page that shows what got better or worse from one report to another."""
    before, after = read_report(old), read_report(new)
    names = {"old_name": Path(old).name, "new_name": Path(new).name}
    _write(path, after | {"before": before} | names)


def read_report(path: str) -> dict[str, Any]:
    """Return the data of a page that was written here."""
    found = _DATA.search(read_text(path))
    if found is None:
        raise ValueError(f"{path} is not a report: give files that `sundog report` wrote")
    try:
        packed, text = found.groups()
        text = gzip.decompress(base64.b64decode(text)).decode() if packed == "gzip" else text
        payload = json.loads(text)
    except (ValueError, OSError, EOFError):
        raise ValueError(f"{path} is damaged: its data cannot be read") from None
    if payload.get("version", 0) > PAGE_VERSION:
        raise ValueError(
            f"{path} was written by sundog {payload.get('sundog')}, which is newer than this one"
        )
    return {key: value for key, value in payload.items() if key != "before"}


def _write(path: str, payload: dict[str, Any]) -> None:
    check_assets()
    script, style, licences = ((ASSETS / name).read_text() for name in _FILES)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    packed, data = _embedded(payload)
    page = _PAGE.format(
        policy=policy, style=style, licences=licences.replace("<", "&lt;"), packed=packed,
        data=data, script=script,
    )  # fmt: skip
    _replace(path, page)


def _embedded(payload: dict[str, Any]) -> tuple[str, str]:
    """Return how the data is packed, and its text, which can't end an HTML element."""
    text = json.dumps(payload, separators=(",", ":"), allow_nan=False, default=str)
    if len(text) > _PACKED_ABOVE:
        return "gzip", base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return "no", text


def _replace(path: str, page: str) -> None:
    """Write the whole file, or leave the old one."""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe, /dev/stdout
        Path(path).write_text(page)
        return
    partial = f"{path}.{os.getpid()}.part"
    try:
        Path(partial).write_text(page)
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        Path(partial).unlink(missing_ok=True)
