"""The command line: a table of commands, each with its options (tools/_options.py) and its file."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from importlib import import_module
from inspect import Parameter
from typing import Annotated, Any, get_type_hints

import typer

from . import __version__
from .dataset import data_command as data
from .tools import _options as options
from .tools._console import Commands

# By name: the options, and the file whose `run` gets them and returns the exit status. A file is
# imported when its command runs: `sundog --help` needs no torch.
COMMANDS: dict[str, tuple[type, str]] = {
    "check": (options.CheckOptions, "check.check_command"),
    "isa": (options.IsaOptions, "isa"),
    "tune": (options.TuneOptions, "tune.tune_command"),
    "trace": (options.TraceOptions, "trace.trace_command"),
    "probe": (options.ProbeOptions, "probe.probe_command"),
    "bench": (options.BenchOptions, "bench.bench_command"),
    "predict": (options.PredictOptions, "predict.predict_command"),
    "calibrate": (options.CalibrateOptions, "calibrate_command"),
    "report": (options.ReportOptions, "report_command"),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sundog {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    help="Write multi-GPU Triton kernels; test and race-check them on a laptop.\n\n"
    "Exit status of every command: 0 fine, 1 something was found, 2 it could not be done, "
    "130 interrupted.\n\nExample: sundog demo",
    rich_markup_mode="markdown",  # lines of a paragraph flow into the terminal's width
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="show the version"),
    ] = False,
) -> None:
    pass


new = typer.Typer(
    help="Write a file to start from: an op of your own.\n\n"
    "Exit status: 0 written, 2 it could not be written.\n\nExample: sundog new op row_sum",
    no_args_is_help=True,
)


@new.callback()
def _new() -> None:
    """Make `new` a group: without this, typer takes its only command for `sundog new` itself."""


@app.command()
def demo() -> None:
    """Run a kernel that signals between eight ranks, then catch two broken versions of it.

    Exit status: 0 shown.

    Example: sundog demo
    """
    from . import demo as demonstration

    demonstration.main()


def _add(group: typer.Typer, name: str, kind: type, home: str) -> None:
    """Add a command whose parameters are the fields of its options."""

    def run(**given: Any) -> None:
        raise typer.Exit(import_module(f".tools.{home}", __package__).run(kind(**given)))

    hints = get_type_hints(kind, include_extras=True)
    run.__doc__ = inspect.getdoc(kind)
    run.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        Parameter(
            each.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if each.default is dataclasses.MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in dataclasses.fields(kind)
    ])  # fmt: skip
    group.command(name)(run)


for _name, (_kind, _home) in COMMANDS.items():
    _add(app, _name, _kind, _home)
_add(new, "op", options.NewOpOptions, "new_op")
app.add_typer(new, name="new")
app.add_typer(data.app, name="data")


def main() -> None:
    # Let commands find modules in the working directory, as `python -m sundog` does. At the end of
    # the path: a user's module must not replace an installed one.
    sys.path.append(os.getcwd())
    app()
