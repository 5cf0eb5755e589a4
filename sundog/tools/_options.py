"""The options of every command: a field is an option, a docstring is the command's help.

cli.py makes the commands of these. A file that is not named ("") is not written. Nothing heavy is
imported here, since `sundog --help` reads all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import typer

Target = Annotated[
    str, typer.Argument(help="an op, a module or file of one, module:function or file.py:function")
]
Op = Annotated[
    str, typer.Argument(help="an op, op.algorithm, or a module or file.py with the names of one")
]
Problem = Annotated[str, typer.Option(help="fields of the problem to change, name=value,...")]
Problems = Annotated[
    list[str] | None,
    typer.Option(
        "--problem", help="fields of the problem to change, name=value,...; may be repeated"
    ),
]
Ranks = Annotated[int, typer.Option(help="number of ranks")]
Preset = Annotated[str, typer.Option(help="shapes of a model and its ranks: llama3-70b-tp8")]
Link = Annotated[str, typer.Option(help="pcie: peers' data in host memory, see docs/gpu.md")]
Json = Annotated[str, typer.Option("--json", help="also write the result to this file, as JSON")]
Html = Annotated[str, typer.Option(help="also write a page for a browser to this file")]
Plot = Annotated[str, typer.Option(help="also draw the result into this file")]
# An option whose help explains what 0, its default, stands for.
_with_zero = partial(typer.Option, show_default=False)


@dataclass(frozen=True)
class CheckOptions:
    """Look for races, wrong scopes, deadlocks and stale data on the simulator.

    With --mutate it weakens every signal, wait, barrier and scope in turn, and the checker must
    report each. An op's file may list equivalent mutants: see docs/checker.md.

    Exit status: 0 nothing found, 1 findings or surviving mutants, 2 it could not be checked.

    Example: sundog check examples/ring.py --world 3 --schedules 20 --mutate
    """

    target: Target = ""
    world: Annotated[
        int | None, typer.Option(help="number of ranks (default: 4; 2 with --exhaustive)")
    ] = None
    schedules: Annotated[int, typer.Option(help="number of interleavings to try")] = 50
    seed: Annotated[int, typer.Option(help="seed of the first schedule")] = 0
    schedule: Annotated[str, typer.Option(help="replay this schedule: a finding's token")] = ""
    sms: Annotated[
        int, _with_zero(help="programs resident per rank (default: 16, and fewer in some runs)")
    ] = 0
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="run every inequivalent interleaving instead")
    ] = False
    seconds: Annotated[float, typer.Option(help="time limit of --exhaustive")] = 300.0
    strict: Annotated[bool, typer.Option("--strict", help="count remarks as findings")] = False
    torch: Annotated[
        bool, typer.Option("--torch", help="main() was written for torchrun and CUDA")
    ] = False
    mutate: Annotated[bool, typer.Option(help="weaken every synchronisation in turn")] = False
    corpus: Annotated[str, typer.Option(help="check this folder of deliberately wrong kernels")] = (
        ""
    )
    json: Json = ""
    html: Html = ""

    @property
    def ranks(self) -> int:
        """The number of ranks. All interleavings of four take too long."""
        return self.world if self.world is not None else 2 if self.exhaustive else 4


@dataclass(frozen=True)
class IsaOptions:
    """Show what the compilers make of an op's kernels, for GPUs that you do not have.

    Without an op it takes all ops. The table has widths, atomics, registers and spills. It marks
    an access of less than 16 bytes in the wide path, a spill, a heap distance that the innermost
    loop loads again or cuts to 32 bits, and a load that is issued before the wait it depends on.

    The wide path is every tile access through an argument that holds data. Single elements, flags,
    small tiles and masked tails do not count.

    Exit status: 0 nothing marked, 1 marked, 2 it could not be compiled.

    Example: sundog isa all_gather.push --target sm_90 --problem numel=1048576,dtype=float32
    """

    op: Target = ""
    target: Annotated[str, typer.Option(help="architectures to compile for")] = (
        "sm_90,gfx942,gfx950"
    )
    config: Annotated[str, typer.Option(help="fields of the config to change")] = ""
    problem: Problem = ""
    world: Ranks = 8
    json: Json = ""
    html: Html = ""


@dataclass(frozen=True)
class TuneOptions:
    """Search for the best config of an op, and keep every attempt in the dataset LOG.

    Exit status: 0 tuned, 1 every config failed, 2 it could not be tuned, 130 interrupted.

    Example: sundog tune all_gather.push --problem numel=1048576,dtype=bfloat16 --budget 100
    """

    op: Op = ""
    problems: Problems = None
    preset: Preset = ""
    world: Ranks = 8
    budget: Annotated[int, typer.Option(help="configs to try for each algorithm")] = 200
    search: Annotated[str, typer.Option(help="pattern, model, random or exhaustive")] = "pattern"
    log: Annotated[str, typer.Option(help="base name of the dataset (default tune-OP)")] = ""
    seed: Annotated[int, typer.Option(help="seed of the search")] = 0
    resume: Annotated[bool, typer.Option(help="continue this run; keep the results in the log")] = (
        False
    )
    compile_only: Annotated[bool, typer.Option(help="compile without timing; needs no GPU")] = False
    target: Annotated[str, typer.Option(help="architectures to compile for, or to promote")] = ""
    promote: Annotated[bool, typer.Option(help="copy the best configs into the package")] = False
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual"
    link: Link = ""
    farm: Annotated[str, typer.Option(help="a Ray cluster: ray://host:port, or local")] = ""
    html: Html = ""


@dataclass(frozen=True)
class TraceOptions:
    """Record who waited for whom: a timeline with an arrow from each signal to its wait.

    Exit status: 0 written, 2 it could not be traced.

    Example: sundog trace all_gather --out trace.json --plot trace.png --world 4
    """

    op: Op
    out: Annotated[str, typer.Option(help="the file for ui.perfetto.dev")] = field(kw_only=True)
    problem: Problem = ""
    world: Ranks = 8
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")] = ""
    link: Link = ""
    plot: Annotated[str, typer.Option(help="also draw the slowest rank into this file")] = ""
    json: Json = ""
    html: Html = ""
    programs: Annotated[int, typer.Option(help="programs per rank that can be recorded")] = 256
    events: Annotated[int, typer.Option(help="events per program that can be recorded")] = 1024


@dataclass(frozen=True)
class ProbeOptions:
    """Capture ops in a graph, replay them with new data, and compare every result.

    Without a target it probes all ops, barriers, and send and receive.

    Exit status: 0 every verdict is as expected, 1 one is not, 2 it could not be probed,
    130 interrupted.

    Example: sundog probe all_gather --world 2 --replays 20
    """

    targets: Annotated[list[str] | None, typer.Argument(help="ops, or module:function")] = None
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")] = ""
    world: Ranks = 2
    replays: Annotated[
        int, _with_zero(help="replays per column (default: 12 on the simulator, 100 on a GPU)")
    ] = 0
    seed: Annotated[int, typer.Option(help="seed of the simulator's schedules")] = 0
    details: Annotated[bool, typer.Option(help="show in full what went wrong")] = False
    json: Json = ""
    html: Html = ""


@dataclass(frozen=True)
class BenchOptions:
    """Benchmark an op against the hardware limit and the PyTorch equivalent.

    An axis is a field of the problem, a field of the configs that have it, or `algo`.

    Exit status: 0 timed, 1 a result was wrong or a variant failed, 2 it could not be timed.

    Example: sundog bench all_gather --axis numel=65536,1048576 --axis dtype=bfloat16 --world 4

    Example: sundog bench all_gather --axis algo=push,gluon --axis programs=8,32,128 --plot a.png

    Example: sundog bench suite published --backend symm --axis channels=8,32 --json a.json
    """

    op: Op
    axes: Annotated[
        list[str] | None, typer.Option("--axis", help="NAME=v1,v2,...; may be repeated")
    ] = None
    suite: Annotated[str, typer.Argument(help="its name, if OP is the word suite: published")] = ""
    problems: Problems = None
    preset: Preset = ""
    world: Ranks = 8
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual"
    link: Link = ""
    baselines: Annotated[
        list[str] | None,
        typer.Option("--baseline", help="a name, or none; may be repeated (default: all)"),
    ] = None
    samples: Annotated[int, typer.Option(help="samples per variant")] = 30
    warmup: Annotated[int, typer.Option(help="samples before these, not reported")] = 2
    csv: Annotated[str, typer.Option(help="also write the medians to this file")] = ""
    json: Json = ""
    plot: Plot = ""
    bars: Annotated[str, typer.Option(help="also draw measured beside expected times")] = ""
    entries: Annotated[str, typer.Option(help="also put the best configs into this file")] = ""
    html: Html = ""


@dataclass(frozen=True)
class PredictOptions:
    """Predict how long an op's algorithms take on a machine that you do not have.

    FILE.py:FUNCTION, and an op with --simulate, runs on the simulator with a clock for every
    program. The result is the time, the critical path, and what each rank waited for.

    Machines: h200-shared, h200-pcie, h200x8, h100x8, mi300x8, h200x8-2nodes, or a file that
    `sundog calibrate` wrote. docs/predict.md says how far off the model is.

    Exit status: 0 predicted, 2 it could not be predicted: no such machine, axis or model.

    Example: sundog predict all_reduce --machine h200x8,mi300x8 --axis numel=1024..1048576
    """

    op: Op
    machine: Annotated[str, typer.Option(help="machines or files, separated by commas")] = ""
    axis: Annotated[
        str, typer.Option(help="NAME=v1,v2,... or NAME=first..last (default: tensors of all sizes)")
    ] = ""
    problem: Problem = ""
    world: Ranks = 8
    late: Annotated[float, typer.Option(help="microseconds by which one rank is late")] = 0.0
    compare: Annotated[bool, typer.Option(help="show what each time is made of")] = False
    json: Json = ""
    plot: Plot = ""
    simulate: Annotated[bool, typer.Option(help="run the op's kernels on a simulated clock")] = (
        False
    )
    sms: Annotated[int, _with_zero(help="SMs per rank of a simulation (default: all)")] = 0
    data: Annotated[
        bool | None,
        typer.Option("--data/--no-data", help="compute float tiles (default: for FILE.py only)"),
    ] = None
    timeline: Annotated[str, typer.Option(help="write a simulation for ui.perfetto.dev")] = ""
    html: Html = ""


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure this machine, for `sundog predict` and for `algo="auto"`.

    It times collectives and products of several sizes, and fits the model's figures to them.
    docs/predict.md lists these figures, and the ones that it copies from a machine of the package.

    Exit status: 0 written, 2 it could not be measured.

    Example: sundog calibrate --world 8 --backend virtual --out mine.json
    """

    world: Ranks = 8
    backend: Annotated[str, typer.Option(help="virtual or symm")] = "virtual"
    clock: Annotated[
        str, typer.Option(help="take times from this machine's model; measure nothing")
    ] = ""
    out: Annotated[str, typer.Option(help="file to write (default: in SUNDOG_CACHE)")] = ""


@dataclass(frozen=True)
class ReportOptions:
    """Make one HTML page of what was checked, traced, tuned and measured.

    It needs no network and no server. docs/report.md shows its views.

    Exit status: 0 written, 2 a file could not be read, and nothing was written.

    Example: sundog report -o report.html found.json trace.json runs/tune-all_gather

    Example: sundog report --compare old.html new.html
    """

    files: Annotated[
        list[str] | None,
        typer.Argument(help="files of check, trace, bench, probe, isa, predict; bases; reports"),
    ] = None
    out: Annotated[
        str, typer.Option("--out", "-o", help="the page (default: report.html, comparison.html)")
    ] = ""
    compare: Annotated[
        bool, typer.Option("--compare", help="two reports: show what got better and worse")
    ] = False


@dataclass(frozen=True)
class NewOpOptions:
    """Write NAME.py: an op that every command accepts, with comments that explain each name.

    Exit status: 0 written, 2 the name can't be that of a new module, or the file exists.

    Example: sundog new op row_sum --dir my_kernels
    """

    name: Annotated[str, typer.Argument(help="name of the op and of its file")]
    folder: Annotated[str, typer.Option("--dir", help="folder to write it to")] = "."
