"""`sundog tune`: from the command line's words to a tuning run, a progress bar and the result.

Exit status: 0 tuned, 1 nothing could be timed or compiled, 2 could not, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from ...errors import SundogError
from .cache import promote
from .space import fields_text
from .tune import Place, Tuned, tune
from .tune import Progress as Step

__all__ = ["run", "run_promote"]

DONE, NOTHING, CANNOT, INTERRUPTED = 0, 1, 2, 130


def run(
    op: str, problems: list[str], world: int, budget: int, search: str, log: str, seed: int,
    resume: bool, targets: list[str], place: Place,
) -> int:  # fmt: skip
    errors = Console(stderr=True)
    try:
        if not op:
            raise ValueError("which op? For example: sundog tune all_gather")
        with _bar(errors) as step:
            done = tune(
                op, problems, world=world, budget=budget, search=search, log=log, seed=seed,
                resume=resume, targets=targets, place=place, progress=step,
            )  # fmt: skip
    except KeyboardInterrupt:
        text = "interrupted. What was measured is kept; the same command with --resume goes on."
        errors.print(f"sundog tune: {text}", soft_wrap=True)
        return INTERRUPTED
    except (ValueError, ImportError, SundogError) as error:
        errors.print(escape(f"sundog tune: {error}"), style="red", soft_wrap=True)
        return CANNOT
    _print(done)
    return DONE if any(each.useful for each in done) else NOTHING


def run_promote(targets: list[str]) -> int:
    """The user's measured bests into the package."""
    try:
        written = promote(targets)
    except (ValueError, OSError) as error:
        Console(stderr=True).print(escape(f"sundog tune --promote: {error}"), style="red")
        return CANNOT
    for path, entries in written:
        print(f"{path}: {len(entries)} entries")
        for entry in entries:
            print(f"  {entry.op} {entry.problem}: {1e6 * entry.seconds:.1f} us, {entry.date}")
    return DONE


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Step]:
    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # long, so it gets what is left
    columns = (
        TextColumn("{task.description}", table_column=what), BarColumn(bar_width=10),
        MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[best]}"),
    )  # fmt: skip
    no_bar = not console.is_terminal  # the result says the same
    with Progress(*columns, console=console, expand=True, disable=no_bar) as bar:
        tasks: dict[str, object] = {}

        def step(job: str, done: int, total: int, best: str) -> None:
            if job not in tasks:
                tasks[job] = bar.add_task(job, total=total, best="")
            shown = f"best {best}" if best else ""
            bar.update(tasks[job], completed=done, best=shown)  # type: ignore[arg-type]

        yield step


def _print(done: list[Tuned]) -> None:
    for each in done:
        what = f"{each.op} {fields_text(each.problem)} on {each.target}"
        print(f"{what}: {each.tried} tried, {each.failed} failed")
        if not each.useful:
            print(f"  the last one: {each.error}")
        if each.milliseconds is not None:
            print(f"  best: {each.milliseconds:.4f} ms with {fields_text(each.config)}")
            default = each.default_milliseconds
            if default is not None:
                ratio = default / each.milliseconds
                print(f"  {ratio:.3f} times as fast as the default, {fields_text(each.default)}")
            parts = f"the GPU's process was busy for {each.busy:.0%}, rows took {each.writing:.2%}"
            print(f"  of {each.seconds:.1f} s {parts}")
