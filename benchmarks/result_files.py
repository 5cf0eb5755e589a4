"""Files of results: tables for people, JSON for docs/measured.md, with samples compressed.

A file with raw samples is large and hardly ever read, so it is kept as `NAME.json.xz`. A small one
stays `NAME.json`. `read_result` opens both, and `pack` compresses what is worth it.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sundog.tools import timing
from sundog.tools._console import write_json

_KEPT_PLAIN = 4096  # bytes; a block of the file system


@dataclass(frozen=True)
class Figures:
    """A table of figures with its text."""

    title: str
    text: str  # what was done, and the goals
    head: list[str]
    rows: list[list[str]]

    def show(self, json_path: str, on_cpu: bool = False, **samples: Any) -> None:
        """Print the table. With a path, also write it for docs/measured.md, with its samples."""
        table = Table(*self.head, title=self.title, caption=self.text)
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)
        if json_path:
            where = machine() | ({"gpu": _cpu()} if on_cpu else {})
            about = {"kind": "table", "title": self.title, "text": self.text, "machine": where}
            write(json_path, {**about, "head": self.head, "rows": self.rows, **samples})


def machine() -> dict[str, str]:
    """Return what the figures were measured on and with, and the command that did it."""
    words = [Path(word).name if word[:1] == "/" else word for word in sys.argv[1:]]
    return {**timing.machine(), "command": " ".join(["python -m benchmarks", *words])}


def _cpu() -> str:
    """Return the number of cores and the model: what a CPU's figures depend on."""
    model = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith("model name")]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    return f"{os.cpu_count()} CPU cores ({model})"


# files


def write(path: str, content: dict[str, Any]) -> None:
    """Write a file of measurements, and make its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def result_paths(folder: Path) -> list[Path]:
    """Return all results of a folder in the order of their names."""
    found = [path for path in folder.iterdir() if path.name.endswith((".json", ".json.xz"))]
    return sorted(found, key=name_of)


def name_of(path: Path) -> str:
    return path.name.removesuffix(".xz").removesuffix(".json")


def read_result(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    content: dict[str, Any] = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
    return content


def fastest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select from rows of `row_json`: the fastest config of each variant on each problem, and all
    that could not be timed."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["times"] is not None:
            place, median = (row["problem"], row["variant"]), timing.times_of(row["times"]).median
            best[place] = min(median, best.get(place, median))
    return [
        row
        for row in rows
        if row["times"] is None
        or timing.times_of(row["times"]).median == best[row["problem"], row["variant"]]
    ]


def pack(folder: Path) -> list[str]:
    """Compress every large result of a folder in place and return what it gained, by file."""
    lines = []
    for path in result_paths(folder):
        if path.suffix == ".json" and (size := path.stat().st_size) > _KEPT_PLAIN:
            packed = path.with_name(f"{path.name}.xz")
            packed.write_bytes(lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME))
            path.unlink()
            lines.append(f"{packed.name}: {size:,} to {packed.stat().st_size:,} bytes")
    return lines
