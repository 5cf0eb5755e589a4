"""docs/peers.md, generated from the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..result_files import read_result
from .not_run import NOT_RUN

__all__ = ["page"]

_ON_GPU = Path(__file__).parents[2] / "docs" / "measured" / "h200-peers.json"

_HEAD = """# Other people's kernels

Kernels of other projects, run and checked **unmodified** on a CPU with \
`python -m benchmarks.peers` (the adapters are in `benchmarks/peers`; none of their code is in \
this repository). Every program compares its result with torch's. *Remarks* are errors only with \
`--strict`: see [kernel boundaries](memory_model.md#kernel-boundaries). This page is generated: \
`python -m benchmarks.peers benchmarks/peers/results.json.xz --page docs/peers.md`.

To check a kernel of your own: `sundog check script.py:main --torch --world 4`.
"""


def page(given: list[dict[str, Any]]) -> str:
    """Return the page: a table per repository, every finding with its repair, and the mutants."""
    results = [each for each in given if "mutants" not in each]
    parts = [_HEAD, _made(given)]
    names = dict.fromkeys((each["repository"], each["commit"]) for each in results)
    parts.append("\n".join(_summary(results, names)))
    for repository, commit in names:
        rows = [each for each in results if each["repository"] == repository]
        at = f" at `{commit[:10]}`" if commit else ""
        parts.append(f"## {repository}{at}\n\n" + "\n".join(_table(rows)))
        parts += ["\n".join(_findings(row)) for row in rows if row["findings"] or row["failures"]]
        if repository in NOT_RUN:
            parts.append("\n".join(_not_run(NOT_RUN[repository])))
    parts += ["\n".join(_mutants([each for each in given if "mutants" in each]))]
    parts.append("\n".join(_on_a_gpu()))
    return "\n\n".join(parts) + "\n"


def _not_run(reasons: dict[str, list[str]]) -> Iterator[str]:
    yield "### Not run\n"
    for why, kernels in reasons.items():
        yield f"- {', '.join(f'`{name}`' for name in kernels)}: {why}."


def _on_a_gpu() -> Iterator[str]:
    found = read_result(_ON_GPU)
    yield f"## {found['title']}\n"
    yield f"{found['text']}\n"
    yield f"| {' | '.join(found['head'])} |"
    yield "|" + "---|" * len(found["head"])
    for row in found["rows"]:
        yield f"| {' | '.join(row)} |"


def _mutants(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "## Mutants of their synchronisation\n"
    yield (
        "`python -m benchmarks.peers --mutate` removes or weakens every synchronisation of a "
        "kernel, one at a time, also in inline PTX and in calls of their own barriers. Kernels "
        "with findings are repaired first. A mutant is killed when the checker objects to one "
        "program. *Not needed*: explained below; the rate leaves these out.\n"
    )
    yield "| repository | mutants | killed | not needed | survived | rate |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        counts = row["mutants"], row["killed"], len(row["equivalent"]), len(row["survived"])
        rate = row["killed"] / max(1, row["mutants"] - len(row["equivalent"]))
        yield f"| {row['repository']} | {' | '.join(map(str, counts))} | {rate:.0%} |"
    for row in rows:
        yield ""
        for name, why in row["equivalent"].items():
            yield f"- {row['repository']}, not needed: `{name.replace('`', '')}`: {why}"
        for name in row["survived"]:
            yield f"- {row['repository']}, survived: `{name.replace('`', '')}`"
        for why in row["failures"]:
            yield f"- {row['repository']}, not tried: {why.splitlines()[0]}"


def _made(given: list[dict[str, Any]]) -> str:
    """Return when and with what the results were made; the time of a program is that of a CPU."""
    when = " and ".join(sorted({each["made"] for each in given}))
    return f"Made on {when}. Times are of the processor, for all schedules of a program."


def _summary(results: list[dict[str, Any]], names: Any) -> Iterator[str]:
    yield "| repository | kernels | programs | result equal to torch's | with findings | slowest |"
    yield "|---|---|---|---|---|---|"
    for repository, _ in names:
        rows = [each for each in results if each["repository"] == repository]
        good = sum(not row["failures"] for row in rows)
        bad = sum(bool(row["findings"]) for row in rows)
        slowest = max(row["seconds"] for row in rows)
        kernels = sum(row["kernels"] for row in rows)
        yield f"| {repository} | {kernels} | {len(rows)} | {good} | {bad} | {slowest:.0f} s |"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| kernel | file | ranks x schedules | findings | remarks | with the repair | time |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| `{row['kernel']}` | `{row['path']}` | {row['world']} x {row['schedules']} | "
            f"{_rules(row['findings'], row['failures'])} | {_rules(row['remarks'], [])} | "
            f"{_repaired(row)} | {row['seconds']:.0f} s |"
        )


def _rules(found: list[dict[str, Any]], failures: list[str]) -> str:
    rules = list(dict.fromkeys(each["rule"] for each in found))
    return ", ".join([*rules, *["wrong results"] * bool(failures)]) or "none"


def _repaired(row: dict[str, Any]) -> str:
    after = row["after repair"]
    if after is None:
        return "not tried" if row["findings"] else ""
    return _rules(after["findings"], after["failures"]).replace("none", "clean")


def _findings(row: dict[str, Any]) -> Iterator[str]:
    yield f"### `{row['kernel']}`\n"
    for each in row["findings"]:
        yield f"- **{each['rule']}**: {', then '.join(each['sides'])}. {each['why']}."
    for each in row["failures"]:
        yield f"- **wrong results**: {each.splitlines()[0].replace('|', '/')}"
    for kernel, lines in row.get("ptx", {}).items():
        text = ", ".join(f"`{line.replace('`', '')}`" for line in lines) or "nothing"
        yield f"- *What orders memory in the PTX of* `{kernel}` *for sm_90*: {text}."
    for repair in row["repairs"]:
        changes = "; ".join(repair["changes"])
        yield f"- *Why it is right, and the repair*: {repair['why']} {changes}."
