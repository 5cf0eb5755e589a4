"""Load a dataset of measured kernels: `load("h200")`.

    data = load("h200")                     # a folder of the checkout's data/, or any folder
    data.rows                               # pandas: a row per measurement
    train, test = data.split("shape")       # fixed, by hash: see SPLITS
    data.text(ir_id)                        # the TTIR or TTGIR of a row, as text
    data.graph(ir_id)                       # the same as a networkx graph

The files are Parquet, in shards that are written once: `shards/*.rows.parquet` has the rows,
`shards/*.ir.parquet` the IR, each module once. pandas, polars and duckdb read them directly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .ir_graph import IrGraphRecord, to_networkx

if TYPE_CHECKING:
    import networkx
    import numpy
    import pandas

_SUMS = "SHA256SUMS"
DEVICE_IR = "device_ir"  # the stage of Helion's graphs, whose text is the record itself
# A hash of these columns decides, so that new rows move no old one; one in how many is a test.
SPLITS = {
    "random": (("kernel", "shape", "dtype", "config"), 10),
    "shape": (("kernel", "shape"), 5),  # in any dtype
    "dtype": (("kernel", "dtype"), 4),
    "kernel": (("function",), 4),
}


@dataclass(frozen=True)
class KernelData:
    """The shards of one folder."""

    folder: Path

    @cached_property
    def rows(self) -> pandas.DataFrame:
        """All measurements, with controls and repetitions: see the data card for the columns."""
        return self._read("rows")

    @property
    def tasks(self) -> pandas.DataFrame:
        """First measurements only, on which a model is trained and compared."""
        return self.rows[~self.rows.control & (self.rows["repeat"] == 0)]

    def split(self, name: str) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """Return the training and the test part of `tasks`: random, shape, dtype or kernel."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r}: expected one of {', '.join(SPLITS)}")
        tested = self.tasks[f"test_{name}"]
        return self.tasks[~tested], self.tasks[tested]

    def text(self, ir_id: str) -> str:
        if ir_id not in self._ir.index:
            raise ValueError(
                f"IR {ir_id!r}: expected an id of the columns ttir, ttgir and {DEVICE_IR}"
            )
        return str(self._ir.loc[ir_id, "text"])

    def record(self, ir_id: str) -> IrGraphRecord:
        """Return a module's graph; Helion's device IR is one already."""
        from .triton.ttir import extract_ttir_graph

        text = self.text(ir_id)
        if self._ir.loc[ir_id, "stage"] == DEVICE_IR:
            return cast(IrGraphRecord, json.loads(text))
        return extract_ttir_graph(text, kernel_name=str(self._ir.loc[ir_id, "kernel"]))

    def graph(self, ir_id: str) -> networkx.MultiDiGraph:
        return to_networkx(self.record(ir_id))

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The number of each operation in the IR of this dataset, from 1."""
        return vocabulary(self._ir.text[self._ir.stage != DEVICE_IR])

    def arrays(self, ir_id: str) -> dict[str, numpy.ndarray]:
        """Return a graph as arrays: "node", "edge" and "edge_kind"."""
        if self._ir.stage.get(ir_id) == DEVICE_IR:
            raise ValueError(
                f"{ir_id} is Helion's device IR, which has no arrays: use graph(ir_id)"
            )
        return graph_arrays(self.record(ir_id), self.vocabulary)

    def to_pyg(self, ir_ids: Iterable[str]) -> list[Any]:
        """Return graphs as `torch_geometric.data.Data`, with x, edge_index, edge_type and ir_id."""
        try:
            import torch
            from torch_geometric.data import Data
        except ModuleNotFoundError as error:
            raise ImportError(
                f"to_pyg: {error}. pip install torch torch_geometric triton; or use arrays(ir_id)"
            ) from error
        made = ((ir_id, self.arrays(ir_id)) for ir_id in ir_ids)
        return [
            Data(
                x=torch.from_numpy(arrays["node"]),
                edge_index=torch.from_numpy(arrays["edge"]),
                edge_type=torch.from_numpy(arrays["edge_kind"]),
                ir_id=ir_id,
            )
            for ir_id, arrays in made
        ]

    def verify(self) -> list[str]:
        """Return the files that are missing or differ from their checksums."""
        wrong = []
        for line in (self.folder / _SUMS).read_text().splitlines():
            wanted, name = line.split(maxsplit=1)
            path = self.folder / name
            if not path.exists():
                wrong.append(f"{name}: missing")
            elif hashlib.sha256(path.read_bytes()).hexdigest() != wanted:
                wrong.append(f"{name}: its checksum is not the one in {_SUMS}")
        return wrong

    @cached_property
    def _ir(self) -> pandas.DataFrame:
        return self._read("ir").drop_duplicates("id").set_index("id")

    def _read(self, sort: str) -> pandas.DataFrame:
        try:
            import pandas, pyarrow  # noqa: E401, F401, I001  pandas reads Parquet with pyarrow
        except ModuleNotFoundError as error:
            raise ImportError(f"rows and IR: {error}. pip install pandas pyarrow") from error
        found = sorted(self.folder.glob(f"shards/*.{sort}.parquet"))
        frames: list[Any] = [pandas.read_parquet(path) for path in found]
        return pandas.concat(frames, ignore_index=True)


def load(name: str | os.PathLike[str]) -> KernelData:
    """Open a folder with shards, or by its name one of the checkout's `data` or of $SUNDOG_DATA."""
    roots = [Path(), Path(__file__).parents[2] / "data"]
    if os.environ.get("SUNDOG_DATA"):
        roots.append(Path(os.environ["SUNDOG_DATA"]))
    for root in roots:
        if list((root / name).glob("shards/*.rows.parquet")):
            return KernelData(root / name)
    looked = ", ".join(str(root / name) for root in roots)
    raise FileNotFoundError(
        f"no dataset {os.fspath(name)!r}: {looked} have no shards/*.rows.parquet. Give a "
        "folder, or set SUNDOG_DATA to the folder that has it; a wheel comes without data."
    )


