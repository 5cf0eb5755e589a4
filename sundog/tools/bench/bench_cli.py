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


def _ranks(text: str) -> str:
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise typer.BadParameter(f"{text!r}: expected numbers from 1, with commas: 1,8")
    return text


Json = Annotated[
    str, typer.Option("--json", callback=_writable, help="also write the result there, as JSON")
]
World = Annotated[int, typer.Option(min=1, help="ranks")]
Worlds = Annotated[str, typer.Option(callback=_ranks, help="ranks, with commas")]
Backend = Annotated[str, typer.Option(callback=_known, help="virtual or symm")]
Samples = Annotated[int, typer.Option(min=1, help="per variant")]
Link = Annotated[str, typer.Option(help="pcie: see docs/gpu.md")]


class OpOrCommand(typer.core.TyperGroup):
    """`sundog bench OP` beside `sundog bench sim`: a word that is no command is an op."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["op", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    help="Measure an op, or one of these.\n\nExample: sundog bench sim",
    no_args_is_help=True,
    cls=OpOrCommand,
)


@app.command("sim")
def bench_sim(json: Json = "") -> None:
    """What the simulator costs, next to Triton's own interpreter. No GPU needed.

    Example: sundog bench sim --json sim.json
    """
    from benchmarks import simulator

    simulator.main(json)


@app.command("checker")
def bench_checker(json: Json = "") -> None:
    """What checking costs over plain simulation. No GPU needed; run it in the repository.

    Example: sundog bench checker --json checker.json
    """
    from benchmarks import checker_cost

    checker_cost.main(json)


@app.command("data")
def bench_data(json: Json = "") -> None:
    """What the dataset costs: loading, writing, extracting graphs. No GPU needed.

    Example: sundog bench data --json data.json
    """
    from benchmarks import dataset_cost

    dataset_cost.main(json)


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


@app.command("host")
def bench_host(
    world: Worlds = "1,2",
    backend: Backend = "virtual",
    json: Json = "",
) -> None:
    """What an eager call with a cached plan costs the host.

    Example: sundog bench host --world 1,8 --json host.json
    """
    from . import bench_command

    raise typer.Exit(bench_command.host([int(size) for size in world.split(",")], backend, json))


@app.command("gemm")
def bench_gemm(
    samples: Samples = 30,
    json: Json = "",
) -> None:
    """The matrix product that the fused kernels share, beside torch.mm.

    Example: sundog bench gemm --json gemm.json
    """
    from benchmarks import gemm

    raise typer.Exit(gemm.main(samples, json))


@app.command("bound")
def bench_bound(
    world: Worlds = "2,8",
    backend: Backend = "virtual",
    json: Json = "",
) -> None:
    """What it costs that every wait is bounded.

    Example: sundog bench bound --world 2,8 --json bound.json
    """
    from . import bench_command

    raise typer.Exit(bench_command.bound([int(size) for size in world.split(",")], backend, json))


@app.command("trace")
def bench_trace(
    op: Annotated[
        str, typer.Argument(help="an op, op.algorithm, or a module or file.py with its names")
    ],
    problem: Annotated[str, typer.Option(help="name=value,... of the problem")] = "",
    world: World = 8,
    backend: Backend = "virtual",
    link: Link = "",
    json: Json = "",
) -> None:
    """What the trace points of an op's kernels cost: time without and with them.

    Example: sundog bench trace all_gather_matmul.hbm_buffer --problem m=4096,n=3584,k=8192
    """
    from ..trace.trace_subject import Subject
    from . import bench_command

    raise typer.Exit(bench_command.trace(Subject(op, problem), world, backend, link, json))


@app.command("capture")
def bench_capture(
    world: World = 8,
    backend: Backend = "virtual",
    nbytes: Annotated[int, typer.Option(min=1, help="of each rank's tensor")] = 8192,
    json: Json = "",
) -> None:
    """What a graph saves: 50 small all-reduces captured, called one by one, and empty kernels.

    Example: sundog bench capture --world 8 --json capture.json
    """
    from . import bench_command

    raise typer.Exit(bench_command.capture(world, backend, nbytes, json))
