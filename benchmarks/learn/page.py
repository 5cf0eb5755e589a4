"""`python -m benchmarks.learn page`: RESULTS.md, made from the files in measured/.

No figure of that page is typed by hand, but for those of a record that says so of itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sundog.learn.kernel_model import ORDERED

from .evaluate import GOALS, NETWORKS, SHIPS

_HERE = Path(__file__).parent
PAGE = _HERE / "RESULTS.md"
_SPLITS = {"shape": "unseen shapes", "kernel": "unseen kernels", "dtype": "unseen dtypes"}
_WANTED = {"shape": (0.85, 0.90), "kernel": (0.60, 0.80)}
_WORST = 6
NEW = "kernels-4"  # the collection whose test tasks nobody had seen


def page() -> str:
    scores, fresh, graphs, folds, combined, outside = (
        json.loads((_HERE / "measured" / f"{name}.json").read_text())
        for name in ("scores", "fresh", "graphs", "folds", "combined", "outside")
    )
    parts = [_fresh(fresh), _scores(scores, graphs), _folds(folds), _combined(combined)]
    parts += [_failures(scores)]
    parts += [_outside(outside), _noise(fresh)]
    head = "# What was learned from `data/h200`\n\nMade by `python -m benchmarks.learn page` from "
    return head + "`measured/`. `README.md` says what the words mean.\n\n" + "\n".join(parts)


def _fresh(found: dict[str, Any]) -> str:
    """Show how near each comes on the tasks that were looked at before, and on the new ones."""
    heads, lines = [], []
    for split, scores in found["splits"].items():
        heads.append(f"{_SPLITS[split]}: tau | before | new | all")
        lines.append({score["name"]: _by_age(score) for score in scores})
    rows = [f"| | {' | '.join(heads)} |", "|---|" + "---|" * (4 * len(heads))]
    names = dict.fromkeys(name for each in lines for name in each)
    for name in sorted(names, key=lambda name: name != SHIPS):  # what ships comes first
        cells = [each.get(name, " | | | ") for each in lines]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    goals = {_SPLITS[split]: _WANTED[split] for split in found["splits"]}
    goal = ", ".join(f"{_part(near)} and a tau of {tau} of {n}" for n, (tau, near) in goals.items())
    return (
        "## What ships, on old and new test tasks\n\nTrained on all four collections. "
        f"`{SHIPS}` is what ships: the first {ORDERED} by the order of `networks`, whose tau is "
        'its own, then each measurement updates the model. "As it goes": from the second on. '
        '"New" are the test tasks of `kernels-4`, "before" those of the others. A cell is the part '
        "of the tasks that are near, ± one standard error, with their number. The goals are "
        f"{goal}.\n\n" + "\n".join(rows) + "\n"
    )


def _by_age(score: dict[str, Any]) -> str:
    parts = score["by_collection"]
    new = [tuple(parts[NEW])] if NEW in parts else []
    before = [tuple(part) for name, part in parts.items() if name != NEW]
    cells = [_near(each) for each in (before, new, [*before, *new])]
    return " | ".join([_tau(score["tau"]), *cells])


def _near(parts: list[tuple[float, int]]) -> str:
    tasks = sum(count for _, count in parts)
    part = sum(near * count for near, count in parts) / tasks
    error = (part * (1 - part) / tasks) ** 0.5
    return f"{_part(part)} ± {_part(error)} of {tasks}"


def _scores(found: dict[str, Any], graphs: dict[str, Any]) -> str:
    every = {name: [*found["splits"][name], *graphs["splits"].get(name, [])] for name in _SPLITS}
    splits = {name: {s["name"]: s for s in scores} for name, scores in every.items()}
    names = list(dict.fromkeys(name for each in splits.values() for name in each))
    head = "| | " + " | ".join(f"{text}: tau | near" for text in _SPLITS.values()) + " |"
    lines = [head, "|---|" + "---|" * (2 * len(_SPLITS))]
    tasks = [f"{next(iter(each.values()))['tasks']} | " for each in splits.values()]
    lines.append(f"| tasks | {' | '.join(tasks)} |")
    goals = [_WANTED.get(name, (None, None)) for name in _SPLITS]
    lines.append("| goal | " + " | ".join(f"{_tau(t)} | {_part(n)}" for t, n in goals) + " |")
    for name in names:
        cells = [splits[split].get(name, {}) for split in _SPLITS]
        text = " | ".join(f"{_tau(c.get('tau'))} | {_part(c.get('near'))}" for c in cells)
        lines.append(f"| {name} | {text} |")
    words = [f"{_SPLITS[s]} within {GOALS[s][1] - 1:.0%} after {GOALS[s][0]}" for s in _SPLITS]
    note = f"Near: {', '.join(words)} measurements. An empty cell was not computed. "
    note += f"The graph models were trained for {graphs['settings']['epochs']} epochs on a CPU."
    head = "## Models and searches before `kernels-4`\n\nTrained and tested on the first three "
    return head + "collections, 52,049 rows.\n\n" + "\n".join(lines) + f"\n\n{note}\n"


def _folds(found: dict[str, Any]) -> str:
    heads = [", ".join(each["models"]) for each in found["tried"]]
    cells = [
        [_part(each["near"]) for each in line]
        for line in zip(*(each["updated"] for each in found["tried"]), strict=True)
    ]
    figures = [(each["error"], each["reach"]) for each in found["tried"][0]["updated"]]
    marks = [" (ships)" if list(pair) == found["chosen"] else "" for pair in figures]
    names = [f"{e}{mark} | {r}" for (e, r), mark in zip(figures, marks, strict=True)]
    lines = [f"| error | reach | {' | '.join(heads)} |", "|---|---|" + "---|" * len(heads)]
    lines += [f"| {n} | {' | '.join(line)} |" for n, line in zip(names, cells, strict=True)]
    return (
        "## How the model and its update were chosen\n\nOn "
        f"{found['tasks']} training tasks of all four collections, in {found['folds']} folds by "
        "kernel and shape, with models that did not see the fold. Near as for unseen shapes. "
        "Networks ship, with what is marked. `README.md` says what was known when the choice was "
        "made.\n\n"
        + "\n".join(_begun(found))
        + "\n\nThe figures of an update that begins with the second measurement, after "
        + f"{found['budgets'][0]} measurements:\n\n"
        + "\n".join(lines)
        + "\n"
    )


def _begun(found: dict[str, Any]) -> Iterator[str]:
    """Show how near each comes, by when its update begins."""
    models = [", ".join(each["models"]) for each in found["tried"]]
    heads = [f"{name}: after {budget}" for name in models for budget in found["budgets"]]
    yield f"| measurements by the order, then updated | {' | '.join(heads)} |"
    yield "|---" * (1 + len(heads)) + "|"
    for line in zip(*(each["begun"] for each in found["tried"]), strict=True):
        ordered = line[0]["ordered"]
        mark = " (ships)" if ordered == ORDERED else ""
        cells = [_part(near) for each in line for near in each["near"]]
        yield f"| {ordered}{mark} | {' | '.join(cells)} |"


def _combined(found: dict[str, Any]) -> str:
    """Show each with the standard error of a part of that many tasks."""
    lines = ["| models | tau | the order alone | updated |", "|---|---|---|---|"]
    for each in found["combined"]:
        parts = (each["order_alone"], each["near"])
        cells = [f"{_part(p)} ± {_part((p * (1 - p) / each['tasks']) ** 0.5)}" for p in parts]
        lines.append(f"| {', '.join(each['models'])} | {_tau(each['tau'])} | {' | '.join(cells)} |")
    made, tasks = found["networks"], found["combined"][0]["tasks"]
    return (
        f"## Which models together\n\nOn all {tasks} training tasks of unseen shapes in "
        f"{found['folds']} folds, by `combine`. Its {made['networks']} networks are small: width "
        f"{made['width']}, {made['epochs']} epochs. Near as for unseen shapes; ± one standard "
        "error.\n\n" + "\n".join(lines) + "\n"
    )


def _failures(found: dict[str, Any]) -> str:
    lines = ["| " + " | ".join(f"{text} | tau" for text in _SPLITS.values()) + " |"]
    lines.append("|" + "---|" * (2 * len(_SPLITS)))
    worst = []
    for split in _SPLITS:
        by_name = {s["name"]: s for s in found["splits"][split]}
        by_kernel = by_name[NETWORKS]["by_kernel"]
        worst.append(sorted(by_kernel.items(), key=lambda pair: pair[1])[:_WORST])
    for row in zip(*worst, strict=True):
        lines.append("| " + " | ".join(f"`{kernel}` | {tau:.2f}" for kernel, tau in row) + " |")
    return "## Where it fails\n\nThe worst kernels of the networks:\n\n" + "\n".join(lines) + "\n"


def _outside(found: list[dict[str, Any]]) -> str:
    lines = [
        "| task | model: until near | ends at | s | pattern: until near | ends at | s | all: s |",
        "|---|---|---|---|---|---|---|---|",
        *_lines(found),
    ]
    near = {n: sum(e[n]["until_near"] is not None for e in found) for n in ("model", "pattern")}
    means = {
        n: statistics.mean(e[n]["seconds"] for e in found)
        for n in ("model", "pattern", "exhaustive")
    }
    printed = [each["task"] for each in found if each.get("printed")]
    return (
        "## Tasks outside the dataset, on the H200\n\n`sundog.tune_triton`, each time with an "
        "empty compiler cache: the model with 5 measurements, the pattern search with 20, all 48 "
        'configs. "Until near": measurements until one was within 2 % of the best.\n\n'
        + "\n".join(lines)
        + f"\n\nWithin 2 %: model {near['model']} of {len(found)}, pattern search "
        f"{near['pattern']}. Mean seconds: model {means['model']:.2f}, pattern search "
        f"{means['pattern']:.2f}, all {means['exhaustive']:.2f}. Of {', '.join(printed)} the "
        "printed line was kept; its file was lost. It ran with the update, whose figures were then "
        "error 0.15 and reach 2. The others ran half an hour before with the search that it "
        "replaces, which began with the same config; all were near after two measurements at "
        "most.\n"
    )


def _lines(found: list[dict[str, Any]]) -> Iterator[str]:
    for each in found:
        cells = [each["task"]]
        for name in ("model", "pattern"):
            part = each[name]
            cells += [str(part["until_near"] or "never"), f"{part['over_best']:.3f}"]
            cells += [f"{part['seconds']:.2f}"]
        yield "| " + " | ".join([*cells, f"{each['exhaustive']['seconds']:.2f}"]) + " |"


def _noise(found: dict[str, Any]) -> str:
    lines = ["| measured again | rows | median | 90th percentile | 99th | tau |", "|---" * 6 + "|"]
    words = {"same_collection": "up to a minute later", "another_collection": "8.7 hours later"}
    for name, text in words.items():
        n = found["noise"][name]
        lines.append(
            f"| {text} | {n['rows_again']:,} | {n['p50']} % | {n['p90']} % | {n['p99']} % "
            f"| {n['tau']} |"
        )
    return "## Noise\n\n" + "\n".join(lines) + "\n"


def _tau(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _part(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}".replace("%", " %")