def in_test(split: str, row: Mapping[str, str]) -> bool:
    """Say whether a row, with the columns as text, is in the test part of a split."""
    columns, one_in = SPLITS[split]
    text = "\n".join([split, *(row[column] for column in columns)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % one_in == 0


# an IR graph as arrays, for models: operations by number, types, and edges

NODE = ("kind", "operation", "element", "rank", "log2_size")  # the columns of "node"
KINDS = ("op", "block", "argument")
EDGES = ("data", "region", "argument", "contains", "successor", "symbol")
ELEMENTS = (
    "", "i1", "i8", "i16", "i32", "i64", "f8E4M3FN", "f8E5M2", "f16", "bf16", "f32", "f64", "ptr",
)  # fmt: skip
_OPERATION = re.compile(r'(?:^|= )\s*"?([a-z_]+\.[a-z_0-9.]+)', re.M)


def vocabulary(texts: Iterable[str]) -> dict[str, int]:
    """Give the operations that modules have a number, from 1, in the order of their names."""
    found = {"builtin.module"}
    for text in texts:
        found.update(_OPERATION.findall(text))
    return {name: number for number, name in enumerate(sorted(found), start=1)}


def graph_arrays(record: IrGraphRecord, known: Mapping[str, int]) -> dict[str, numpy.ndarray]:
    """Return the nodes and edges of a Triton graph record as arrays.

    "node" is (nodes, 5), with the columns of NODE; "edge" is (2, edges), and "edge_kind" (edges,),
    with kinds as in EDGES. All are integers but the size of a tile: the base-2 logarithm of its
    elements.
    """
    import numpy  # importing the dataset must not need it

    places = {node["id"]: number for number, node in enumerate(record["nodes"])}
    nodes = [_node(node, known) for node in record["nodes"]]
    links = record["links"]
    edges = [[places[link["source"]], places[link["target"]]] for link in links]
    return {
        "node": numpy.array(nodes, dtype=numpy.float32).reshape(-1, len(NODE)),
        "edge": numpy.array(edges, dtype=numpy.int64).reshape(-1, 2).T,
        "edge_kind": numpy.array(
            [EDGES.index(link["edge_kind"]) for link in links], dtype=numpy.int64
        ),
    }


def _node(node: Mapping[str, Any], known: Mapping[str, int]) -> list[float]:
    kind = KINDS.index(node["node_kind"])
    types = node.get("result_types") or [node.get("type")]
    element, shape = _type(types[0])
    number = ELEMENTS.index(element) if element in ELEMENTS else 0
    size = math.log2(max(math.prod(shape), 1))
    return [kind, known.get(node.get("op", ""), 0), number, len(shape), size]


def _type(value: Any) -> tuple[str, list[int]]:
    """Return the element of a type and its shape: ("f16", [128, 64]); pointers are "ptr"."""
    if isinstance(value, str):
        return value, []
    if not isinstance(value, Mapping):
        return "", []
    if value.get("kind") == "tensor":
        return _type(value["element"])[0], list(value["shape"] or [])
    if value.get("kind") == "dialect" and str(value.get("name", "")).endswith("tt.ptr"):
        return "ptr", []
    shaped = [each for each in value.get("params", []) if isinstance(each, Mapping)]
    if shaped and shaped[0].get("kind") == "shaped":  # a buffer in shared memory
        return _type(shaped[0]["element"])[0], list(shaped[0]["shape"])
    return "", []
