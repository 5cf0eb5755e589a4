"""`sundog bench`: argument parsing and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer
import typer.core

from .._console import check_writable

__all__ = ["app"]


def _writable(path: str) -> str:
    try:
        check_writable(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return path


def _known(backend: str) -> str:
    if backend not in ("virtual", "symm"):
        raise typer.BadParameter(f"{backend!r}: expected virtual or symm, where a GPU is measured")
    return backend


Json = Annotated[
    str, typer.Option("--json", callback=_writable, help="also write the result there, as JSON")
]
World = Annotated[int, typer.Option(min=1, help="ranks")]
Backend = Annotated[str, typer.Option(callback=_known, help="virtual or symm")]
Samples = Annotated[int, typer.Option(min=1, help="per variant")]
Link = Annotated[str, typer.Option(help="pcie: see docs/gpu.md")]


class OpOrCommand(typer.core.TyperGroup):
    """Take a word that is no command for an op: `sundog bench all_gather`."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["op", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    help="Measure an op.\n\nExample: sundog bench all_gather --axis numel=65536",
    no_args_is_help=True,
    cls=OpOrCommand,
)


@app.command("op")
def bench_op(
    op: Annotated[str, typer.Argument(help="an op, or a module or file.py with the names of one")],
    axis: Annotated[list[str] | None, typer.Option(help="NAME=v1,v2,... may be repeated")] = None,
    world: World = 8,
    backend: Backend = "virtual",
    link: Link = "",
    baseline: Annotated[
        list[str] | None, typer.Option(help="a name, or none; may be repeated; default: all")
    ] = None,
    samples: Samples = 30,
    csv: Annotated[
        str, typer.Option(callback=_writable, help="also write the medians to this file")
    ] = "",
    json: Json = "",
    plot: Annotated[
        str, typer.Option(callback=_writable, help="also draw bytes per second into this file")
    ] = "",
    entries: Annotated[
        str, typer.Option(callback=_writable, help="also put the best configs into this file")
    ] = "",
) -> None:
    """Time an op against the limit of the GPU and against what one would call instead.

    Axes are fields of the problem, of the configs that have them, and `algo`.

    Example: sundog bench all_gather --axis numel=65536,1048576 --axis dtype=bfloat16 --world 4

    Example: sundog bench all_gather --axis algo=push,gluon --axis programs=8,32,128 --plot a.png
    """
    from . import bench_command

    files = csv, json, plot, link, entries
    raise typer.Exit(
        bench_command.op(op, axis or [], world, backend, baseline or [], samples, *files)
    )
