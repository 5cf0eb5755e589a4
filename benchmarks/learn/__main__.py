"""`python -m benchmarks.learn`: arguments of the commands, and nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make the dataset of kernels, and learn from it.", no_args_is_help=True)
Names = Annotated[list[str] | None, typer.Argument(help="kernels; all if none is named")]


@app.command()
def check(names: Names = None) -> None:
    """Compare the kernels with their references (TRITON_INTERPRET=1; needs no GPU)."""
    from . import check_kernels

    raise typer.Exit(1 if check_kernels.check(names or []) else 0)


@app.command()
def collect(
    out: Annotated[Path, typer.Argument(help="a folder; what it has is not measured again")],
    names: Names = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="ends by then")] = 7.0,
    workers: Annotated[int, typer.Option(min=0, help="that compile; 0: all cores but one")] = 0,
    configs: Annotated[int, typer.Option(min=1, help="of each kernel at most")] = 120,
    data: Annotated[
        Path | None, typer.Option(help="a dataset, data/h200: its rows are not measured again")
    ] = None,
    remeasure: Annotated[
        int, typer.Option(min=0, help="measure this many rows of --data again: the noise")
    ] = 0,
    shapes: Annotated[
        int,
        typer.Option(min=0, help="draw this number of new shapes of each kernel; take only those"),
    ] = 0,
    clock: Annotated[str, typer.Option(help="gpu, or made-up: without a GPU, for tests")] = "gpu",
) -> None:
    """Measure kernels on the GPU of this machine and write rows to a folder."""
    # Inputs of all sizes come and go: without it the GPU's memory falls to pieces.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    from .collect import Collector, Options

    if clock not in ("gpu", "made-up"):
        raise typer.BadParameter(f"{clock!r}: expected gpu or made-up", param_hint="--clock")
    if remeasure and data is None:
        raise typer.BadParameter("expected --data too: whose rows?", param_hint="--remeasure")
    options = Options(
        out, minutes, names or [], workers, configs, clock=clock, data=data, remeasure=remeasure,
        shapes=shapes,
    )  # fmt: skip
    typer.echo(Collector(options).run())


@app.command()
def unmeasured(
    data: Annotated[str, typer.Argument(help="a dataset: h200, or a folder")] = "h200",
) -> None:
    """Name the kernels that have no rows in a dataset, for `collect`."""
    from sundog.dataset import load

    from .kernels import SUBJECTS

    known = set(load(data).rows["kernel"])
    typer.echo(" ".join(name for name in SUBJECTS if name not in known))


@app.command()
def pack(
    run: Annotated[Path, typer.Argument(help="what `collect` filled", exists=True)],
    folder: Annotated[Path, typer.Argument(help="of the dataset: data/h200")],
    name: Annotated[str, typer.Argument(help="of the new shard")],
) -> None:
    """Make a Parquet shard of a run, and the checksums of all shards."""
    from . import pack

    try:
        typer.echo(pack.pack(run, folder, name))
    except ValueError as error:
        typer.echo(f"python -m benchmarks.learn pack: {error}", err=True)
        raise typer.Exit(2) from None


@app.command("pack-helion")
def pack_helion(
    base: Annotated[Path, typer.Argument(help="recorded tunings of Helion: data/h200/helion")],
    folder: Annotated[Path, typer.Argument(help="of the dataset: data/h200")],
    name: Annotated[str, typer.Argument(help="of the new shard")],
) -> None:
    """Make a Parquet shard of Helion's own tunings, and the checksums of all shards."""
    from . import pack_helion

    try:
        typer.echo(pack_helion.pack_helion(base, folder, name))
    except ValueError as error:
        typer.echo(f"python -m benchmarks.learn pack-helion: {error}", err=True)
        raise typer.Exit(2) from None


