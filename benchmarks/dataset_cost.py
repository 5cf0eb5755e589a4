"""`sundog bench data`: what the dataset costs: loading, writing, and extracting graphs."""

from __future__ import annotations

import os
import statistics
import tempfile

import torch

from sundog.dataset.triton.compile import lower

from .dataset_rates import FASTEST_CONFIG_S, make_base, time_load, time_write
from .figures import Figures
from .ir_time import LIMIT_MS, attention, measure

__all__ = ["main"]

ROWS, GRAPHS, GOAL_S = 1_000_000, 1_000, 10


def main(json_path: str) -> None:
    """Print a table and, with a path, write it for docs/measured.md."""
    rows = _files() + _graphs()
    text = (
        f"Made-up graphs of 120 nodes; a configuration is two rows and 100 samples, and the share "
        f"is that of one which takes {FASTEST_CONFIG_S * 1e3:.0f} ms. Graphs are of an "
        "attention-sized Triton kernel, 21 extractions each."
    )
    figures = Figures("The dataset", text, ["what", "measured", "goal"], rows)
    figures.show("sundog bench data", json_path)


def _files() -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        base = os.path.join(folder, "large")
        make_base(base, ROWS, GRAPHS)
        load = time_load(base)
        write = time_write(os.path.join(folder, "small"))
    seconds = load["read_s"] + load["networkx_s"]
    what = f"load {ROWS:,} rows and {GRAPHS:,} graphs, all as networkx"
    return [
        [what, f"{seconds:.1f} s ({load['cpu_s']:.1f} s of CPU)", f"{GOAL_S} s"],
        ["record a configuration", f"{write['median_us']:.0f} us ({write['share']:.2%})", "1 %"],
    ]


def _graphs() -> list[list[str]]:
    half = torch.empty(1 << 20, dtype=torch.float16, device="meta")
    args = (half, half, half, half, 0.125, 65536, 1024)
    options = {"BLOCK_M": 128, "BLOCK_N": 64, "HEAD": 64, "num_warps": 4, "num_stages": 3}
    rows = []
    for arch in ("sm_90", "gfx942"):
        for stage in ("ttir", "ttgir"):
            times, _ = measure(lower(attention, args, options, arch=arch, stage=stage))
            what = f"graph of the {stage.upper()} for {arch}"
            found = f"{statistics.median(times):.0f} ms (worst {max(times):.0f})"
            rows.append([what, found, f"{LIMIT_MS:.0f} ms"])
    return rows
