"""The command line: argument parsing and nothing else."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from . import __version__
from .dataset import data_command as data
from .tools.bench import bench_cli as bench

__all__ = ["app", "main"]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sundog {__version__}")
        raise typer.Exit


app = typer.Typer(
    help="Write multi-GPU Triton kernels; test and race-check them on a laptop.\n\n"
    "Example: sundog demo",
    rich_markup_mode="markdown",  # lines of a paragraph flow into the terminal's width
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="and exit")
    ] = False,
) -> None:
    pass


new = typer.Typer(
    help="Start something of your own.\n\nExample: sundog new op row_sum", no_args_is_help=True
)


@new.callback()
def _new() -> None:
    """Without this typer would take `sundog new` itself for the only command."""


app.add_typer(bench.app, name="bench")
app.add_typer(new, name="new")
app.add_typer(data.app, name="data")

Target = Annotated[
    str, typer.Argument(help="an op, a module or file of one, module:function or file.py:function")
]
Json = Annotated[str, typer.Option("--json", help="also write the result to this file, as JSON")]


@app.command()
def demo() -> None:
    """Eight ranks run a Triton kernel that signals between them; then a broken one is caught.

    Example: sundog demo
    """
    from . import demo as demonstration

    demonstration.main()


@app.command()
def check(
    target: Target = "",
    world: Annotated[int, typer.Option(help="ranks")] = 4,
    schedules: Annotated[int, typer.Option(help="interleavings to try")] = 50,
    seed: Annotated[int, typer.Option(help="of the first schedule")] = 0,
    schedule: Annotated[str, typer.Option(help="replay just this one, from a finding")] = "",
    sms: Annotated[int, typer.Option(help="programs resident per rank (default 16)")] = 0,
    mutate: Annotated[bool, typer.Option(help="weaken every synchronisation in turn")] = False,
    corpus: Annotated[str, typer.Option(help="check this folder of known wrong kernels")] = "",
    json: Json = "",
) -> None:
    """Look for races, wrong scopes, deadlocks and stale data on the simulator.

    Exit status: 0 nothing found, 1 findings, 2 it could not be checked, 130 interrupted.

    Example: sundog check examples/ring.py --world 3 --schedules 20 --mutate
    """
    from .tools.check import check_command

    if corpus:
        raise typer.Exit(check_command.run_corpus(corpus, schedules, seed, json))
    options = check_command.Options(target, world, schedules, seed, schedule, sms, mutate, json)
    raise typer.Exit(check_command.run(options))


@app.command()
def isa(
    op: Target = "",
    target: Annotated[str, typer.Option(help="compile for these")] = "sm_90,gfx942,gfx950",
    config: Annotated[str, typer.Option(help="name=value,... instead of the default's")] = "",
    problem: Annotated[str, typer.Option(help="name=value,... of the problem")] = "",
    world: Annotated[int, typer.Option(help="ranks")] = 8,
    json: Json = "",
) -> None:
    """What the compilers make of an op's kernels (default: all ops'), for GPUs that are not here.

    Widths, atomics, registers, spills; marked: an access of less than 16 bytes in the wide path, a
    spill, a heap distance that the innermost loop loads again, one that is cut to 32 bits.

    The wide path is every access of a tile through an argument that holds data. Not part of it:
    single elements, flags and the context, tiles of less than a sixteenth of the largest, and
    tails: masked, behind the loop over whole tiles or in the other branch of an `if`.

    Exit status: 0 nothing marked, 1 marked, 2 could not.

    Example: sundog isa all_gather.push --target sm_90 --problem numel=1048576,dtype=float32
    """
    from .tools.isa import isa_command as command

    raise typer.Exit(command.run(op, target, config, problem, world, json))


@app.command()
def tune(
    op: Annotated[
        str, typer.Argument(help="an op, op.algorithm, or a module or file.py with its names")
    ] = "",
    problem: Annotated[
        list[str] | None,
        typer.Option(help="name=value,... instead of the first case's; may be given several times"),
    ] = None,
    world: Annotated[int, typer.Option(help="ranks")] = 8,
    budget: Annotated[int, typer.Option(help="configs to try, of each algorithm")] = 200,
    search: Annotated[str, typer.Option(help="pattern, random or exhaustive")] = "pattern",
    log: Annotated[str, typer.Option(help="base name of the dataset; default: tune-OP")] = "",
    seed: Annotated[int, typer.Option(help="of the search")] = 0,
    resume: Annotated[bool, typer.Option(help="go on with what the log has of this run")] = False,
    compile_only: Annotated[bool, typer.Option(help="time nothing; needs no GPU")] = False,
    target: Annotated[str, typer.Option(help="compile for these, or promote these")] = "",
    promote: Annotated[bool, typer.Option(help="put the bests into the package's JSON")] = False,
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    link: Annotated[str, typer.Option(help="pcie: see docs/gpu.md")] = "",
) -> None:
    """Search for the best config of an op. Every attempt is kept, in the dataset LOG.

    Exit status: 0 tuned, 1 every config failed, 2 could not, 130 interrupted.

    Example: sundog tune all_gather.push --problem numel=1048576,dtype=bfloat16 --budget 100
    """
    from .tools.tune import tune_command as command
    from .tools.tune.tune import Place

    names = [name for name in target.split(",") if name]
    if promote:
        raise typer.Exit(command.run_promote(names))
    targets = (names or ["sm_90", "gfx942"]) if compile_only else []
    place = Place(backend, link)
    raise typer.Exit(
        command.run(op, problem or [], world, budget, search, log, seed, resume, targets, place)
    )


@app.command()
def trace(
    op: Annotated[
        str, typer.Argument(help="an op, op.algorithm, or a module or file.py with its names")
    ],
    out: Annotated[str, typer.Option(help="the file for ui.perfetto.dev")],
    problem: Annotated[str, typer.Option(help="name=value,... of the problem")] = "",
    world: Annotated[int, typer.Option(help="ranks")] = 8,
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")] = "",
    link: Annotated[str, typer.Option(help="pcie: see docs/gpu.md")] = "",
    plot: Annotated[str, typer.Option(help="also draw the slowest rank into this file")] = "",
    json: Json = "",
    programs: Annotated[int, typer.Option(help="of a rank that have room for their events")] = 256,
    events: Annotated[int, typer.Option(help="that a program has room for")] = 1024,
) -> None:
    """Record who waited for whom, as a timeline with an arrow from each signal to its wait.

    Exit status: 0 written, 2 it could not be traced.

    Example: sundog trace all_gather --out trace.json --plot trace.png --world 4
    """
    from .tools.trace import trace_command as command
    from .tools.trace.trace_subject import Subject

    place = command.Place(world, backend, link)
    raise typer.Exit(command.run(Subject(op, problem), place, out, plot, json, programs, events))


@app.command()
def probe(
    targets: Annotated[list[str] | None, typer.Argument(help="ops, or module:function")] = None,
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")] = "",
    world: Annotated[int, typer.Option(help="ranks")] = 2,
    replays: Annotated[int, typer.Option(help="default: 12 on the simulator, 100 on a GPU")] = 0,
    seed: Annotated[int, typer.Option(help="of the simulator's schedules")] = 0,
    details: Annotated[bool, typer.Option(help="all that is known of what went wrong")] = False,
    json: Json = "",
) -> None:
    """Can it be captured in a graph, and do replays see new data and compute the right thing?

    Exit status: 0 every verdict is as expected, 1 one is not, 2 it could not be probed,
    130 interrupted.

    Example: sundog probe all_gather --world 2 --replays 20
    """
    from .tools.probe import probe_command as command

    options = command.Options(tuple(targets or ()), world, backend, replays, seed, details, json)
    raise typer.Exit(command.run(options))


@new.command()
def op(
    name: Annotated[str, typer.Argument(help="of the op and its file")],
    folder: Annotated[str, typer.Option("--dir", help="where to write it")] = ".",
) -> None:
    """Write NAME.py: an op that every command accepts, with comments that explain each name.

    Exit status: 0 written, 2 the name is no module name, or the file exists.

    Example: sundog new op row_sum --dir my_kernels
    """
    from .tools import new_op

    raise typer.Exit(new_op.run(name, folder))


def main() -> None:
    # As `python -m sundog` finds a module of the user's beside them; never in another's place.
    sys.path.append(os.getcwd())
    app()
