"""`sundog new op NAME`: write an op that works, whose comments explain each name."""

from __future__ import annotations

import keyword
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from ._options import NewOpOptions

TEMPLATE = Path(__file__).parent / "op_template.py"
_OPS = [str(TEMPLATE.parents[1] / folder) for folder in ("collectives", "fused")]
_NAME = "my_op"  # what the template calls itself
_NEXT = (
    ("check", " --mutate"), ("probe", ""), ("isa", ""), ("trace", " --out trace.json"),
    ("tune", " --compile-only"),
)  # fmt: skip


def run(options: NewOpOptions) -> int:
    """Write the op and print what to do with it."""
    path = write(options.name, options.folder)
    print(f"{path} sums a tensor over all ranks. Change it to what you need, then run")
    for command, more in _NEXT:
        print(f"  sundog {command} {path}{more}")
    return 0


def write(name: str, folder: str) -> Path:
    """Write `folder`/`name`.py and return its path. Never overwrites a file."""
    if not re.fullmatch(r"[a-zA-Z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise ValueError(
            f"{name!r} cannot be the name of a module: use letters, digits and underscores, and "
            "start with a letter, for example row_sum"
        )
    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}; create it first, or choose one with --dir")
    path = Path(folder) / f"{name}.py"
    if _is_taken(name, path):
        raise ValueError(
            f"{path} would hide the module {name} from scripts beside it; choose another name, for "
            f"example my_{name}"
        )
    try:
        with path.open("x") as file:
            file.write(TEMPLATE.read_text().replace(_NAME, name))
    except FileExistsError:
        raise ValueError(f"{path} exists; choose another name, or remove it first") from None
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error.strerror}") from None
    return path


def _is_taken(name: str, path: Path) -> bool:
    """Return whether another module has the name: Python's, an installed one, or an op's."""
    here = Path.cwd(), path.parent.resolve()  # what is there is no installed module
    places = [each for each in sys.path if Path(each).resolve() not in here]
    found = PathFinder.find_spec(name, [*places, *_OPS])
    return found is not None or name in ("sundog", *sys.stdlib_module_names)
