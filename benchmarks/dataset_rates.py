"""The dataset's two speed goals: loading a large base, and the cost of writing a row.

Loading: rows, runs, the parse of every graph, and every graph as a networkx graph: under 10 s on
2 cores. Writing: both rows of a configuration (started, ended), under 1 % of a tuning run, whose
fastest configurations take 25 ms.
"""

from __future__ import annotations

import statistics
import time

from sundog.dataset import IrGraphRecord, Recorder, RunInfo, ir_id_of, read
from sundog.dataset.identity import config_json, sample_id_of
from sundog.dataset.rows import format_row
from sundog.dataset.schema import csv_header

__all__ = ["FASTEST_CONFIG_S", "make_base", "time_load", "time_write"]

FASTEST_CONFIG_S = 0.025  # code generation alone, the cheapest that a tuner sees
_CONFIGS = 2000  # that are written
NUM_NODES, NUM_LINKS = 120, 180  # between attention in Helion (61, 86) and in TTGIR


def made_up_graph(number: int) -> IrGraphRecord:
    """A graph with as many fields as a real one; each number is another graph."""
    nodes = [
        {
            "id": f"g0:n{i}",
            "graph_id": 0,
            "op_kind": "call_function",
            "target": f"aten.op{(i * 7 + number) % 40}.default",
            "dtype": "torch.float16",
            "shape": ["u0", "64"],
            "concrete_shape": [None, 64],
            "stride": ["64", "1"],
            "args": [{"node": f"g0:n{i - 1}"}, {"literal": number}, None],
            "source_loc": f"pkg/kernel{number}.py:{i}",
            "lowering_class": "PointwiseLowering",
        }
        for i in range(NUM_NODES)
    ]
    links = [
        {
            "source": f"g0:n{i * 13 % NUM_NODES}",
            "target": f"g0:n{(i * 13 + 1) % NUM_NODES}",
            "key": i,
            "edge_kind": "data",
            "arg_positions": [0],
            "dtype": "torch.float16",
        }
        for i in range(NUM_LINKS)
    ]
    record: IrGraphRecord = {
        "schema_version": 1,
        "ir_id": "",
        "run_id": None,
        "directed": True,
        "multigraph": True,
        "graph": {"frontend": "made up", "kernel_name": f"kernel{number}"},
        "nodes": nodes,
        "links": links,
    }
    return {**record, "ir_id": ir_id_of(record)}


def made_up_run(number: int) -> RunInfo:
    source = {"name": "k", "path": "k.py", "text": f"def k{number}(): ...", "captures": {}}
    return RunInfo(f"kernel{number}", [{**source, "options": {}}], {}, [], {}, 1)


def make_base(base: str, num_rows: int, num_graphs: int) -> None:
    """Runs with a graph each, and the rows spread over them, as a recorder would write them."""
    per_run = max(num_rows // num_graphs // 2, 1)
    with open(f"{base}.csv", "w", encoding="utf-8") as file:
        file.write(csv_header())
        for run in range(num_graphs):
            graph = made_up_graph(run)
            with Recorder(base, made_up_run(run), graph=graph) as recorder:
                file.writelines(_rows(recorder, graph["ir_id"], per_run))


def _rows(recorder: Recorder, ir_id: str, count: int) -> list[str]:
    lines = []
    for i in range(count):
        config = config_json({"block_sizes": [16 << i % 4, 32], "num_warps": 1 << i % 4, "i": i})
        row = {
            "run_id": recorder.run_id,
            "kernel_id": recorder.kernel_id,
            "sample_id": sample_id_of(recorder.run_id, config),
            "timestamp_s": i * 0.1,
            "config_index": i,
            "generation": i // 100,
            "status": "started",
            "decorator": f"helion.Config(block_sizes=[{16 << i % 4}, 32], num_warps={1 << i % 4})",
            "config": config,
            "session": recorder.session,
            "repeat": 0,
            "world": 1,
        }
        times = dict.fromkeys(("perf_ms", "min_ms", "p10_ms", "p50_ms", "p90_ms"), 0.5 + i % 97)
        ended = {**row, "status": "ok", **times, "compile_time_s": 0.3, "num_samples": 100}
        ended["ir_id"] = ir_id
        lines += [format_row(row), format_row(ended)]
    return lines


def time_load(base: str) -> dict[str, float]:
    start, cpu = time.perf_counter(), time.process_time()
    data = read(base)
    loaded = time.perf_counter()
    nodes = sum(len(data.graph(ir_id)) for ir_id in data.graphs.ir_id)
    assert nodes == NUM_NODES * len(data.graphs)
    assert data.damage == []
    found = {"rows": len(data.rows), "graphs": len(data.graphs), "read_s": loaded - start}
    found["networkx_s"] = time.perf_counter() - loaded
    return {**found, "cpu_s": time.process_time() - cpu}


def time_write(base: str) -> dict[str, float]:
    """Seconds that one configuration's two rows take, with 100 samples in the second."""
    samples = [0.5 + i % 17 / 1000 for i in range(100)]
    seconds = []
    with Recorder(base, made_up_run(0)) as recorder:
        for i in range(_CONFIGS):
            config = {"block_sizes": [64, 32, i], "num_warps": 4, "num_stages": 3}
            start = time.perf_counter()
            trial = recorder.start(config, decorator=str(config))
            trial.end("ok", samples=samples, compile_time_s=0.3)
            seconds.append(time.perf_counter() - start)
    median, slow = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
    return {"median_us": median * 1e6, "p99_us": slow * 1e6, "share": median / FASTEST_CONFIG_S}
