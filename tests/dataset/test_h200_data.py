"""The dataset in this repository: whole, small, as its card says, and split by the hash."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pandas
import pytest

from benchmarks.learn.kernels import SUBJECTS
from benchmarks.learn.pack_helion import rows_frame
from sundog.dataset import KernelData, load
from sundog.dataset.ir_graph import ir_id_of
from sundog.dataset.reader import read
from sundog.dataset.shards import SPLITS, in_test

FOLDER = Path(__file__).parents[2] / "data" / "h200"
TASK = ["kernel", "shape", "dtype"]


HELION = {"helion_add", "helion_attention", "helion_matmul", "helion_softmax"}
OF_A_LAUNCH = ["grid_x", "grid_y", "grid_z", "trips", "bytes", "flops", "shared"]
OF_A_LAUNCH += ["ttir", "ttgir", "sm_mhz", "memory_mhz", "temperature_c", "power_w"]


@pytest.fixture(scope="module")
def data() -> KernelData:
    return load("h200")


@pytest.fixture(scope="module")
def ours(data: KernelData) -> pandas.DataFrame:
    return data.rows[data.rows.kernel.isin(list(SUBJECTS))]


def test_it_is_whole_and_small(data: KernelData) -> None:
    assert data.verify() == []
    parts = [*FOLDER.glob("shards/*.parquet"), *FOLDER.glob("*.ir.jsonl")]
    assert sum(path.stat().st_size for path in parts) < 12_000_000, "shards and packed graphs"
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    packed = sum(len(zlib.compress(path.read_bytes(), 1)) for path in files)
    assert packed < 12_000_000, "with the logs of tunings, as git stores them"


def test_it_has_what_its_card_says(data: KernelData) -> None:
    tasks = data.tasks
    card = (FOLDER / "CARD.md").read_text()
    total = f"{len(data.rows):,} rows, of which {len(tasks):,} are first measurements"
    assert total in card
    for name, rows in data.rows.groupby("collection"):
        assert _counted(str(name), rows) in card
    assert set(tasks.kernel) == {*SUBJECTS, *HELION}
    assert not tasks.duplicated([*TASK, "config"]).any()
    missing = [name for name in data.rows.columns if f"`{name}`" not in card]
    assert missing == [], "columns that the card does not describe"


def _counted(name: str, rows: pandas.DataFrame) -> str:
    """Return the part of a collection's line in the card that can be computed."""
    first = rows[~rows.control & (rows["repeat"] == 0)]
    counts = first.status.value_counts().to_dict()
    told = ", ".join(f"{n:,} {'with times' if s == 'ok' else f'`{s}`'}" for s, n in counts.items())
    again = (~rows.control & (rows["repeat"] > 0)).sum()
    parts = [f"{len(first):,} first measurements ({told})"] if len(first) else []
    parts += [f"{again:,} again"] if again else []
    return f"{len(rows):,}: {', '.join([*parts, f'{rows.control.sum()} controls'])}"


def test_it_is_as_large_as_a_model_needs(data: KernelData) -> None:
    assert len(data.rows) >= 50_000
    assert data.tasks.kernel.nunique() >= 60
    assert data.tasks.groupby(TASK).ngroups >= 800


def test_every_row_has_the_facts_that_do_not_need_a_time(ours: pandas.DataFrame) -> None:
    """Registers, spills and occupancy are of the loaded kernel: missing where it was not."""
    assert ours[[*OF_A_LAUNCH, "compile_s"]].notna().all().all()
    loaded = ours[ours.status != "out_of_resources"]
    assert loaded[["registers", "spills", "occupancy"]].notna().all().all()


def test_rows_with_times_are_right_and_sampled(ours: pandas.DataFrame) -> None:
    timed = ours[ours.status == "ok"]
    assert timed.samples_ns.map(len).min() >= 5
    assert timed.relative_error.astype(float).max() < 0.1
    assert timed.registers.notna().all()
    wrong = ours[ours.status == "wrong"]
    assert set(wrong.kernel) == {"cumsum"}
    assert set(wrong.dtype) == {"float32"}
    assert wrong.median_ns.isna().all()


def test_rows_of_helion_are_those_that_it_recorded(data: KernelData) -> None:
    """What its record does not have is empty; every task has its device IR."""
    rows = data.rows[data.rows.collection == "helion-1"]
    assert set(rows.kernel) == HELION == set(data.rows.kernel) - set(SUBJECTS)
    pandas.testing.assert_frame_equal(
        rows[_FROM_HELION].reset_index(drop=True),
        rows_frame(read(FOLDER / "helion"), "helion-1")[_FROM_HELION],
    )
    absent = [*OF_A_LAUNCH, "registers", "spills", "occupancy", "relative_error", "samples_ns"]
    assert rows[absent].isna().all().all()
    assert rows.groupby(TASK).device_ir.nunique().eq(1).all()
    assert rows.groupby(TASK).ngroups == rows.device_ir.nunique() == 8
    for ir_id in rows.device_ir.unique():
        assert ir_id_of(data.record(ir_id)) == ir_id
        assert data.graph(ir_id).number_of_nodes() > 5
        with pytest.raises(ValueError, match="Helion's device IR, which has no arrays"):
            data.arrays(ir_id)


_FROM_HELION = ["kernel", "shape", "dtype", "config", "status", "median_ns", "compile_s", "repeat"]


def test_every_split_is_that_of_the_hash(data: KernelData) -> None:
    for split, (columns, _) in SPLITS.items():
        known = [*columns, f"test_{split}"]
        distinct = data.rows[known].drop_duplicates(list(columns))
        for row in distinct.to_dict("records"):
            assert row[f"test_{split}"] == in_test(split, row)
        train, test = data.split(split)
        keys = [set(map(tuple, part[list(columns)].to_numpy())) for part in (train, test)]
        assert keys[1]
        assert not keys[0] & keys[1]


def test_the_ir_of_a_row_is_there(data: KernelData) -> None:
    columns = ["ttir", "ttgir", "device_ir"]
    named = {name for column in columns for name in data.rows[column].dropna()}
    assert named <= set(data._ir.index), "more are there: compiled when the time was over"
    row = data.tasks[data.tasks.kernel == "attention_forward"].iloc[0]
    assert data.graph(row.ttgir).number_of_nodes() > 100
    assert json.loads(row.config)["num_warps"] == row.num_warps
    with pytest.raises(
        ValueError, match="IR 'gone': expected an id of the columns ttir, ttgir and device_ir"
    ):
        data.text("gone")


def test_importing_sundog_is_enough_to_load_it() -> None:
    """As the card says it: `sundog.dataset.load("h200")`, without torch and Triton."""
    code = (
        "import sys, sundog\n"
        "assert 'sundog.dataset' not in sys.modules and 'dataset' in dir(sundog)\n"
        "data = sundog.dataset.load('h200')\n"
        "assert not {'torch', 'triton', 'pandas'} & set(sys.modules)\n"
        "sys.modules['pyarrow'] = None\n"
        "data.rows\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: rows and IR: "), done.stderr
    assert last.endswith("pip install pandas pyarrow")
