"""The table of ops, from the ops themselves: signature, algorithms and file of each.

python scripts/site/ops_page.py            # prints the table as Markdown
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from sundog.ops.op import OPS  # noqa: E402
from sundog.world.world import World  # noqa: E402

__all__ = ["PLACE", "fill", "functions", "table"]

PLACE = "*The site has the table of ops here; `python scripts/site/ops_page.py` prints it.*"
_COMMON = ("algo", "config", "async_op", "explain")  # of every op: the page says so once
_ALONE = ("device_barrier", "send", "recv")  # functions of a world without algorithms


def functions() -> dict[str, Callable[..., Any]]:
    """Return every op's function of a world, by name."""
    names = dict.fromkeys([*(key.partition(".")[0] for key in OPS), *_ALONE])
    return {name: getattr(World, name) for name in names}


def table() -> str:
    """Return a row per op."""
    head = ["| op | algorithms | file |", "|---|---|---|"]
    return "\n".join(head + [_row(name, function) for name, function in functions().items()])


def fill(page: str) -> str:
    """Put the table, and the signature of every op, where a page has their place."""
    if PLACE not in page:
        return page
    signatures = [f"::: {each.__module__}.{name}" for name, each in functions().items()]
    return page.replace(PLACE, table()) + "\n## Signatures\n\n" + "\n".join(signatures) + "\n"


def _row(name: str, function: Callable[..., Any]) -> str:
    algorithms = [key.partition(".")[2] for key in OPS if key.partition(".")[0] == name]
    file = function.__module__.replace(".", "/") + ".py"
    return f"| `world.{name}({_arguments(function)})` | {', '.join(algorithms)} | `{file}` |"


def _arguments(function: Callable[..., Any]) -> str:
    """Return the arguments of a method of a world, without types and what all ops share."""
    shown = []
    for each in list(inspect.signature(function).parameters.values())[1:]:
        default = "" if each.default is each.empty else f"={_quoted(each.default)}"
        shown += [each.name + default] if each.name not in _COMMON else []
    return ", ".join(shown)


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    print(table())