@app.command()
def evaluate(
    data: Annotated[str, typer.Argument(help="a dataset: h200, or a folder")] = "h200",
    split: Annotated[list[str] | None, typer.Option(help="shape, kernel, dtype, random")] = None,
    json: Annotated[str, typer.Option("--json", help="also write the scores to this file")] = "",
    networks: Annotated[
        Path | None, typer.Option(help="a folder with SPLIT.npz that `train` made; else they train")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="this score and no other; again for more of them")
    ] = None,
) -> None:
    """Compare cost models and searches on the fixed splits (needs scikit-learn)."""
    from .results import show

    show(data, split or ["shape", "kernel", "dtype", "random"], json, networks, only or [])


@app.command()
def train(
    out: Annotated[Path, typer.Argument(help="write the networks to this file")],
    data: Annotated[str, typer.Option(help="a dataset: h200, or a folder")] = "h200",
    split: Annotated[str, typer.Option(help="leave its test part out: shape, kernel, ...")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    epochs: Annotated[int, typer.Option(min=1)] = 50,
    networks: Annotated[int, typer.Option(min=1, help="whose scores are averaged")] = 4,
    fold: Annotated[
        int, typer.Option(min=-1, max=4, help="leave this fifth of the training tasks out as well")
    ] = -1,
) -> None:
    """Train the networks of `sundog.tune_triton`, or those of a split for `evaluate`."""
    from sundog.dataset import load

    from .evaluate import hidden_kernels
    from .network import Settings
    from .train import save_networks

    settings = Settings(networks=networks, epochs=epochs, hide_kernel=hidden_kernels(split))
    if not split:  # the tuner's kernels are others', and are scored before they are compiled, too
        settings = replace(settings, hide_kernel=0.5, hide=0.15)
    save_networks(load(data), split, out, settings, device, fold)
    typer.echo(f"{out}: {out.stat().st_size} bytes")


@app.command()
def graphs(
    data: Annotated[str, typer.Argument(help="a dataset: h200, or a folder")] = "h200",
    split: Annotated[str, typer.Option(help="shape, kernel, dtype or random")] = "shape",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    epochs: Annotated[int, typer.Option(min=1)] = 40,
    json: Annotated[str, typer.Option("--json", help="also write the scores to this file")] = "",
) -> None:
    """Train a graph model on a split and print its scores, beside those of `evaluate`."""
    from .network import Settings
    from .results import show_graphs

    show_graphs(data, split, json, Settings(epochs=epochs), device)


@app.command()
def outside(
    out: Annotated[Path, typer.Argument(help="a file; what it has is not measured again")],
    seconds: Annotated[float, typer.Option(min=1, help="begin no task after these")] = 90.0,
) -> None:
    """Tune tasks that the dataset does not have, on the GPU: model, pattern search, all configs."""
    from .outside import measure_all

    measure_all(out, "cuda", seconds)


@app.command()
def choose(
    folder: Annotated[Path, typer.Argument(help="has foldN.npz of `train --fold N`", exists=True)],
    out: Annotated[str, typer.Argument(help="write what is near to this file")],
    data: Annotated[str, typer.Option(help="a dataset: h200, or a folder")] = "h200",
) -> None:
    """Try figures of the tuner's update on folds of the training tasks."""
    from .results import choose

    choose(data, folder, out)


@app.command()
def combine(
    out: Annotated[str, typer.Argument(help="write how near each combination comes to this file")],
    data: Annotated[str, typer.Option(help="a dataset: h200, or a folder")] = "h200",
) -> None:
    """Average small networks, trees and Gaussian processes on folds of the training tasks."""
    from .results import combine

    combine(data, out)


@app.command()
def page() -> None:
    """Write RESULTS.md from what is in measured/."""
    from .page import PAGE, page

    PAGE.write_text(page())


@app.command("train-ops")
def train_ops(
    folder: Annotated[Path, typer.Argument(help="recorded tunings: data/h200", exists=True)],
    out: Annotated[Path | None, typer.Option(help="write the model to this file")] = None,
) -> None:
    """Train the model of `sundog tune --search model`; show how it does on problems left out."""
    from . import train_ops

    train_ops.main(folder, out)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.learn")
