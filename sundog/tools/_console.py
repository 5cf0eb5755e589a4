"""What all commands share: exit statuses, messages, progress, and output files.

0 fine, 1 something was found, 2 the command could not do it, 130 interrupted.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from typer.core import TyperGroup

from .. import knobs
from ..errors import SundogError
from ..report.page import check_assets, write_page

FINE, FOUND, CANNOT, INTERRUPTED = 0, 1, 2, 130

# Options that name a file to write, and those of them whose file is a picture.
_FILES = ("out", "json", "csv", "plot", "bars", "entries", "timeline", "html")
_PICTURES = ("plot", "bars")

Show = Callable[[str, int, int, str], None]  # what, done, of how many (0: unknown), remark
Options = TypeVar("Options")


def command(name: str) -> Callable[[Callable[[Options], int]], Callable[[Options], int]]:
    """Make a function that returns an exit status a command.

    The files that its options name are tried first. A ValueError, ImportError or SundogError
    becomes one sentence and status 2, Ctrl-C status 130.
    """

    def decorate(run: Callable[[Options], int]) -> Callable[[Options], int]:
        @functools.wraps(run)
        def wrapped(options: Options) -> int:
            try:
                _check_files(options)
                return run(options)
            except KeyboardInterrupt as error:
                note(f"sundog {name}: {str(error) or 'interrupted'}")
                return INTERRUPTED
            except (ValueError, ImportError, SundogError) as error:
                note(f"sundog {name}: {error}", style="red")
                return CANNOT

        return wrapped

    return decorate


def note(text: str, style: str = "") -> None:
    """Print a line for people to stderr, since stdout is for the result."""
    Console(emoji=False, stderr=True).print(
        escape(text), style=style, soft_wrap=True, highlight=False
    )


class Commands(TyperGroup):
    """The commands. A ValueError becomes one sentence; a wrong argument is shown a right one."""

    def invoke(self, ctx: Any) -> Any:
        try:
            knobs.check()
            return super().invoke(ctx)
        except ValueError as error:
            note(f"sundog: {error}", style="red")
            raise typer.Exit(CANNOT) from None
        except typer.BadParameter as error:
            usage = str(getattr(error.ctx, "command", self).help)
            example = usage.partition("Example: ")[2].partition("\n")[0]
            error.message = f"{error.message.rstrip('.')}. For example: {example}".lstrip(". ")
            raise


@contextmanager
def progress(console: Console | None = None, threaded: bool = True) -> Iterator[Show]:
    """Show progress, a line for each piece of work, if stderr is a terminal.

    `threaded=False` draws only when something is shown: a thread would share the timed hosts' CPU.
    """
    console = console or Console(emoji=False, stderr=True)
    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # may be long: it gets what is left
    bar = Progress(
        TextColumn("{task.description}", table_column=what), BarColumn(bar_width=10),
        MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[remark]}"),
        console=console, expand=True, transient=True, disable=not console.is_terminal,
        auto_refresh=threaded,
    )  # fmt: skip
    tasks: dict[str, Any] = {}

    def show(name: str, done: int, total: int, remark: str = "") -> None:
        if name not in tasks:
            tasks[name] = bar.add_task(escape(name), total=total or None, remark="")
        bar.update(tasks[name], completed=done, remark=escape(remark))
        if not threaded:
            bar.refresh()

    with bar:
        yield show


def check_writable(*paths: str) -> None:
    """Raise a ValueError before any work if a file can't be written. Makes missing folders."""
    for path in filter(None, paths):
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            _try_open(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}") from None


def _check_files(options: Any) -> None:
    """Do the same for the files that a command's options name, and for what they need."""
    asked = {name: getattr(options, name, "") for name in _FILES}
    check_writable(*asked.values())
    if asked["html"]:
        check_assets()
    for name in _PICTURES:
        if asked[name]:
            check_installed(f"--{name}", "matplotlib")


def _try_open(path: str) -> None:
    """Open a file and leave it unchanged. A pipe is not tried: its reader would see the end."""
    existed = os.path.exists(path)
    if existed and not os.path.isfile(path) and not os.path.isdir(path):
        return
    with open(path, "ab"):
        pass
    if not existed:
        os.remove(path)


def check_installed(option: str, *modules: str) -> None:
    """Raise a ValueError that says what to install if an option's packages are missing."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{option} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


@contextmanager
def picture(path: str, down: int = 1, across: int = 1, **how: Any) -> Iterator[tuple[Any, Any]]:
    """Draw into a file: yield the figure and the array of its panels. `how`: see plt.subplots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(down, across, squeeze=False, layout="constrained", **how)
    yield figure, panels
    figure.savefig(path, dpi=120)
    plt.close(figure)


def ensure_compiler_cache() -> None:
    """Use a temporary folder for compiled kernels, with a note, if Triton's can't be written."""
    from triton import knobs

    folder = knobs.cache.dir
    with suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK):
            return
    temporary = os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="sundog-triton-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    note(
        f"{folder} cannot be written, so compiled kernels are kept for this command only. "
        "TRITON_CACHE_DIR names another folder."
    )


def write_results(content: Any, name: str, json: str, html: str, indent: int | None = None) -> None:
    """Write a command's result to the files of --json and --html; "" writes none."""
    if json:
        write_json(json, content, indent)
    write_page(html, content, name)


def write_json(path: str, content: Any, indent: int | None = None) -> None:
    """Write a command's result to the file of --json."""
    separators = None if indent else (",", ":")
    with open(path, "w") as file:
        json.dump(content, file, indent=indent, separators=separators, default=str)
        file.write("\n")
