"""`python -m benchmarks`: arguments of the commands that measure sundog itself, and nothing else.

Run it at the root of the repository. `sundog bench OP` measures an op.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from sundog.tools._console import check_writable


def _writable(path: str) -> str:
    try:
        check_writable(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return path


def _known(backend: str) -> str:
    if backend not in ("virtual", "symm"):
        raise typer.BadParameter(f"{backend!r}: expected virtual or symm, which run on a GPU")
    return backend


def _ranks(text: str) -> str:
    if not all(word.isdecimal() and int(word) > 0 for word in text.split(",")):
        raise typer.BadParameter(f"{text!r}: expected numbers from 1, with commas: 1,8")
    return text


Json = Annotated[
    str, typer.Option("--json", callback=_writable, help="also write the result to this file")
]
World = Annotated[int, typer.Option(min=1, help="ranks")]
Worlds = Annotated[str, typer.Option(callback=_ranks, help="ranks, with commas")]
Backend = Annotated[str, typer.Option(callback=_known, help="virtual or symm")]
Checkout = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="a checkout of this suite")
]
Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False)]

app = typer.Typer(
    help="Measure sundog itself, or make the page of what was measured.\n\n"
    "Faults are injected by `python -m benchmarks.faults`.",
    no_args_is_help=True,
)


def _need_gpu(command: str) -> None:
    from sundog.target import has_gpu

    if not has_gpu():
        typer.echo(f"python -m benchmarks {command}: torch finds no GPU here", err=True)
        raise typer.Exit(2)


# on a CPU


@app.command()
def simulator(json: Json = "") -> None:
    """Compare the simulator with Triton's own interpreter."""
    from . import simulator

    simulator.main(json)


@app.command()
def checker(json: Json = "") -> None:
    """Compare checking with plain simulation, in time and in memory."""
    from . import checker_cost

    checker_cost.main(json)


@app.command()
def mutants(
    targets: Annotated[list[str] | None, typer.Argument(help="default: every op")] = None,
    json: Json = "",
) -> None:
    """Time `sundog check --mutate`."""
    from . import mutant_cost

    mutant_cost.main(json, targets or [])


@app.command()
def dataset(
    json: Json = "",
    graphs: Annotated[bool, typer.Option(help="only print what the graph records hold")] = False,
) -> None:
    """Time loading, writing and the extraction of graphs."""
    from . import dataset_cost

    dataset_cost.print_graphs() if graphs else dataset_cost.main(json)


@app.command("compile-only")
def compile_only(json: Json = "") -> None:
    """Time `sundog tune --compile-only` for three ops and two targets."""
    from . import compile_only

    compile_only.main(json)


@app.command()
def litmus(
    programs: Annotated[int, typer.Option(min=1, help="litmus programs to make")] = 1000,
    schedules: Annotated[int, typer.Option(min=1, help="of each")] = 20,
    seed: int = 0,
    json: Json = "",
) -> None:
    """Hold axioms and checker to each other on generated programs; exit 1 if they differ."""
    from . import litmus_agreement

    raise typer.Exit(0 if litmus_agreement.main(programs, schedules, seed, json) else 1)


@app.command()
def interleavings(
    seconds: Annotated[float, typer.Option(min=1, help="for each op")] = 300.0, json: Json = ""
) -> None:
    """Run every interleaving of the collectives, each up to a time; exit 1 if one has a finding."""
    from . import interleavings as every

    raise typer.Exit(0 if every.main(seconds, json) else 1)


@app.command()
def suites(
    dat3m: Checkout = None,
    dat3m_kernels: Checkout = None,
    alloy: Checkout = None,
    gsan: Checkout = None,
    rmaracebench: Checkout = None,
    json: Json = "",
) -> None:
    """Run other people's test suites, each from the checkout given; exit 1 if a case differs."""
    given = {
        "dat3m": dat3m,
        "dat3m_kernels": dat3m_kernels,
        "alloy": alloy,
        "gsan": gsan,
        "rmaracebench": rmaracebench,
    }
    found = {name: path for name, path in given.items() if path is not None}
    if not found:
        raise typer.BadParameter(
            f"give a checkout: {', '.join('--' + name.replace('_', '-') for name in given)}"
        )
    from .suites import command

    try:
        agrees = command.run(found, json)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    raise typer.Exit(0 if agrees else 1)


# on a GPU


@app.command()
def host(world: Worlds = "1,2", backend: Backend = "virtual", json: Json = "") -> None:
    """Time an eager call with a cached plan on the host."""
    _need_gpu("host")
    from . import call_cost

    call_cost.host([int(size) for size in world.split(",")], backend, json)


@app.command()
def torch_cost(
    world: World = 1,
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")] = "virtual",
    json: Json = "",
) -> None:
    """Time an all-reduce on the host: eager, compiled, in CUDA graphs, against an empty op."""
    from . import torch_cost

    torch_cost.main(backend, world, json)


@app.command()
def capture(
    world: World = 8,
    backend: Backend = "virtual",
    nbytes: Annotated[int, typer.Option(min=1, help="of each rank's tensor")] = 8192,
    json: Json = "",
) -> None:
    """Compare 50 small all-reduces in a graph, called one by one, and empty kernels."""
    _need_gpu("capture")
    from . import call_cost

    call_cost.capture(world, backend, nbytes, json)


@app.command()
def bound(world: Worlds = "2,8", backend: Backend = "virtual", json: Json = "") -> None:
    """Time barriers with and without the bound on waits."""
    _need_gpu("bound")
    from . import overheads

    overheads.bound([int(size) for size in world.split(",")], backend, json)


