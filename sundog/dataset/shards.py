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
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ir_graph import IrGraphRecord, to_networkx

if TYPE_CHECKING:
    import networkx
    import numpy
    import pandas

__all__ = ["SPLITS", "KernelData", "in_test", "load"]

_SUMS = "SHA256SUMS"
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
        """First measurements alone: what a model is trained on and compared with."""
        return self.rows[~self.rows.control & (self.rows["repeat"] == 0)]

    def split(self, name: str) -> tuple[pandas.DataFrame, pandas.DataFrame]:
        """Return the training and the test part of `tasks`: random, shape, dtype or kernel."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r}: expected one of {', '.join(SPLITS)}")
        tested = self.tasks[f"test_{name}"]
        return self.tasks[~tested], self.tasks[tested]

    def text(self, ir_id: str) -> str:
        return str(self._ir.loc[ir_id, "text"])

    def record(self, ir_id: str) -> IrGraphRecord:
        from .triton.ttir import extract_ttir_graph

        return extract_ttir_graph(self.text(ir_id), kernel_name=str(self._ir.loc[ir_id, "kernel"]))

    def graph(self, ir_id: str) -> networkx.MultiDiGraph:
        return to_networkx(self.record(ir_id))

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The number of each operation in the IR of this dataset, from 1."""
        from .graph_arrays import vocabulary  # with numpy, which importing the dataset must not

        return vocabulary(self._ir.text)

    def arrays(self, ir_id: str) -> dict[str, numpy.ndarray]:
        """Return a graph as arrays: "node", "edge" and "edge_kind". See graph_arrays.py."""
        from .graph_arrays import graph_arrays

        return graph_arrays(self.record(ir_id), self.vocabulary)

    def to_pyg(self, ir_ids: Iterable[str]) -> list[Any]:
        """Return graphs as `torch_geometric.data.Data`, with x, edge_index, edge_type and ir_id."""
        import torch
        from torch_geometric.data import Data

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
        """Return what is wrong with the files: missing, or other than their checksums say."""
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
        import pandas

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
