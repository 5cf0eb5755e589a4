"""Kernel-artifact dataset: telemetry files that share keys, and the IR as a lossless graph.

    from sundog.dataset import Recorder, describe_run, read

    with Recorder("runs/matmul", describe_run(kernel, {"x": x, "y": y})) as recorder:
        trial = recorder.start({"BLOCK": 64})
        trial.end("ok", samples=[0.71, 0.70, 0.72])

    data = read("runs/matmul")        # data.rows and data.runs: pandas; data.graph(ir_id): networkx

Importing this imports none of torch, triton, helion, pandas and networkx: each comes when asked.
"""

from __future__ import annotations

from .files import check_base
from .identity import RunInfo, describe_run
from .ir_graph import IR_SCHEMA_VERSION, IrGraphRecord, canonical_json, ir_id_of, to_networkx
from .reader import Damage, Dataset, read
from .recorder import Recorder, Trial
from .schema import CSV_COLUMNS, META_SCHEMA_VERSION, STATUSES
from .shards import KernelData, load

__all__ = [
    "CSV_COLUMNS",
    "IR_SCHEMA_VERSION",
    "META_SCHEMA_VERSION",
    "STATUSES",
    "Damage",
    "Dataset",
    "IrGraphRecord",
    "KernelData",
    "Recorder",
    "RunInfo",
    "Trial",
    "canonical_json",
    "check_base",
    "describe_run",
    "ir_id_of",
    "load",
    "read",
    "to_networkx",
]
