"""The dataset in this repository: whole, small, as its card says, and split by the hash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.learn.kernels import SUBJECTS
from sundog.dataset import KernelData, load
from sundog.dataset.shards import SPLITS, in_test

FOLDER = Path(__file__).parents[2] / "data" / "h200"
TASK = ["kernel", "shape", "dtype"]


@pytest.fixture(scope="module")
def data() -> KernelData:
    return load("h200")


def test_it_is_whole_and_small(data: KernelData) -> None:
    assert data.verify() == []
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 12_000_000


def test_it_has_what_its_card_says(data: KernelData) -> None:
    tasks = data.tasks
    card = (FOLDER / "CARD.md").read_text()
    assert f"{len(data.rows):,}: {len(tasks):,} first measurements" in card
    assert len(tasks) >= 10_000
    assert set(tasks.kernel) <= set(SUBJECTS), "more are there: the next collection's"
    assert tasks.kernel.nunique() == 32
    assert tasks.groupby(TASK).ngroups == 608
    assert not tasks.duplicated([*TASK, "config"]).any()
    missing = [name for name in data.rows.columns if f"`{name}`" not in card]
    assert missing == [], "columns that the card does not describe"


def test_rows_with_times_are_right_and_sampled(data: KernelData) -> None:
    timed = data.rows[data.rows.status == "ok"]
    assert timed.samples_ns.map(len).min() >= 5
    assert timed.relative_error.astype(float).max() < 0.1
    assert timed.registers.notna().all()
    wrong = data.rows[data.rows.status == "wrong"]
    assert set(wrong.kernel) == {"cumsum"}
    assert set(wrong.dtype) == {"float32"}
    assert wrong.median_ns.isna().all()


def test_every_split_is_that_of_the_hash(data: KernelData) -> None:
    for split, (columns, _) in SPLITS.items():
        distinct = data.rows.drop_duplicates(list(columns))
        for row in distinct.to_dict("records"):
            assert row[f"test_{split}"] == in_test(split, row)
        train, test = data.split(split)
        keys = [set(map(tuple, part[list(columns)].to_numpy())) for part in (train, test)]
        assert keys[1]
        assert not keys[0] & keys[1]


def test_the_ir_of_a_row_is_there(data: KernelData) -> None:
    named = {*data.rows.ttir.dropna(), *data.rows.ttgir.dropna()}
    assert named <= set(data._ir.index), "more are there: compiled when the time was over"
    row = data.tasks[data.tasks.kernel == "attention_forward"].iloc[0]
    assert data.graph(row.ttgir).number_of_nodes() > 100
    assert json.loads(row.config)["num_warps"] == row.num_warps
