"""Look at a base from the command line: `sundog data info|validate|join|export|show BASE`.

`sundog data import helion BASE` makes a base of the log that Helion writes by itself.

No command ends in a traceback: damage is named with its line, and the rest is shown. Files appear
whole or not at all.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from .reader import Dataset, read
from .schema import file_names

app = typer.Typer(
    help="Inspect, validate, join and export what tuning runs recorded.\n\n"
    "Exit status: 0 fine, 1 `validate` found damage, 2 it could not be done.\n\n"
    "Example: sundog data info runs/matmul",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
import_app = typer.Typer(
    help="Import the logs of other tuners.\n\nExit status: 0 imported, 1 damaged lines were left "
    "out, 2 it could not be done.\n\nExample: sundog data import helion runs/log",
    no_args_is_help=True,
)
app.add_typer(import_app, name="import")
Base = Annotated[str, typer.Argument(help="the name before .csv, .meta.jsonl and .ir.jsonl")]
Out = Annotated[str | None, typer.Option(help="where to write; by default beside the base")]


@app.command()
def info(base: Base) -> None:
    """Show counts and the best configuration of every run.

    Exit status: 0 shown, 2 the base could not be read.

    Example: sundog data info runs/matmul
    """
    data = _read(base)
    table = Table(title=escape(f"{base}: {len(data.rows)} rows, {len(data.graphs)} graphs"))
    for column in ("kernel", "run", "session", "configs", "ok", "failed", "best ms", "best", "s"):
        table.add_column(column, overflow="fold")
    groups = {str(k): v for k, v in data.rows.groupby("session", observed=True, sort=False)}
    for session in dict.fromkeys([*data.runs.session, *groups]):  # a run may have no row
        rows = groups.get(session, data.rows.iloc[:0])
        table.add_row(*[escape(cell) for cell in _summary(data, session, rows)])
    Console(emoji=False).print(table)
    if data.damage:
        typer.echo(f"{len(data.damage)} damaged lines: sundog data validate {base}", err=True)


def _summary(data: Dataset, session: str, rows: object) -> list[str]:
    import pandas as pd

    assert isinstance(rows, pd.DataFrame)
    runs = data.runs[data.runs.session == session]
    name = runs.kernel_name.iloc[0] if len(runs) else "(no metadata)"
    seconds = f"{runs.seconds.iloc[0]:.1f}" if len(runs) and runs.ended.iloc[0] else "not ended"
    ok, started = rows[rows.status == "ok"], (rows.status == "started").sum()
    failed = len(rows) - len(ok) - started - (rows.status == "compiled").sum()
    shown = ["", ""]
    if ok.perf_ms.notna().any():
        # As in the end record, which a killed run lacks: the lowest median over repeats.
        medians = ok.groupby("config_index").perf_ms.median()
        best = ok[ok.config_index == medians.idxmin()].iloc[0]
        mark = " (synthetic)" if best.timer == "synthetic" else ""
        shown = [f"{medians.min():.4f}{mark}", best.decorator or best.config]
    run_id = str((rows if len(rows) else runs).run_id.iloc[0])
    return [name, run_id[:8], session[:8], str(started), str(len(ok)), str(failed), *shown, seconds]


@app.command()
def validate(base: Base) -> None:
    """Check types, joins, ids and hashes, and name the file and line of each defect.

    Exit status: 0 no damage, 1 damage was found, 2 the base could not be read.

    Example: sundog data validate runs/matmul
    """
    from . import validate as checks

    data = _read(base, damaged=1)
    with _progress("checking") as progress:
        report = checks.validate(data, progress)
    for note in report.notes:
        typer.echo(f"note: {note}")
    for damage in report.damage:
        typer.echo(str(damage))
    rows, runs, graphs = len(data.rows), len(data.runs), len(data.graphs)
    verdict = f"{len(report.damage)} damaged" if report.damage else "all is well"
    typer.echo(f"{base}: {rows} rows, {runs} runs, {graphs} graphs: {verdict}")
    raise typer.Exit(1 if report.damage else 0)


@app.command()
def join(base: Base, out: Out = None) -> None:
    """Print rows with their runs as one CSV table, or write it to a file.

    Exit status: 0 written, 2 the base could not be read, or the file not written.

    Example: sundog data join runs/matmul --out joined.csv
    """
    joined = _read(base).join()
    if out is None:
        joined.to_csv(sys.stdout, index=False)
    else:
        _write(out, lambda path: joined.to_csv(path, index=False))


@app.command()
def export(base: Base, out: Out = None) -> None:
    """Write the joined table and the graphs as Parquet: OUT.parquet and OUT.graphs.parquet.

    Exit status: 0 written, 2 the base could not be read, or a file not written.

    Example: sundog data export runs/matmul --out matmul
    """
    data = _read(base)  # refuses, with the reason, where pandas is missing
    import pandas as pd

    from .ir_graph import canonical_json

    out = out or base
    joined = data.join()
    _write(f"{out}.parquet", lambda path: joined.to_parquet(path, index=False))
    if not len(data.graphs):
        return
    texts: dict[str, str] = {}
    with _progress("graphs") as progress:
        for done, ir_id in enumerate(data.graphs.ir_id):
            try:
                texts[ir_id] = canonical_json(data.record(ir_id))
            except (ValueError, RecursionError) as error:
                typer.echo(f"graph {ir_id[:12]} is left out: {error}", err=True)
            progress(done + 1, len(data.graphs))
    kept = data.graphs[data.graphs.ir_id.isin(texts)].drop(columns="line")
    graphs = kept.assign(record=pd.Series(texts).reindex(kept.ir_id).to_numpy())
    _write(
        f"{out}.graphs.parquet",
        lambda path: graphs.to_parquet(path, index=False, compression="zstd"),
    )


@app.command()
def show(
    base: Base,
    run: Annotated[
        str | None, typer.Option(help="run_id or session, or its start; default: the last run")
    ] = None,
    out: Out = None,
) -> None:
    """Draw a run's convergence and its IR graph to PNG, or print them without matplotlib.

    Exit status: 0 shown, 2 the base could not be read, or it has no such run.

    Example: sundog data show runs/matmul --run 3f2a --out matmul
    """
    data = _read(base)
    if not len(data.rows):
        _refuse(f"{base}.csv has no rows")
    try:
        session = data.session_of(run or str(data.rows.session.iloc[-1]))
    except ValueError as error:
        _refuse(str(error))
    if _has_matplotlib():
        _show_pictures(data, session, out or base)
    else:
        typer.echo("matplotlib is not installed (pip install matplotlib): text instead")
        _show_text(data, session)


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def _show_pictures(data: Dataset, session: str, out: str) -> None:
    from . import pictures

    rows = data.select(session)
    name = _kernel_name(data, session)
    path = f"{out}.{session}.convergence.png"
    title = f"{name}, session {session}"
    if (rows.timer == "synthetic").any():
        title += " (synthetic times)"
    _write(path, lambda temporary: pictures.draw_convergence(rows, title, temporary))
    ir_ids = _graphs_of(data, session)
    if not ir_ids:
        typer.echo("this run recorded no IR graph")
    for ir_id in ir_ids:
        try:
            graph = data.graph(ir_id)
        except ValueError as error:
            typer.echo(f"graph {ir_id[:12]} cannot be drawn: {error}", err=True)
            continue
        draw = functools.partial(pictures.draw_graph, graph, name)
        _write(f"{out}.{ir_id[:12]}.graph.png", draw)


def _show_text(data: Dataset, session: str) -> None:
    from . import pictures

    best = pictures.best_so_far(data.select(session))
    for row in best[best.best_ms.diff().fillna(-1) < 0].itertuples():
        typer.echo(f"{row.timestamp_s:10.2f} s  {row.best_ms:10.4f} ms  {row.decorator}")
    for ir_id in _graphs_of(data, session):
        try:
            nodes = data.graph(ir_id).nodes(data=True)
        except ValueError as error:
            typer.echo(f"graph {ir_id[:12]} cannot be shown: {error}", err=True)
            continue
        for name, node in nodes:
            typer.echo(f"{name}: {pictures.node_label(name, node)}")


@import_app.command("helion")
def import_helion_log(
    base: Annotated[str, typer.Argument(help="the value of HELION_AUTOTUNE_LOG")],
    out: Annotated[str | None, typer.Option(help="the new base; default: BASE.imported")] = None,
) -> None:
    """Import what Helion logs by itself: rows, metadata and, from 1.5 on, the IR graph.

    Exit status: 0 imported, 1 damaged lines were left out, 2 a log is missing or OUT exists.

    Example: sundog data import helion runs/log --out runs/matmul
    """
    from .helion.import_log import import_helion

    out = out or f"{base}.imported"
    try:
        found = import_helion(base, out)
    except (OSError, ValueError) as error:
        _refuse(str(error))
    for damage in found.damage:
        typer.echo(f"{damage}: left out", err=True)
    typer.echo(
        f"{out}: {found.num_rows} rows, {found.num_runs} runs, {found.num_graphs} with a graph, "
        f"{len(found.damage)} damaged lines"
    )
    raise typer.Exit(1 if found.damage else 0)


def _graphs_of(data: Dataset, session: str) -> list[str]:
    """Return the graphs of the run, or of its best configuration if they depend on it."""
    run = data.runs[data.runs.session == session]
    if len(run) and isinstance(run.ir_id.iloc[0], str):
        return [i for i in [run.ir_id.iloc[0]] if i in data.ir_lines]
    rows = data.select(session)
    rows = rows[rows.ir_id != ""].sort_values("perf_ms")
    ids = str(rows.ir_id.iloc[0]).split() if len(rows) else []
    return [i for i in ids if i in data.ir_lines]


def _kernel_name(data: Dataset, session: str) -> str:
    run = data.runs[data.runs.session == session]
    return str(run.kernel_name.iloc[0]) if len(run) else "kernel"


def _read(base: str, damaged: int = 2) -> Dataset:
    with _progress("reading") as progress:
        try:
            return read(base, progress)
        except (ImportError, OSError, ValueError) as error:
            # Other columns are damage, found at a line; no such base is bad usage.
            status = damaged if f"{file_names(base)[0]}:1:" in str(error) else 2
            _refuse(f"{error}{_hint(base)}", status)


def _hint(base: str) -> str:
    """Explain what a base is, if one of its files was given instead."""
    for suffix in (".csv", ".meta.jsonl", ".ir.jsonl"):
        if base.endswith(suffix) and os.path.exists(base):
            return f". A base is the name before {suffix}: {base.removesuffix(suffix)}"
    return ""


def _refuse(text: str, status: int = 2) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(status)


def _write(path: str, write: Callable[[str], object]) -> None:
    """Write a file beside `path`, then move it there: a full disk leaves what was there before."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{os.getpid()}.{name}")
    if os.path.exists(path) and not os.path.isfile(path):
        temporary = path  # a device or a pipe: nothing to keep
    try:
        write(temporary)
        if temporary != path:
            os.replace(temporary, path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        _refuse(f"{path} cannot be written: {reason or error}")
    finally:
        if temporary != path:
            with suppress(OSError):
                os.unlink(temporary)
    typer.echo(f"wrote {path}")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar until the work is done; nothing if the output is not a terminal."""
    console = Console(emoji=False, stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