@app.command()
def trace(
    op: Annotated[str, typer.Argument(help="an op, op.algorithm, a module, or a file.py")],
    problem: Annotated[str, typer.Option(help="name=value,... of the problem")] = "",
    world: World = 8,
    backend: Backend = "virtual",
    link: Annotated[str, typer.Option(help="pcie: see docs/gpu.md")] = "",
    json: Json = "",
) -> None:
    """Time an op with and without the trace points of its kernels."""
    _need_gpu("trace")
    from sundog.errors import SundogError
    from sundog.tools.trace.trace_command import TracedOp

    from . import overheads

    try:
        overheads.trace(TracedOp(op, problem), world, backend, link, json)
    except (SundogError, ValueError) as error:
        typer.echo(f"python -m benchmarks trace: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def gemm(
    samples: Annotated[int, typer.Option(min=1, help="per variant")] = 30,
    unaligned: Annotated[bool, typer.Option(help="sizes that are not multiples of 8")] = False,
    fp8: Annotated[bool, typer.Option(help="FP8 with scales, beside torch._scaled_mm")] = False,
    sweep: Annotated[bool, typer.Option(help="more tiles for few rows, with --fp8")] = False,
    json: Json = "",
) -> None:
    """Compare the matrix product that the fused kernels share with torch.mm."""
    _need_gpu("gemm")
    from . import fp8_gemm, gemm

    done = fp8_gemm.main(samples, json, sweep) if fp8 else gemm.main(samples, json, unaligned)
    raise typer.Exit(done)


@app.command()
def large(json: Json = "") -> None:
    """Run two products that need most of the GPU's memory."""
    _need_gpu("large")
    from . import large

    large.main(json)


@app.command()
def sizes(minutes: float = 6.0, world: World = 8, json: Json = "") -> None:
    """Time odd sizes beside round ones, and ordinary tensors beside those on the heap."""
    _need_gpu("sizes")
    from . import sizes

    sizes.main(minutes, world, json)


@app.command("fused-rows")
def fused_rows(
    minutes: Annotated[float, typer.Option(help="no new rows after this time")] = 6.0,
    world: World = 8,
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    count: Annotated[int, typer.Option(min=1, help="rows to draw from the grid")] = 120,
    json: Json = "",
) -> None:
    """Time `auto` on the layers of public models, beside all algorithms and torch's."""
    _need_gpu("fused-rows")
    from . import fused_rows

    fused_rows.main(count, world, backend, minutes, json)


@app.command("link-rates")
def link_rates(json: Json = "") -> None:
    """Measure what crosses PCIe per second, by copies and by kernels."""
    _need_gpu("link-rates")
    from . import link_rates

    link_rates.main(json)


@app.command("before-after")
def before_after(
    old: Folder,
    world: World = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    samples: Annotated[int, typer.Option(min=1, help="per variant")] = 20,
    json: Json = "",
) -> None:
    """Compare the ops of another source tree with those of this one, interleaved."""
    _need_gpu("before-after")
    from . import before_after

    before_after.main(old, world, rounds, samples, json)


# anywhere


@app.command()
def endless(
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")],
    world: World = 2,
    calls: Annotated[int, typer.Option(min=2)] = 10_000,
    sizes: Annotated[int, typer.Option(min=1, help="different ones")] = 2_000,
    largest: Annotated[int, typer.Option(min=64, help="bytes of a rank's input")] = 1_400_000,
    minutes: Annotated[float, typer.Option(help="fail after this time")] = math.inf,
    json: Json = "",
) -> None:
    """Serve calls with ever new sizes from a heap of 64 MiB, and check that nothing leaks."""
    from . import endless

    how = endless.Endless(calls, sizes, largest, seconds=60 * minutes)
    raise typer.Exit(endless.main(how, world, backend, json))


# from files


@app.command()
def tuning(data: Folder, docs: Folder) -> None:
    """Make the tables and plots of recorded tuning runs: tuning data/h200 docs/measured."""
    from . import tuning_runs

    tuning_runs.main(data, docs)


predict = typer.Typer(help="Hold the time model to what was measured.", no_args_is_help=True)
app.add_typer(predict, name="predict")
Plot = Annotated[str, typer.Option(callback=_writable, help="a scatter plot, as .png or .svg")]


@predict.command()
def ours(
    measured: Folder = Path("docs/measured"),
    tuned: Folder = Path("data/h200"),
    json: Json = "",
    plot: Plot = "",
    write: Annotated[bool, typer.Option(help="change the figures in sundog/hardware")] = False,
) -> None:
    """Our ops on one H200: fit the machine to half of the shapes, judge on the others."""
    from . import predicted

    predicted.main(measured, tuned, json, plot, write)


@predict.command()
def public(
    table: Annotated[Path, typer.Argument(exists=True)] = Path("data/public/collectives.csv"),
    json: Json = "",
    plot: Plot = "",
    simulate: Annotated[
        bool, typer.Option(help="hold simulated times of our kernels to published ones: minutes")
    ] = False,
) -> None:
    """Others' kernels: calibrated on 2 and 4 H200, asked for 8."""
    from . import predicted_public

    predicted_public.main(table, json, plot, simulate)


@app.command()
def report(docs: Folder = Path("docs")) -> None:
    """Compress large results in DOCS/measured and write DOCS/measured.md from all of them."""
    from .report import write_page
    from .result_files import pack

    for line in pack(docs / "measured"):
        typer.echo(line)
    write_page(docs)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
