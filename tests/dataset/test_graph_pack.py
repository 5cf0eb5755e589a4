"""Packed graphs come back exactly, are small, are read one by one, and damage is a ValueError."""

from __future__ import annotations

import contextlib
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sundog.dataset import ir_id_of
from sundog.dataset.graph_file import MAX_DEPTH, GraphReader, IrFile, Place
from sundog.dataset.graph_pack import from_rows, pack, to_rows, unpack

JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=6),
        st.sampled_from(["op1", "op12", "op007", "a~1", "~", "", "f32", "0", "\n"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
ITEM = st.dictionaries(
    st.sampled_from(["id", "node_kind", "edge_kind", "type", "location", "n"]), JSON, max_size=4
)
RECORD = st.fixed_dictionaries(
    {
        "graph": st.dictionaries(st.text(max_size=4), JSON, max_size=3),
        "nodes": st.lists(ITEM, max_size=5),
        "links": st.lists(ITEM, max_size=5),
    }
)


def exact(value: Any) -> str:
    """JSON text, in which True is not 1 and 1.0 is not 1."""
    return json.dumps(value, sort_keys=True)


@given(RECORD, RECORD)
@settings(max_examples=60, deadline=None)
def test_any_record_comes_back(record: Any, other: Any) -> None:
    rows, reference = to_rows(record), to_rows(other)
    assert exact(from_rows(rows)) == exact(record)
    assert unpack(pack(rows)) == rows
    assert unpack(pack(rows, reference), reference) == rows
    assert unpack(pack(rows, rows), rows) == rows


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_a_value_error(data: st.DataObject) -> None:
    reference = to_rows(kernel_graph(3, 4))
    packed = bytearray(pack(to_rows(kernel_graph(4, 4)), reference))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(packed)))
    for damaged in (bytes(packed), bytes(packed[:cut])):
        for known in (reference, None):
            with contextlib.suppress(ValueError):
                from_rows(unpack(damaged, known))


def test_a_few_bytes_that_stand_for_very_much_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sundog.dataset.graph_pack.MAX_VALUES", 10_000)
    rows = [f'[{n},{{"graph":{{}}}}]' for n in (5, 50)]
    first = json.dumps([[None, "x"], [None, *range(1000)]])
    again = "[[0],[0]]"  # the same thousand values
    assert len(from_rows([rows[0], first, *[again] * 4])["nodes"]) == 5
    with pytest.raises(ValueError, match="a record of more than 10000 values"):
        from_rows([rows[1], first, *[again] * 49])
    with pytest.raises(ValueError, match="copy of rows that are not there"):
        unpack(pack(["a", "b", "c", "d"], ["a", "b", "c", "d"]), ["a"])


def kernel_graph(block: int, ops: int = 60) -> Any:
    """A graph like a kernel's: one config changes the types, another one the number of ops."""
    kinds = [["tensor", [16 << block % 4, 32], "f32"], ["ptr", block % 3]]
    nodes: list[Any] = [{"id": "op0", "node_kind": "op", "op": "module"}]
    links: list[Any] = []
    for i in range(1, ops + block % 5):
        location = {"kind": "file", "file": "kernel.py", "line": 10 + i // 3, "column": i % 7}
        node = {"id": f"op{i}", "node_kind": "op", "op": f"tt.op{i % 9}", "location": location}
        nodes.append({**node, "type": kinds[i % 2], "attributes": {"axis": i % 2}})
        for operand in range(2):
            source = f"op{max(i - 1 - operand, 0)}"
            link = {"source": source, "target": f"op{i}", "key": operand, "edge_kind": "data"}
            links.append({**link, "operand": operand})
    record = {
        "schema_version": 1,
        "run_id": None,
        "directed": True,
        "multigraph": True,
        "graph": {"frontend": "test", "kernel_name": "k", "block": block},
        "nodes": nodes,
        "links": links,
    }
    return {**record, "ir_id": ir_id_of(record)}  # type: ignore[arg-type]


def reader_of(path: Path) -> GraphReader:
    reader, offset = GraphReader(str(path)), 0
    for line in path.read_bytes().splitlines(keepends=True):
        reader.places[json.loads(line)["ir_id"]] = Place(offset, len(line))
        offset += len(line)
    return reader


def test_graphs_of_a_kernel_take_little_more_than_an_archive(tmp_path: Path) -> None:
    path, graphs = tmp_path / "b.ir.jsonl", [kernel_graph(n, 300) for n in range(40)]
    file = IrFile(str(path))
    for graph in graphs:
        file.add(graph)
    text = b"".join(json.dumps(graph).encode() + b"\n" for graph in graphs)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    packed = sum(len(line["packed"]) for line in lines)
    assert packed < 1.5 * len(lzma.compress(text))
    assert path.stat().st_size < len(text) / 50
    assert max(line["depth"] for line in lines) <= MAX_DEPTH
    reader = reader_of(path)
    for graph in (graphs[0], graphs[17], graphs[-1]):
        assert reader.record(graph["ir_id"]) == graph


def test_one_graph_is_read_without_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "b.ir.jsonl"
    file = IrFile(str(path))
    for n in range(40):
        file.add(kernel_graph(n))
    read: list[str] = []
    line = GraphReader._line

    def counted(reader: GraphReader, ir_id: str) -> Any:
        read.append(ir_id)
        return line(reader, ir_id)

    monkeypatch.setattr(GraphReader, "_line", counted)
    reader_of(path).record(kernel_graph(39)["ir_id"])
    assert len(set(read)) <= 1 + MAX_DEPTH < 40


def test_two_writers_share_references(tmp_path: Path) -> None:
    path = tmp_path / "b.ir.jsonl"
    one, two = IrFile(str(path)), IrFile(str(path))
    for n in range(12):
        (one if n % 2 else two).add(kernel_graph(n))
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert sum(line["reference"] is not None for line in lines) >= 9
    reader = reader_of(path)
    assert all(reader.record(kernel_graph(n)["ir_id"]) == kernel_graph(n) for n in range(12))


def test_a_reference_that_is_gone_costs_the_graphs_that_need_it(tmp_path: Path) -> None:
    path = tmp_path / "b.ir.jsonl"
    file = IrFile(str(path))
    for n in range(3):
        file.add(kernel_graph(n))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[1:]))
    reader = reader_of(path)
    assert json.loads(lines[1])["reference"] == kernel_graph(0)["ir_id"]
    with pytest.raises(ValueError, match="which it refers to"):
        reader.record(kernel_graph(1)["ir_id"])
    # A writer does not build on it, and writes what is missing anew.
    again = IrFile(str(path))
    again.add(kernel_graph(0))
    assert reader_of(path).record(kernel_graph(0)["ir_id"]) == kernel_graph(0)


def test_the_graphs_of_the_h200_runs_are_small_and_whole() -> None:
    """438 graphs: 335 MB as JSON, 712,908 bytes as three archives of `xz -9`."""
    paths = sorted((Path(__file__).parents[2] / "data" / "h200").glob("all_*.ir.jsonl"))
    assert len(paths) == 3
    assert sum(path.stat().st_size for path in paths) < 1.5 * 712_908
    readers = [reader_of(path) for path in paths]
    assert sum(len(reader.places) for reader in readers) == 438
    for reader in readers:
        last = list(reader.places)[-1]
        assert ir_id_of(reader.record(last)) == last
