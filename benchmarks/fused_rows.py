"""`python -m benchmarks fused-rows`: is `auto` right for the products of models?

Rows are drawn by a fixed seed from a grid: four ops, the layers of seven public models split among
the ranks, and 16 to 16,384 rows of A; every fifth problem has an odd size as well. For each one all
our algorithms and what a user would call instead are timed by `sundog bench`. The table has the
time of `auto`'s choice over our fastest, and over the fastest other. Worst first.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import torch

from sundog import target
from sundog.ops.load import changed, find, parse
from sundog.ops.select import choose
from sundog.tools._options import BenchOptions
from sundog.tools.bench.run import Row, bench
from sundog.tools.presets import MODELS, preset

from .result_files import Figures

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_SEED = 22
_MOST_FLOPS = 6e12  # of all ranks: about 10 ms on one H200, so that the time lasts for many rows
_AT_ONCE = 6  # problems of a world: opening one takes seconds
_ODD_EVERY = 5
_ALLOWED_OURS, _ALLOWED_OTHER = 1.02, 1.05


class Asked(NamedTuple):
    op: str
    problem: str  # as `--problem` takes it


class Judged(NamedTuple):
    asked: Asked
    choice: str  # of `auto`
    seconds: float  # that it took
    best: str
    over_ours: float  # its time over that of the best of ours
    other: str  # the fastest of what a user would call instead
    over_other: float


def draw(count: int, size: int, seed: int = _SEED) -> list[Asked]:
    """Draw different rows of the grid, as many of each op."""
    chance = random.Random(seed)
    grid = {op: _grid(op, size) for op in OPS}
    for problems in grid.values():
        chance.shuffle(problems)
    found: list[Asked] = []
    for number in range(max(map(len, grid.values()))):
        for op, problems in grid.items():
            if number < len(problems):
                text = problems[number]
                found.append(Asked(op, _odd(text) if number % _ODD_EVERY == 0 else text))
    return found[:count]


def _grid(op: str, size: int) -> list[str]:
    """List all problems of all models that are not too large; a gathered A in both shardings."""
    texts = [text for model in MODELS for text in preset(f"{model}-tp{size}", op)[0]]
    if op == "all_gather_matmul":
        texts += [text.replace("shard=m", "shard=k") for text in texts]
    first = find(op).cases(size)[0]
    problems = {text: changed(first, parse(text)) for text in dict.fromkeys(texts)}
    flops = {text: 2.0 * each.m * each.n * each.k * size for text, each in problems.items()}
    return [text for text in problems if flops[text] < _MOST_FLOPS]


def _odd(text: str) -> str:
    """Return the same with columns that no vector divides; rows stay: ranks split them."""
    fields = dict(word.split("=") for word in text.split(","))
    fields["n"] = str(int(fields["n"]) - 1)
    return ",".join(f"{name}={value}" for name, value in fields.items())


def judge(asked: Asked, rows: list[Row], choice: str) -> Judged | None:
    """Compare what `auto` chose; None if it, or everything else, could not be timed."""
    timed = {row.variant: (row.times.median, row) for row in rows if row.times is not None}
    ours = {name: seconds for name, (seconds, row) in timed.items() if row.entry is not None}
    others = {
        name: seconds
        for name, (seconds, row) in timed.items()
        if row.entry is None and "A gathered" not in name  # a part of the op
    }
    if choice not in ours or not others:
        return None
    best, other = min(ours, key=ours.__getitem__), min(others, key=others.__getitem__)
    mine = ours[choice]
    return Judged(asked, choice, mine, best, mine / ours[best], other, mine / others[other])


def main(count: int, size: int, backend: str, minutes: float, json_file: str) -> None:
    end = time.monotonic() + 60 * minutes
    asked, judged, sought = draw(count, size), [], 0
    for op in _in_turn(asked):
        if time.monotonic() > end:
            break
        sought += len(op)
        judged += _of_one_op(op, size, backend)
        print(f"{len(judged)} of {sought} rows, {end - time.monotonic():.0f} s left", flush=True)
    _figures(judged, count, size, backend).show(json_file)


def _in_turn(asked: list[Asked]) -> list[list[Asked]]:
    """Group by op, a few at a time: a run that is cut has rows of each."""
    by_op = {op: [each for each in asked if each.op == op] for op in OPS}
    starts = range(0, max(map(len, by_op.values())), _AT_ONCE)
    groups = [by_op[op][start : start + _AT_ONCE] for start in starts for op in OPS]
    return [group for group in groups if group]


def _of_one_op(asked: list[Asked], size: int, backend: str) -> list[Judged]:
    op, kind = asked[0].op, target.key_of(torch.device("cuda", 0))
    texts = [each.problem for each in asked]
    options = BenchOptions(op, world=size, backend=backend, problems=texts, samples=6, warmup=1)
    rows, _ = bench(options)
    first, found = find(op).cases(size)[0], []
    for each in asked:
        problem = changed(first, parse(each.problem))
        mine = [row for row in rows if row.problem == str(problem)]
        num_sms = next(row.entry.num_sms for row in mine if row.entry is not None)
        choice = choose(op, problem, kind, num_sms, backend=backend).algo
        found.append(judge(each, mine, choice))
    return [each for each in found if each is not None]


def _figures(judged: list[Judged], count: int, size: int, backend: str) -> Figures:
    over = sum(
        each.over_ours > _ALLOWED_OURS or each.over_other > _ALLOWED_OTHER for each in judged
    )
    text = (
        f"{size} ranks of one GPU on `{backend}`, {len(judged)} of {count} rows drawn with seed "
        f"{_SEED}; symmetric inputs and outputs, normal data. Allowed: {_ALLOWED_OURS} times our "
        f"fastest, {_ALLOWED_OTHER} times the fastest other. {over} are over it."
    )
    head = ["op", "problem", "auto", "us", "our fastest", "over it", "fastest other", "over it"]
    ranked = sorted(judged, key=lambda each: -max(each.over_ours, each.over_other))
    return Figures(f"Products of models on `{backend}`", text, head, [_cells(e) for e in ranked])


def _cells(each: Judged) -> list[str]:
    problem = each.asked.problem.replace(",dtype=bfloat16", "")
    ours = [each.best, f"{each.over_ours:.3f}", each.other, f"{each.over_other:.3f}"]
    return [each.asked.op, problem, each.choice, f"{1e6 * each.seconds:.1f}", *ours]
