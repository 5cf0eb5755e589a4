"""A table of figures measured on a CPU: shown to people, and kept for docs/measured.md."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from sundog.tools.bench.results import machine, write

__all__ = ["Figures"]


@dataclass(frozen=True)
class Figures:
    title: str
    text: str  # what was done, and the goals
    head: list[str]
    rows: list[list[str]]

    def show(self, command: str, json_path: str) -> None:
        """Print; with a path, write it for `measured.py` too."""
        table = Table(*self.head, title=self.title, caption=self.text)
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)
        if json_path:
            where = {**machine(), "gpu": _cpu(), "command": command}
            content = {"kind": "table", "title": self.title, "text": self.text, "machine": where}
            write(json_path, {**content, "head": self.head, "rows": self.rows})


def _cpu() -> str:
    """Cores and model: what a CPU's figures depend on."""
    model = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        model = names[0] if names else model
    return f"{os.cpu_count()} CPU cores ({model})"
