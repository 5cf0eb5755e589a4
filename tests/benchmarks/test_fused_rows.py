"""The rows that are drawn, and how a choice of `auto` is judged. Nothing is timed here."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fused_rows import OPS, Asked, draw, judge
from sundog.ops.load import changed, find, parse
from sundog.ops.op import Cost
from sundog.ops.select import Entry
from sundog.tools.bench.run import Row
from sundog.tools.presets import ROWS
from sundog.tools.timing import Times

pytestmark = pytest.mark.sim_only


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_draw_is_fixed_and_has_all_of_the_grid(size: int) -> None:
    drawn = draw(120, size)
    assert drawn == draw(120, size)
    assert len(set(drawn)) == 120
    assert {each.op for each in drawn} == set(OPS)
    problems = [changed(find(each.op).cases(size)[0], parse(each.problem)) for each in drawn]
    assert {problem.m for problem in problems} == set(ROWS)
    assert {getattr(problem, "shard", "m") for problem in problems} == {"m", "k"}
    assert sum(problem.n % 2 for problem in problems) >= 20
    assert len({problem.k for problem in problems}) >= 6, "of several models"


def row(variant: str, seconds: float, is_ours: bool = True) -> Row:
    entry = Entry(f"op.{variant}", {}, {}, 0.0, "", "", 16) if is_ours else None
    times = Times(variant, [[seconds, seconds]] * 3) if seconds else None
    return Row(variant, "", "", Cost(0, 0, 0, 0), 0.0, times=times, entry=entry)


ROWS_OF_ONE: list[Any] = [
    row("direct", 2.0),
    row("barrier", 1.6),
    row("cublas", 0.0),
    row("torch.mm, A gathered", 0.5, False),
    row("our all-gather, then torch.mm", 1.8, False),
    row("symm_mem.fused", 2.5, False),
]


def test_a_choice_competes_with_our_fastest_and_the_others() -> None:
    found = judge(Asked("op", ""), ROWS_OF_ONE, "direct")
    assert found is not None
    assert (found.best, found.other) == ("barrier", "our all-gather, then torch.mm")
    assert found.over_ours == pytest.approx(2.0 / 1.6)
    assert found.over_other == pytest.approx(2.0 / 1.8)


def test_a_choice_that_was_not_timed_is_no_row() -> None:
    assert judge(Asked("op", ""), ROWS_OF_ONE, "cublas") is None
