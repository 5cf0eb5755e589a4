"""The command line: argument parsing and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer
import typer.core

from .dataset import commands as data

__all__ = ["app", "main"]

app = typer.Typer(
    help="Multi-GPU Triton kernels that you can prove on a laptop.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


class OpOrCommand(typer.core.TyperGroup):
    """`sundog bench OP` beside `sundog bench sim`: a word that is no command is an op."""

    def resolve_command(self, ctx, args):  # type: ignore[no-untyped-def]
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["op", *args]
        return super().resolve_command(ctx, args)


bench = typer.Typer(
    help="Measure: an op, or `sim`, `bound`.", no_args_is_help=True, cls=OpOrCommand
)
app.add_typer(bench, name="bench")
app.add_typer(data.app, name="data")

Target = Annotated[str, typer.Argument(help="an op, a module, module:function or file.py:function")]
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

    Exit status: 0 nothing found, 1 findings, 2 it could not be checked.

    Example: sundog check examples/ring.py --world 3 --schedules 20 --mutate
    """
    from . import check_command

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
    from .isa import command

    raise typer.Exit(command.run(op, target, config, problem, world, json))


@app.command()
def tune(
    op: Annotated[str, typer.Argument(help="an op, op.algorithm, or a module with its names")] = "",
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
    from .tuning import Place, command

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
    op: Annotated[str, typer.Argument(help="an op, op.algorithm, or a module with its names")],
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
    from .trace import Subject, command

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

    Exit status: 0 every verdict is as expected, 1 one is not, 2 it could not be probed.

    Example: sundog probe all_gather --world 2 --replays 20
    """
    from .probing import command

    options = command.Options(tuple(targets or ()), world, backend, replays, seed, details, json)
    raise typer.Exit(command.run(options))


@bench.command("sim")
def bench_sim(json: Json = "") -> None:
    """What the simulator costs, next to Triton's own interpreter. No GPU needed.

    Example: sundog bench sim --json sim.json
    """
    from .bench import sim

    sim.main(json)


@bench.command("checker")
def bench_checker(json: Json = "") -> None:
    """What checking costs over plain simulation. No GPU needed; run it in the repository.

    Example: sundog bench checker --json checker.json
    """
    from .bench import checker

    checker.main(json)


@bench.command("data")
def bench_data(json: Json = "") -> None:
    """What the dataset costs: loading, writing, extracting graphs. No GPU needed.

    Example: sundog bench data --json data.json
    """
    from .bench import data

    data.main(json)


@bench.command("op")
def bench_op(
    op: Annotated[str, typer.Argument(help="an op, or a module with the names of one")],
    axis: Annotated[list[str] | None, typer.Option(help="NAME=v1,v2,... may be repeated")] = None,
    world: Annotated[int, typer.Option(help="ranks")] = 8,
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    link: Annotated[str, typer.Option(help="pcie: see docs/gpu.md")] = "",
    baseline: Annotated[str, typer.Option(help="names, with commas; default: all")] = "",
    samples: Annotated[int, typer.Option(help="per variant")] = 30,
    csv: Annotated[str, typer.Option(help="also write the medians to this file")] = "",
    json: Json = "",
    plot: Annotated[str, typer.Option(help="also draw bytes per second into this file")] = "",
    entries: Annotated[str, typer.Option(help="also put the best configs into this file")] = "",
) -> None:
    """Time an op against the limit of the GPU and against what one would call instead.

    Axes are fields of the problem, of the configs that have them, and `algo`.

    Example: sundog bench all_gather --axis numel=65536,1048576 --axis dtype=bfloat16 --world 4

    Example: sundog bench all_gather --axis algo=push,gluon --axis programs=8,32,128 --plot a.png
    """
    from .bench import commands

    files = csv, json, plot, link, entries
    raise typer.Exit(commands.op(op, axis or [], world, backend, baseline, samples, *files))


@bench.command("host")
def bench_host(
    world: Annotated[str, typer.Option(help="ranks, with commas")] = "1,2",
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    json: Json = "",
) -> None:
    """What an eager call with a cached plan costs the host.

    Example: sundog bench host --world 1,8 --json host.json
    """
    from .bench import commands

    raise typer.Exit(commands.host([int(size) for size in world.split(",")], backend, json))


@bench.command("gemm")
def bench_gemm(
    samples: Annotated[int, typer.Option(help="per variant and shape")] = 30,
    json: Json = "",
) -> None:
    """The matrix product that the fused kernels share, beside torch.mm.

    Example: sundog bench gemm --json gemm.json
    """
    from .bench import gemm

    raise typer.Exit(gemm.main(samples, json))


@bench.command("bound")
def bench_bound(
    world: Annotated[str, typer.Option(help="ranks, with commas")] = "2,8",
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    json: Json = "",
) -> None:
    """What it costs that every wait is bounded.

    Example: sundog bench bound --world 2,8 --json bound.json
    """
    from .bench import commands

    raise typer.Exit(commands.bound([int(size) for size in world.split(",")], backend, json))


@bench.command("trace")
def bench_trace(
    op: Annotated[str, typer.Argument(help="an op, op.algorithm, or a module with its names")],
    problem: Annotated[str, typer.Option(help="name=value,... of the problem")] = "",
    world: Annotated[int, typer.Option(help="ranks")] = 8,
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    link: Annotated[str, typer.Option(help="pcie: see docs/gpu.md")] = "",
    json: Json = "",
) -> None:
    """What the trace points of an op's kernels cost: time without and with them.

    Example: sundog bench trace all_gather_matmul.hbm_buffer --problem m=4096,n=3584,k=8192
    """
    from .bench import commands
    from .trace import Subject

    raise typer.Exit(commands.trace(Subject(op, problem), world, backend, link, json))


@bench.command("capture")
def bench_capture(
    world: Annotated[int, typer.Option(help="ranks")] = 8,
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual",
    nbytes: Annotated[int, typer.Option(help="of each rank's tensor")] = 8192,
    json: Json = "",
) -> None:
    """What a graph saves: 50 small all-reduces captured, called one by one, and empty kernels.

    Example: sundog bench capture --world 8 --json capture.json
    """
    from .bench import commands

    raise typer.Exit(commands.capture(world, backend, nbytes, json))


def main() -> None:
    app()
