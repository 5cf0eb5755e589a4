"""`sundog new op NAME`: write an op that works, whose comments explain each name."""

from __future__ import annotations

import keyword
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parent / "op_template.py"
_NAME = "my_op"  # what the template calls itself
_NEXT = (
    ("check", " --mutate"), ("probe", ""), ("isa", ""), ("trace", " --out trace.json"),
    ("tune", " --compile-only"),
)  # fmt: skip


def run(name: str, folder: str) -> int:
    """Write the op and print what to do with it; 2, with a sentence on stderr, if that fails."""
    try:
        path = write(name, folder)
    except ValueError as error:
        print(f"sundog new op: {error}", file=sys.stderr)
        return 2
    print(f"{path} sums a tensor over all ranks. Change it to what you need, then run")
    for command, options in _NEXT:
        print(f"  sundog {command} {path}{options}")
    return 0


def write(name: str, folder: str) -> Path:
    """Write `folder`/`name`.py and return its path. Never overwrites a file."""
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise ValueError(
            f"{name!r} cannot be the name of a module: use letters, digits and underscores, and "
            "start with a letter, for example row_sum"
        )
    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}; create it first, or choose one with --dir")
    path = Path(folder) / f"{name}.py"
    try:
        with path.open("x") as file:
            file.write(TEMPLATE.read_text().replace(_NAME, name))
    except FileExistsError:
        raise ValueError(f"{path} exists; choose another name, or remove it first") from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error.strerror}") from None
    return path
