"""`sundog tune`: run the tuner with the command line's options, and print the result."""

from __future__ import annotations

from dataclasses import replace

from ...report.page import write_report
from ...report.sections import read_sections
from .._console import FINE, FOUND, command, ensure_compiler_cache, progress
from .._options import TuneOptions
from ..presets import preset
from .cache import promote
from .space import fields_text
from .tune import Tuned, TunePlace, default_log, tune


@command("tune")
def run(options: TuneOptions) -> int:
    """Exit with 1 if every config failed."""
    targets = [name for name in options.target.split(",") if name]
    if options.promote:
        return run_promote(targets)
    if not options.op:
        raise ValueError("missing OP, for example: sundog tune all_gather")
    if options.preset:
        more, ranks = preset(options.preset, options.op)
        options = replace(options, problems=[*(options.problems or ()), *more], world=ranks)
    ensure_compiler_cache()
    try:
        with progress() as show:
            done = tune(
                options.op, options.problems or [], world=options.world, budget=options.budget,
                search=options.search, log=options.log, seed=options.seed, resume=options.resume,
                targets=(targets or ["sm_90", "gfx942"]) if options.compile_only else [],
                place=TunePlace(options.backend, options.link), farm=options.farm, progress=show,
            )  # fmt: skip
    except KeyboardInterrupt:
        text = "interrupted. What was measured is kept; the same command with --resume goes on."
        raise KeyboardInterrupt(text) from None
    _print(done)
    if options.html:
        write_report(options.html, read_sections(f"{options.log or default_log(options.op)}.csv"))
    return FINE if any(each.useful for each in done) else FOUND


@command("tune --promote")
def run_promote(targets: list[str]) -> int:
    """Copy the user's measured bests into the package."""
    for path, entries in promote(targets):
        print(f"{path}: {len(entries)} entries")
        for entry in entries:
            print(f"  {entry.op} {entry.problem}: {1e6 * entry.seconds:.1f} us, {entry.date}")
    return FINE


def _print(done: list[Tuned]) -> None:
    for each in done:
        what = f"{each.op} {fields_text(each.problem)} on {each.target}"
        print(f"{what}: {each.tried} tried, {each.failed} failed")
        if each.unknown_to_model:
            print("  the model does not know this op on this GPU: the pattern search ran instead")
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
