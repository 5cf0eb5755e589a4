"""Shards: what a run becomes, how it is loaded, and that nothing in them can change unseen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pandas
import pytest
import torch

from benchmarks.learn.collect import Collector, Options
from benchmarks.learn.pack import pack
from benchmarks.learn.record import read_rows
from sundog.dataset import load
from sundog.dataset.shards import ELEMENTS, SPLITS, in_test


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with made-up times, made to look measured: pack refuses the others."""
    folder = tmp_path_factory.mktemp("run")
    names = ["dequantise_rows"]
    Collector(Options(folder, 1.0, names, workers=1, configs=3, clock="made-up")).run()
    at = [row["at"] for row in read_rows(folder)]
    readings = [f"{min(at) + n:.2f}, {1000 + n}, 3201, 40, 300.5\n" for n in range(100)]
    (folder / "gpu.csv").write_text("".join([*readings, "12.0, 99"]))
    return folder


@pytest.fixture(scope="module")
def packed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.raises(ValueError, match="made-up, not measured"):
        pack(run, run / "data", "one")
    about = run / "run.json"
    about.write_text(about.read_text().replace("made-up", "gpu"))
    folder = tmp_path_factory.mktemp("data")
    pack(run, folder, "one")
    return folder


def test_a_shard_holds_every_row_and_module(run: Path, packed: Path) -> None:
    data = load(packed)
    lines = list(read_rows(run))
    assert len(data.rows) == len(lines)
    assert data.verify() == []
    row = data.tasks.iloc[0]
    (line,) = [
        each
        for each in lines
        if each["shape"] == json.loads(row["shape"])
        and each["config"] == json.loads(row["config"])
        and each["dtype"] == row["dtype"]
        and not each["repeat"]
        and not each["control"]
    ]
    assert list(row["samples_ns"]) == line["samples_ns"]
    assert row["median_ns"] == sorted(line["samples_ns"])[2]
    assert 1000 <= row["sm_mhz"] < 1100
    assert data.graph(row["ttgir"]).number_of_nodes() > 20
    assert "tt.load" in data.text(row["ttir"])
    assert len(pandas.read_parquet(packed / "shards" / "one.rows.parquet")) == len(lines)


def test_graphs_as_arrays_have_every_operation_in_the_vocabulary(packed: Path) -> None:
    data = load(packed)
    for ir_id in {*data.tasks.ttir.dropna(), *data.tasks.ttgir.dropna()}:
        record, arrays = data.record(ir_id), data.arrays(ir_id)
        nodes = arrays["node"]
        assert len(nodes) == len(record["nodes"])
        assert arrays["edge"].shape == (2, len(record["links"]))
        assert arrays["edge"].max() < len(nodes)
        operations = nodes[nodes[:, 0] == 0]
        assert operations[:, 1].min() >= 1, "an operation that the vocabulary lacks"
        loads = operations[operations[:, 1] == data.vocabulary["tt.load"]]
        assert set(loads[:, 2]) <= {ELEMENTS.index(name) for name in ("i8", "f32")}
        assert loads[:, 4].max() > 4


def test_graphs_for_pytorch_geometric(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not among the tests' own: a stand-in keeps what it is given."""
    made = ModuleType("torch_geometric.data")
    made.Data = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_geometric", ModuleType("torch_geometric"))
    monkeypatch.setitem(sys.modules, "torch_geometric.data", made)
    data = load(packed)
    ir_id = data.rows.ttgir.dropna().iloc[0]
    (graph,) = data.to_pyg([ir_id])
    assert graph.ir_id == ir_id
    assert graph.edge_index.dtype == torch.int64
    assert graph.x.shape[0] == graph.edge_index.max() + 1


def test_what_graphs_need_is_said(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distribution sundog-dataset installs neither."""
    data = load(packed)
    ir_id = data.rows.ttgir.dropna().iloc[0]
    monkeypatch.setitem(sys.modules, "torch_geometric.data", None)
    with pytest.raises(ImportError, match="pip install torch torch_geometric triton"):
        data.to_pyg([ir_id])
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", None)
    with pytest.raises(ImportError, match=r"Triton is not installed: pip install triton \(torch"):
        data.graph(ir_id)


def test_splits_are_those_of_the_hash_and_share_no_test_task(packed: Path) -> None:
    data = load(packed)
    for split, (columns, _) in SPLITS.items():
        for row in data.rows.to_dict("records"):
            assert row[f"test_{split}"] == in_test(split, row)
        train, test = data.split(split)
        assert len(train) + len(test) == len(data.tasks)
        keys = [set(zip(*(part[name] for name in columns), strict=True)) for part in (train, test)]
        assert not keys[0] & keys[1]
    with pytest.raises(ValueError, match="expected one of random"):
        data.split("other")


def test_a_shard_is_written_once_and_a_change_is_found(run: Path, packed: Path) -> None:
    with pytest.raises(ValueError, match="written once"):
        pack(run, packed, "one")
    pack(run, packed, "two")
    modules = pandas.read_parquet(packed / "shards" / "two.ir.parquet")
    assert modules.empty, "a module that an earlier shard has is not stored again"
    path = packed / "shards" / "two.rows.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (packed / "shards" / "two.ir.parquet").unlink()
    wrong = load(packed).verify()
    assert len(wrong) == 2
    assert "missing" in wrong[0]
    assert "checksum" in wrong[1]
    path.unlink()


def test_a_later_run_leaves_out_what_the_dataset_has(packed: Path, tmp_path: Path) -> None:
    names = ["dequantise_rows"]
    options = Options(tmp_path, 1.0, names, workers=1, configs=3, clock="made-up", data=packed)
    assert "rows ok" not in Collector(options).run()["counts"]


def test_a_dataset_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="SUNDOG_DATA"):
        load("no-such-set")
