"""docs/peers.md, generated from the results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..result_files import read_result
from .not_run import NOT_RUN

_ON_GPU = Path(__file__).parents[2] / "docs" / "measured" / "h200-peers.json"

_GENERATED = re.compile(r"\bc[a-z0-9]{51}\.py")  # of Helion's kernels, by their content
_FAILURES = {
    "deadlock": "deadlock",
    "Assume failed": "wrong assumption",
    "nobody has written": "unwritten memory",
    "is not simulated": "not simulated",
}

_HEAD = """# Other people's kernels

Kernels of other projects, run and checked **unmodified** on a CPU with \
`python -m benchmarks.peers` (the adapters are in `benchmarks/peers`; none of their code is in \
this repository). *Remarks* are errors only with \
`--strict`: see [kernel boundaries](memory_model.md#kernel-boundaries) and [undefined \
lanes](checker.md#undefined-lanes). This page is generated: \
`python -m benchmarks.peers benchmarks/peers/results.json.xz --page docs/peers.md`.

To check a kernel of your own: `sundog check script.py:main --torch --world 4`.
"""


def page(given: list[dict[str, Any]]) -> str:
    """Return the page: a table per repository, every finding with its repair, and the mutants."""
    results = [each for each in given if "mutants" not in each]
    mutants = [each for each in given if "mutants" in each]
    parts = [_HEAD, f"Made on {_made(results)}. Times are of the processor, for all schedules."]
    names = dict.fromkeys((each["repository"], each["commit"]) for each in results)
    parts.append("\n".join(_summary(results, names)))
    for repository, commit in names:
        rows = [each for each in results if each["repository"] == repository]
        at = f" at `{commit[:10]}`" if commit else ""
        parts.append(f"## {repository}{at}\n\n" + "\n".join(_table(rows)))
        parts += ["\n".join(_findings(each)) for each in _alike(rows)]
        if repository in NOT_RUN:
            parts.append("\n".join(_not_run(NOT_RUN[repository])))
    parts.append("\n".join(_mutants(mutants)))
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
        "program. *Not needed*: explained below; the rate leaves these out. "
        f"Made on {_made(rows)}.\n"
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
    """Return when and with what the results were made."""
    return " and ".join(sorted({each["made"] for each in given}))


def _summary(results: list[dict[str, Any]], names: Any) -> Iterator[str]:
    yield (
        "*Equal*: the result equals torch's on every schedule; of kraken's tests, the test passes. "
        "*Clean*: the checker objects to nothing either. What is not clean has a small repair, "
        "which was made in a copy and run: *equal and clean with the repair*. Where a result is "
        "not equal, a schedule has shown a race of the program's, or its code is wrong by itself; "
        "each is explained below.\n"
    )
    yield (
        "| repository | kernels | programs | equal | equal and clean | equal and clean with the "
        "repair | slowest |"
    )
    yield "|---|---|---|---|---|---|---|"
    for repository, _ in names:
        rows = [each for each in results if each["repository"] == repository]
        equal = sum(not row["failures"] for row in rows)
        good = sum(not row["findings"] + row["failures"] for row in rows)
        mended = sum(_is_mended(row) for row in rows)
        slowest = max(row["seconds"] for row in rows)
        kernels = sum(row["kernels"] for row in rows)
        counts = kernels, len(rows), equal, good, mended
        yield f"| {repository} | {' | '.join(map(str, counts))} | {slowest:.0f} s |"


def _is_mended(row: dict[str, Any]) -> bool:
    after = row["after repair"]
    wrong = bool(row["findings"] + row["failures"])
    return wrong and after is not None and not after["findings"] + after["failures"]


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
    rules = dict.fromkeys([*(each["rule"] for each in found), *map(_kind, failures)])
    return ", ".join(rules) or "none"


def _kind(failure: str) -> str:
    """Name what ended a run, by the first words of what it said."""
    for words, kind in _FAILURES.items():
        if words in failure:
            return kind
    return "wrong result"


def _repaired(row: dict[str, Any]) -> str:
    after = row["after repair"]
    if after is None:
        return "not tried" if row["findings"] else ""
    return _rules(after["findings"], after["failures"]).replace("none", "clean")


def _alike(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Put together the programs that have the same findings and the same repair."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shown = _shown(row)
        if shown or row["failures"]:
            sides = sorted((each["rule"], *each["sides"]) for each in shown)
            found.setdefault(repr((sides, row["repairs"])), []).append(row)
    return [*found.values()]


def _shown(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings, and the remarks that a repair explains."""
    repaired = {each["rule"] for each in row["repairs"]}
    return row["findings"] + [each for each in row["remarks"] if each["rule"] in repaired]


def _findings(rows: list[dict[str, Any]]) -> Iterator[str]:
    row = rows[0]
    places = [f"`{each['kernel']}`" for each in rows]
    yield f"### {', '.join(places)} ({Path(row['path']).name})\n"
    for each in _shown(row):
        yield f"- **{each['rule']}**: {', then '.join(each['sides'])}. {_sentence(each['why'])}"
    failures = {_kind(why): why for each in rows for why in each["failures"]}
    for kind, why in failures.items():
        first = why.splitlines()[0].removeprefix("deadlock: ").replace("|", "/")
        yield f"- **{kind}**: {_sentence(first)}"
    for kernel, lines in row.get("ptx", {}).items():
        yield f"- *What orders memory in the PTX of* `{kernel}` *for sm_90*: {_ptx(lines)}."
    for repair in row["repairs"]:
        changes = "; ".join(" ".join(each.split()) for each in repair["changes"])
        yield f"- *Why it is right, and the repair*: {repair['why']} {changes}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".!") + "."


def _ptx(lines: list[str]) -> str:
    """Return the instructions; a kernel that needs its library to be compiled says so."""
    if len(lines) == 1 and lines[0].startswith("none: "):
        return lines[0].removeprefix("none: ").replace("`", "")
    shown = (_GENERATED.sub("the generated file", line.replace("`", "")) for line in lines)
    return ", ".join(f"`{line}`" for line in shown) or "nothing"
